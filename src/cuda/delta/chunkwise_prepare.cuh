#pragma once

// The first launch of v5_chunkwise: everything of a chunk that needs no state. chunkwise.cu tells the story.
//
// A block takes one chunk (32 tokens) of one value head. A warp has 8 tokens and 64 channels, a lane two of them; q, k and the decays of its 16
// elements stay in registers, q and k as they came. From the first token of a half of the chunk on, decays are multiplied up, to its last they are
// multiplied down, so that no logarithm loses bits:
//     P_i  over the half's tokens up to i            R_j  over the half's tokens after j
// Scores <q_i, k_j> and <k_i, k_j> with the decay from j to i then are products of
//     i, j in the same half       P_i q_i  and  k_j / P_j      (j <= i, so the quotient is a decay; see below)
//     j in the half before        P_i q_i  and  k_j R_j
// P starts at 2^90, not at 1, so that it and its reciprocal share the range of f32, with room for the lower terms of small numbers. Where it falls
// below 2^-90 at some token, in any channel (after 16 tokens of a gate of -7.8, say), the token's scores inside its half are summed up pair by
// pair instead (sum_pairs), whatever the decays: down to 0, they are exact.
//
// X = (I + L)^-1 is made of the scores in f32, and folded into what the chain multiplies with R: A T and T^T (d k), T = X diag(beta). So what
// cancels between tokens, with keys that are nearly parallel, cancels here, before anything is rounded for the chain. Products are of tf32
// numbers, one where the chain works with single bf16 terms, three (split operands) where it works with more.

#include <cstdint>
#include <type_traits>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/short_functions.cuh"
#include "cuda/device/warp.cuh"
#include "state/gate.h"

namespace delta_attention::chunkwise {

constexpr int kRowBlock = 8, kRowBlocks = kChunk / kRowBlock;  // tokens of a warp
constexpr int kHalf = kChunk / 2;
constexpr int kSlab = 64;                                     // channels of a warp
constexpr float kStart = 0x1p90f, kLeastQuotient = 0x1p-90f;  // of P

template <class Element_, int kKeys_>
struct PreparePolicy {
  using Element = Element_;
  static constexpr int kTerms = TermsOf<Element>::value;
  static constexpr int kKeys = kKeys_;  // channels, padded: 64, 128 or 256
  static constexpr int kWarps = kKeys / kSlab * kRowBlocks, kThreads = kWarps * kWarpSize;
  static constexpr int kWidth = kKeys < 128 ? kKeys : 128;  // channels whose copies are in shared memory at once
  static constexpr int kPasses = kKeys / kWidth;
  static constexpr int kBlocksAtOnce = kTerms == 1 && kKeys <= 128 ? 768 / kThreads : 1;  // a multiprocessor, by registers
  static constexpr int kScoresAtOnce = kWarps < 12 ? 8 : 12;  // tiles, those of the keys (6) among them, in whole rounds of the warps
  static constexpr Image kImage = {kTerms, kKeys};
};

/// Copies of k and q for the products, f32: of one pass over the channels, but end keys, which are needed until the end, of each.
enum Copies { kDecayedKeys = 0, kDecayedQueries = kChunk, kQuotientKeys = 2 * kChunk, kEndKeys = 3 * kChunk };

/// The place of a row's 16-byte piece among the copies. Rows are swizzled, so that neither eight that follow one another nor every fourth of 16 have
/// a piece in the same banks.
template <class P>
__device__ __forceinline__ int copy_piece(int row, int piece) {
  return swizzled<P::kWidth / 4>(row, piece ^ (row >> 2 & 2));
}

enum Matrix { kOfKeys, kOfQueries };
constexpr int kScorePitch = kChunk + 2;

/// The chunk that a block works on.
struct ChunkPlace {
  std::int64_t batch, value_head, key_head;
  Tokens tokens;
  unsigned char* image;
  bool exists;
};

template <class P>
struct PrepareShared {
  float copies[(kEndKeys + P::kPasses * kChunk) * P::kWidth];
  float block_decays[kRowBlocks][P::kKeys];        // over each warp's tokens
  union {
    float scores[2][kChunk * kScorePitch];         // by Matrix: <k_i, k_j> and <q_i, k_j>
    float squares[P::kKeys / kSlab][2][kChunk];    // by Matrix: parts of |k|^2 and |q|^2; needed before there are scores
  };
  float factors[2][kChunk];                        // what k and q are multiplied with: normalisation, scale
  float betas[kChunk];
  unsigned beyond_quotients;                       // rows, bit by bit
  ChunkPlace place;
};

// So that three blocks share a multiprocessor of sm_90, with 228 KB, of which each block costs one more.
static_assert(sizeof(PrepareShared<PreparePolicy<BFloat16, 128>>) <= 75 * 1024);

/// The sequence that has chunk number `chunk`, if any has: the last one whose first chunk's number is not greater. All lanes of a warp, which
/// share out what sequences are left.
__device__ __forceinline__ std::int64_t sequence_of(const Params& params, unsigned chunk) {
  const unsigned lane = threadIdx.x % kWarpSize;
  unsigned first = 0, left = static_cast<unsigned>(params.problem.sequences);
  while (left > 1) {
    const unsigned step = (left + kWarpSize - 1) / kWarpSize, n = lane * step;
    const bool is_later = n < left && first_chunk_of(params, first + n) <= chunk;
    const unsigned steps = __reduce_max_sync(kFullWarp, is_later ? n : 0);
    first += steps;
    left = left - steps < step ? left - steps : step;
  }
  return first;
}

/// (Blocks and heads are fewer than 2^31: 32-bit divisions are a quarter of the work of 64-bit ones.)
__device__ __forceinline__ ChunkPlace chunk_place_of(const Params& params, unsigned block, int image_bytes) {
  const Problem& p = params.problem;
  const auto heads = static_cast<unsigned>(p.value_heads);
  const unsigned number = block / heads, head = block % heads;
  const bool packed = p.cu_seqlens.present;
  const std::int64_t n = p.sequences == 1 ? 0 : packed ? sequence_of(params, number) : number / static_cast<unsigned>(params.chunks);
  const std::int64_t chunk = number - first_chunk_of(params, n);
  const Sequence sequence = p.sequence(n);
  const Chunking chunking = Chunking::of(p);
  if (packed && (chunk < 0 || chunk >= chunking.chunks(sequence.length))) return {};  // (before the first: wrong offsets)
  const Tokens tokens = ChunkCursor(chunking, sequence, chunk).next();
  const unsigned key_head = params.group == 1 ? head : head / static_cast<unsigned>(params.group);
  return {sequence.batch, head, key_head, tokens, params.factors + std::int64_t{block} * image_bytes, true};
}

/// This lane's elements: [row][channel].
using Rows = float[kRowBlock][2];

/// Which part of the chunk this thread has.
struct Share {
  int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int block = warp % kRowBlocks, slab = warp / kRowBlocks;
  int first_row = block * kRowBlock;
  int channel = slab * kSlab + lane * 2;
};

/// Gates into decays, in place. Beside products of bf16 numbers the special function unit is exact enough.
template <class P, int kRows, int kChannels>
__device__ __forceinline__ void make_decays(const Problem& p, float exp_a_log, const float (&bias)[kChannels], float (&x)[kRows][kChannels]) {
  const auto for_all = [&](const auto& decay) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int e = 0; e < kChannels; ++e) x[i][e] = decay(x[i][e], bias[e]);
    }
  };
  const float bound = p.gate_lower_bound;
  if constexpr (P::kTerms > 1) {
    return for_all([&](float g, float b) { return decay_factor(g, p.gate_space, exp_a_log, b, bound); });
  } else {
    switch (p.gate_space) {
      case GateSpace::log: return for_all([](float g, float) { return short_exp2(kLog2E * g); });
      case GateSpace::log2: return for_all([](float g, float) { return short_exp2(g); });
      case GateSpace::linear: return;
      case GateSpace::softplus: {
        const float slope = -kLog2E * exp_a_log;
        return for_all([=](float g, float b) { return short_exp2(slope * short_softplus(g + b)); });
      }
      case GateSpace::lower_bound: {
        const float slope = -kLog2E * exp_a_log, log2_bound = kLog2E * bound;
        return for_all([=](float g, float b) { return short_exp2(log2_bound * reciprocal_approx(1.0f + exp2_approx(fmaf(slope, g, slope * b)))); });
      }
    }
  }
}

/// How much of this lane's share exists.
struct Extent {
  int rows, channels;
  bool all;  // of the whole warp's share

  __device__ Extent(const Problem& p, const ChunkPlace& place, const Share& share)
      : rows(place.tokens.rows - share.first_row),
        channels(static_cast<int>(p.key_dim) - share.channel),
        all(rows >= kRowBlock && p.key_dim >= (share.slab + 1) * kSlab) {}
};

/// Rows of one operand on their way: all loads of a thread are started before any is waited for.
template <class Element>
struct RawRows {
  using Pair = std::conditional_t<sizeof(Element) == 2, unsigned, float2>;
  Pair pair[kRowBlock];

  /// Row 0 starts at element `start`. What does not exist is not read, and 0.
  __device__ __forceinline__ void start(const void* data, std::int64_t start, std::int64_t stride, const Extent& extent, bool pairs) {
    const Element* from = static_cast<const Element*>(data) + start;
    if (extent.all && pairs) {
#pragma unroll
      for (int i = 0; i < kRowBlock; ++i, from += stride) pair[i] = *reinterpret_cast<const Pair*>(from);
      return;
    }
#pragma unroll
    for (int i = 0; i < kRowBlock; ++i, from += stride) {
      const float low = i < extent.rows && extent.channels > 0 ? to_float(from[0]) : 0.0f;
      const float high = i < extent.rows && extent.channels > 1 ? to_float(from[1]) : 0.0f;
      if constexpr (sizeof(Element) == 2) {
        pair[i] = pack<Element>(low, high);
      } else {
        pair[i] = make_float2(low, high);
      }
    }
  }
  __device__ __forceinline__ float2 row(int i) const {
    if constexpr (sizeof(Element) == 2) return unpack<Element>(pair[i]);
    else return pair[i];
  }
};

/// Starts loading this lane's rows of q or k.
template <class Element>
__device__ __forceinline__ void start_heads(const ChunkPlace& place, const Share& share, const Extent& extent, const InputOperand& x,
                                            bool pairs, RawRows<Element>& raw) {
  const std::int64_t start = x.offset(place.batch, place.tokens.begin + share.first_row, place.key_head, share.channel);
  raw.start(x.data, start, x.strides[1], extent, pairs);
}

template <class P>
using HeadRows = RawRows<typename P::Element>;

/// This lane's elements of a gate with one decay a channel.
template <class Element>
__device__ __forceinline__ void load_gates(const Params& params, const ChunkPlace& place, const Share& share, const Extent& extent, Rows& x) {
  const InputOperand& gate = params.problem.log_decay;
  const std::int64_t start = gate.offset(place.batch, place.tokens.begin + share.first_row, place.value_head, share.channel);
  RawRows<Element> raw;
  raw.start(gate.data, start, gate.strides[1], extent, params.pairs_in_gate);
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    const float2 gates = raw.row(i);
    x[i][0] = gates.x;
    x[i][1] = gates.y;
  }
}

/// This lane's decays: 1 where there is no token or channel.
template <class P>
__device__ __forceinline__ void load_decays(const Params& params, const ChunkPlace& place, const Share& share, const Extent& extent,
                                            Rows& decays) {
  const Problem& p = params.problem;
  if (p.gate == Gate::none) {
#pragma unroll
    for (int i = 0; i < kRowBlock; ++i) decays[i][0] = decays[i][1] = 1.0f;
    return;
  }
  const DecayReader reader(p, place.value_head);
  if (p.gate == Gate::scalar) {
    float decay[1][1] = {{1.0f}};
    if (share.lane < kRowBlock && share.lane < extent.rows) {
      decay[0][0] = reader.load(place.batch, place.tokens.begin + share.first_row + share.lane, 0);
      const float bias[1] = {reader.bias(0)};
      make_decays<P>(p, reader.exp_a_log, bias, decay);
    }
#pragma unroll
    for (int i = 0; i < kRowBlock; ++i) decays[i][0] = decays[i][1] = __shfl_sync(kFullWarp, decay[0][0], i);
    return;
  }
  float bias[2] = {};
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e < extent.channels) bias[e] = reader.bias(share.channel + e);
  }
  switch (p.log_decay.dtype) {
    case DType::f16: load_gates<Half>(params, place, share, extent, decays); break;
    case DType::bf16: load_gates<BFloat16>(params, place, share, extent, decays); break;
    default: load_gates<float>(params, place, share, extent, decays);
  }
  make_decays<P>(p, reader.exp_a_log, bias, decays);
  if (extent.all) return;
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (i >= extent.rows || e >= extent.channels) decays[i][e] = 1.0f;
    }
  }
}

/// Parts of the squared lengths of this warp's rows of k and q.
template <class P>
__device__ __forceinline__ void sum_squares(const Share& share, const HeadRows<P>& k, const HeadRows<P>& q, PrepareShared<P>& shared) {
  float squares[2 * kRowBlock];
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    const float2 in_k = k.row(i), in_q = q.row(i);
    squares[i] = in_k.x * in_k.x + in_k.y * in_k.y;
    squares[kRowBlock + i] = in_q.x * in_q.x + in_q.y * in_q.y;
  }
  const float sum = spread_sum<kWarpSize, 1>(squares, share.lane);
  const int which = share.lane / 2;  // of the sums
  if (share.lane % 2 == 0) shared.squares[share.slab][which / kRowBlock][share.first_row + which % kRowBlock] = sum;
}

/// What a row of k or q is multiplied with: lane i has that of the warp's row i of k, lane 8 + i that of q. The first slab's warps keep it for
/// later.
template <class P>
__device__ __forceinline__ float row_factor(const Problem& p, const Share& share, PrepareShared<P>& shared) {
  const int which = share.lane / kRowBlock % 2, row = share.first_row + share.lane % kRowBlock;
  float factor = which == kOfQueries ? p.scale : 1.0f;
  if (p.qk_l2norm) {
    float squares = 0.0f;
#pragma unroll
    for (int slab = 0; slab < P::kKeys / kSlab; ++slab) squares += shared.squares[slab][which][row];
    factor *= l2norm_factor(squares);
  }
  if (share.slab == 0 && share.lane < 2 * kRowBlock) shared.factors[which][row] = factor;
  return factor;
}

/// What the decays of other row blocks multiply to, for this lane's channels: of its half's other one, if that comes before or after; of the
/// other half, if that does.
struct Around {
  float before[2], after[2], half_before[2], half_after[2];

  template <class P>
  __device__ __forceinline__ Around(const Share& share, const PrepareShared<P>& shared) {
    const auto of_block = [&](int block) { return *reinterpret_cast<const float2*>(&shared.block_decays[block][share.channel]); };
    const int in_other_half = (share.block ^ 2) & 2;
    const float2 beside = of_block(share.block ^ 1), first = of_block(in_other_half), second = of_block(in_other_half + 1);
    const auto set = [](float2 x, bool is_before, float(&b)[2], float(&a)[2]) {
      b[0] = is_before ? x.x : 1.0f;
      b[1] = is_before ? x.y : 1.0f;
      a[0] = is_before ? 1.0f : x.x;
      a[1] = is_before ? 1.0f : x.y;
    };
    set(beside, share.block % 2 == 1, before, after);
    set(make_float2(first.x * second.x, first.y * second.y), share.block >= 2, half_before, half_after);
  }
};

/// A pair of neighbouring elements, the first one `low`, as terms in planes of `plane` bytes.
template <class P>
__device__ __forceinline__ void store_terms(float low, float high, int plane, unsigned char* to) {
  unsigned terms[P::kTerms];
  split(low, high, terms);
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) *reinterpret_cast<unsigned*>(to + t * plane) = terms[t];
}

/// Where this lane's elements go, in the image and among the copies: its channels of row 0; those of row i of the block differ from it by i
/// rows, and by an exclusive or with i in the number of their 16-byte piece. (Images are aligned to 128 bytes, so that the pointer can be
/// changed as the piece's number.)
template <class P>
struct Targets {
  static_assert(P::kImage.bytes() % 128 == 0 && P::kImage.wide() % 128 == 0);
  std::uintptr_t image;
  unsigned copies;  // in shared memory

  __device__ Targets(const Share& share, unsigned char* chunk_image, PrepareShared<P>& shared)
      : image(reinterpret_cast<std::uintptr_t>(chunk_image + share.first_row * P::kKeys * 2 + share.channel / 8 * 16 + share.channel % 8 * 2)),
        copies(shared_address(shared.copies) + copy_piece<P>(share.first_row, share.channel % P::kWidth / 4) * 16 + share.channel % 4 * 4) {}

  /// A pair of channels of row i into a matrix of the image.
  __device__ __forceinline__ void store_factor(int matrix, int i, float low, float high) const {
    store_terms<P>(low, high, P::kImage.wide(), reinterpret_cast<unsigned char*>(image ^ (i * 16)) + matrix + i * P::kKeys * 2);
  }
  __device__ __forceinline__ float* copy_at(int copy, int i) const {
    return shared_pointer<float>((copies ^ (i * 16)) + (copy + i) * P::kWidth * 4);
  }
  /// The same into a copy. (Where scores are products of single tf32 numbers, copies are rounded to that.)
  __device__ __forceinline__ void store_copy(int copy, int i, float low, float high) const {
    if constexpr (P::kTerms == 1) {
      low = round_for_tf32(low);
      high = round_for_tf32(high);
    }
    *reinterpret_cast<float2*>(copy_at(copy, i)) = make_float2(low, high);
  }
};

/// P before this warp's first token. Eight tokens' decay that is hardly a number any more is taken for 0.
__device__ __forceinline__ float first_p(float before) { return before < 0x1p-120f ? 0.0f : kStart * before; }

/// Row i of k or q, multiplied with its factor; `factor`: of row_factor.
template <class Element>
__device__ __forceinline__ void scale_row(const RawRows<Element>& raw, Matrix which, int i, float factor, float (&x)[2]) {
  const float2 row = raw.row(i);
  const float by = __shfl_sync(kFullWarp, factor, which * kRowBlock + i);
  x[0] = row.x * by;
  x[1] = row.y * by;
}

/// What this lane's rows and channels give with the decays before them: factors of the chain, and copies that scores are made of. Whether any of
/// the warp's quotients may be out of range.
template <class P>
__device__ __forceinline__ bool store_from_start(const Problem& p, const Share& share, const HeadRows<P>& raw_k, const HeadRows<P>& raw_q,
                                                 float factor, const Rows& decays, unsigned char* image, PrepareShared<P>& shared) {
  const Around around(share, shared);
  const Targets<P> to(share, image, shared);
  const bool is_delta = p.update == Update::delta;
  float up[2] = {first_p(around.before[0]), first_p(around.before[1])}, reciprocals = 0.0f;
  const float from_start[2] = {1.0f / kStart * around.half_before[0], 1.0f / kStart * around.half_before[1]};
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    float k[2], q[2], quotient[2];
    scale_row(raw_k, kOfKeys, i, factor, k);
    scale_row(raw_q, kOfQueries, i, factor, q);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      up[e] *= decays[i][e];
      const float reciprocal = reciprocal_approx(up[e]);
      reciprocals += reciprocal;
      quotient[e] = k[e] * reciprocal;
      k[e] *= up[e];
      q[e] *= up[e];
    }
    if (is_delta) {
      to.store_copy(kDecayedKeys, i, k[0], k[1]);
      to.store_factor(P::kImage.predict(), i, -k[0] * from_start[0], -k[1] * from_start[1]);
    }
    to.store_copy(kDecayedQueries, i, q[0], q[1]);
    to.store_factor(P::kImage.read(), i, q[0] * from_start[0], q[1] * from_start[1]);
    to.store_copy(kQuotientKeys, i, quotient[0], quotient[1]);
  }
  return __any_sync(kFullWarp, !(reciprocals <= 1.0f / kLeastQuotient));  // true of NaN, too
}

/// Makes quotients 0 that are out of range; their rows go into `shared`.
template <class P>
__device__ __forceinline__ void take_out_quotients(const Share& share, const Rows& decays, unsigned char* image, PrepareShared<P>& shared) {
  const Around around(share, shared);
  const Targets<P> to(share, image, shared);
  float up[2] = {first_p(around.before[0]), first_p(around.before[1])};
  unsigned beyond = 0;
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      up[e] *= decays[i][e];
      if (up[e] >= kLeastQuotient) continue;
      to.copy_at(kQuotientKeys, i)[e] = 0.0f;
      beyond |= 1u << (share.first_row + i);
    }
  }
  beyond = __reduce_or_sync(kFullWarp, beyond);
  if (share.lane == 0) atomicOr(&shared.beyond_quotients, beyond);
}

/// The same with the decays after them.
template <class P>
__device__ __forceinline__ void store_to_end(const Problem& p, const Share& share, const HeadRows<P>& raw_k, float factor, const Rows& decays,
                                             unsigned char* image, PrepareShared<P>& shared) {
  const Around around(share, shared);
  const Targets<P> to(share, image, shared);
  const bool is_delta = p.update == Update::delta;
  float down[2] = {around.after[0], around.after[1]};
#pragma unroll
  for (int i = kRowBlock - 1; i >= 0; --i) {
    float k[2];
    scale_row(raw_k, kOfKeys, i, factor, k);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      k[e] *= down[e];
      down[e] *= decays[i][e];
    }
    to.store_copy(kEndKeys + share.channel / P::kWidth * kChunk, i, k[0], k[1]);
    if (!is_delta) {
      const float beta = shared.betas[share.first_row + i];
      to.store_factor(P::kImage.accumulate(), i, k[0] * around.half_after[0] * beta, k[1] * around.half_after[1] * beta);
    }
  }
  if (share.block == 0) {
    const float2 over_chunk = make_float2(down[0] * around.half_after[0], down[1] * around.half_after[1]);
    reinterpret_cast<float2*>(image + P::kImage.decays())[share.channel / 2] = over_chunk;
  }
}

/// One tile of scores: 16 rows by 8 keys.
struct Tile {
  int first_row, first_key;
  bool quotients;  // of the keys, or end keys
};

/// The six tiles whose scores are not all hidden.
constexpr int kTilesOfScores = 6;
__device__ __forceinline__ Tile tile_of(int i) {
  if (i < 2) return {0, i * 8, true};
  return {kHalf, (i - 2) * 8, i >= 4};
}

/// c += a b of f32 numbers: one tf32 product of operands that are rounded to that, or, in f32 precision, three of operands in two terms.
template <class P>
__device__ __forceinline__ void multiply_add_f32(const unsigned (&a)[4], const unsigned (&b)[2], float (&c)[4]) {
  if constexpr (P::kTerms == 1) {
    multiply_add_tf32(a, b, c);
  } else {
    unsigned a_high[4], b_high[2], a_low[4], b_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a_high[i] = to_tf32(__uint_as_float(a[i]));
      a_low[i] = to_tf32(__uint_as_float(a[i]) - __uint_as_float(a_high[i]));
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      b_high[i] = to_tf32(__uint_as_float(b[i]));
      b_low[i] = to_tf32(__uint_as_float(b[i]) - __uint_as_float(b_high[i]));
    }
    multiply_add_tf32(a_low, b_high, c);
    multiply_add_tf32(a_high, b_low, c);
    multiply_add_tf32(a_high, b_high, c);
  }
}

/// Scores number [begin, end), six tiles of <k_i, k_j> and then of <q_i, k_j>, over the channels of pass `pass`, added to those of the passes
/// before. `warp` of `warps` that share the work.
template <class P>
__device__ __forceinline__ void multiply_scores(const Problem& p, int pass, int begin, int end, int warp, int warps, PrepareShared<P>& shared) {
  const int lane = threadIdx.x % kWarpSize;
  const auto* copies = reinterpret_cast<const uint4*>(shared.copies);
  for (int job = begin + warp; job < end; job += warps) {
    const int matrix = job / kTilesOfScores;
    if (matrix == kOfKeys && p.update == Update::additive) continue;
    const Tile tile = tile_of(job % kTilesOfScores);
    // Where the first channels are; those of later steps differ from it in bits that exclusive or changes, also in a swizzled row; from 128 bytes
    // on, by as many.
    const int queries = matrix == kOfKeys ? kDecayedKeys : kDecayedQueries;
    const int keys = tile.quotients ? static_cast<int>(kQuotientKeys) : kEndKeys + pass * kChunk;
    const unsigned a_start = shared_address(copies + copy_piece<P>(queries + tile.first_row + lane % 16, lane / 16));
    const unsigned b_start = shared_address(copies + copy_piece<P>(keys + tile.first_key + lane % 8, lane / 8));
    float sums[4] = {};
#pragma unroll
    for (int c = 0; c < P::kWidth; c += 16) {
      unsigned a[2][4], b[4];
      const int in_swizzle = c * 4 % 128, beyond = c * 4 - in_swizzle;
      load_matrices((a_start ^ in_swizzle) + beyond, a[0]);
      load_matrices((a_start ^ (in_swizzle + 32)) + beyond, a[1]);
      load_matrices((b_start ^ in_swizzle) + beyond, b);
      multiply_add_f32<P>(a[0], {b[0], b[1]}, sums);
      multiply_add_f32<P>(a[1], {b[2], b[3]}, sums);
    }
    const float unit = tile.quotients ? 1.0f : 1.0f / kStart;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = tile.first_row + half * 8 + lane / 4, column = tile.first_key + lane % 4 * 2;
      float2* to = reinterpret_cast<float2*>(&shared.scores[matrix][row * kScorePitch + column]);
      const float2 before = pass == 0 ? make_float2(0.0f, 0.0f) : *to;
      *to = make_float2(fmaf(sums[half * 2], unit, before.x), fmaf(sums[half * 2 + 1], unit, before.y));
    }
  }
}

/// Scores of row `row` with the keys of its own half, pair by pair: right for any decay. One warp.
template <class P>
__device__ __forceinline__ void sum_pairs(const Params& params, Matrix matrix, int row, PrepareShared<P>& shared) {
  const Problem& p = params.problem;
  const ChunkPlace& place = shared.place;
  if (row >= place.tokens.rows) return;
  const int lane = threadIdx.x % kWarpSize, first = row / kHalf * kHalf;
  const DecayReader reader(p, place.value_head);
  const std::int64_t token = place.tokens.begin + row;
  const auto element = [&](const InputOperand& x, int back, std::int64_t channel) {
    return x.load(x.offset(place.batch, token - back, place.key_head, channel));
  };
#pragma unroll 1
  for (int nearest = 0; nearest <= row - first; nearest += kRowBlock) {  // tokens back; some keys at a time, for the registers' sake
    float sums[kRowBlock] = {};
    for (std::int64_t channel = lane; channel < p.key_dim; channel += kWarpSize) {
      const std::int64_t gate_channel = p.gate == Gate::channel ? channel : 0;
      const auto decay = [&](int back) { return reader.decay(reader.load(place.batch, token - back, gate_channel), gate_channel); };
      float own = element(matrix == kOfKeys ? p.k : p.q, 0, channel) * shared.factors[matrix][row];
      for (int back = 0; back < nearest; ++back) own *= decay(back);
#pragma unroll
      for (int i = 0; i < kRowBlock; ++i) {
        const int back = nearest + i;
        if (row - back < first) break;
        sums[i] += own * element(p.k, back, channel) * shared.factors[kOfKeys][row - back];
        own *= decay(back);
      }
    }
    warp_sums(sums);
#pragma unroll
    for (int i = 0; i < kRowBlock; ++i) {
      const int column = row - nearest - i;
      if (lane == 0 && column >= first) shared.scores[matrix][row * kScorePitch + column] = sums[i];
    }
  }
}

/// L_ij = beta_i <k_i, k_j>, j < i, of which shared.scores[kOfKeys] holds the scores; (I + L)^-1 takes their place, block by block.
///
/// The inverses of the two 16 x 16 blocks on the diagonal, by substitution in f32. One warp, a lane a column of either.
template <class P>
__device__ __forceinline__ void invert_diagonal(PrepareShared<P>& shared) {
  const int lane = threadIdx.x % kWarpSize, first = lane / kHalf * kHalf, column = lane % kHalf;
  float* block = &shared.scores[kOfKeys][first * kScorePitch + first];
  float x[kHalf];
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < i; ++j) sums[j % 2] = fmaf(block[i * kScorePitch + j], x[j], sums[j % 2]);
    x[i] = (i == column ? 1.0f : 0.0f) - shared.betas[first + i] * (sums[0] + sums[1]);
  }
  __syncwarp();  // every lane has read the block
#pragma unroll
  for (int i = 0; i < kHalf; ++i) block[i * kScorePitch + column] = i >= column ? x[i] : 0.0f;
}

/// One element of a product of 16 x 16 blocks: row `row` of a and column `column` of b.
__device__ __forceinline__ float product_element(const float* a, const float* b, int row, int column) {
  float sums[2] = {};
#pragma unroll
  for (int k = 0; k < kHalf; k += 2) {
    const float2 in_a = *reinterpret_cast<const float2*>(&a[row * kScorePitch + k]);
    sums[0] = fmaf(in_a.x, b[k * kScorePitch + column], sums[0]);
    sums[1] = fmaf(in_a.y, b[(k + 1) * kScorePitch + column], sums[1]);
  }
  return sums[0] + sums[1];
}

/// Calls visit(row, column) for this thread's elements of a 16 x 16 block.
template <class P, class Visit>
__device__ __forceinline__ void for_block(const Visit& visit) {
#pragma unroll
  for (int i = threadIdx.x; i < kHalf * kHalf; i += P::kThreads) visit(i / kHalf, i % kHalf);
}

/// The block below the diagonal, from its two neighbours on it: X21 = -X22 L21 X11. All threads.
template <class P>
__device__ __forceinline__ void merge_inverses(PrepareShared<P>& shared) {
  float* upper = shared.scores[kOfKeys];  // X11
  float *right = upper + kHalf, *below = upper + kHalf * kScorePitch, *lower = below + kHalf;
  for_block<P>([&](int row, int column) {  // L21 X11, where nothing else is
    right[row * kScorePitch + column] = shared.betas[kHalf + row] * product_element(below, upper, row, column);
  });
  __syncthreads();
  for_block<P>([&](int row, int column) { below[row * kScorePitch + column] = -product_element(lower, right, row, column); });
  __syncthreads();
}

/// Sums over the 16 tokens of a half take two products, `step` 0 and 1. This is the token of element t of their operands, and the one after it that
/// of element t + 4: any order will do that both operands have, and in this one neither scores nor copies have bank conflicts.
__device__ __forceinline__ int token_in_half(int step, int t) { return t * 4 + step * 2; }

/// x as an operand of multiply_add_f32.
template <class P>
__device__ __forceinline__ unsigned operand(float x) {
  return __float_as_uint(P::kTerms == 1 ? round_for_tf32(x) : x);
}

/// T^T (d k) into the image: row i is beta_i times the sum over j >= i of X_ji and token j's key at the chunk's end. A warp makes 16 channels of
/// all tokens, the sums over the first half's j decayed over the second half.
template <class P>
__device__ __forceinline__ void fold_keys(unsigned char* image, const PrepareShared<P>& shared) {
  static_assert(P::kWarps * 16 == P::kKeys);
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int first_channel = threadIdx.x / kWarpSize * 16, in_pass = first_channel % P::kWidth;
  const float* keys = shared.copies + (kEndKeys + first_channel / P::kWidth * kChunk) * P::kWidth;
  // The key of the half's token token_in_half(step, t), or the one after it: from the first token's, others differ in bits of the piece's number.
  const int first = copy_piece<P>(token_in_half(0, t), (in_pass + g) / 4) * 4 + g % 4;
  const auto key = [&](int half, int after, int tile) {
    return __float_as_uint(keys[(first ^ (after ^ tile * 2) * 4) + (half * kHalf + after) * P::kWidth]);
  };
  float sums[2][2][4] = {};  // [half of the rows][tile of the channels]
#pragma unroll
  for (int block = 0; block < kRowBlocks; ++block) {
    const int in_half = block / 2, after = block % 2 * 2, j = in_half * kHalf + token_in_half(0, t) + after;
    unsigned b[2][2];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      b[tile][0] = key(in_half, after, tile);
      b[tile][1] = key(in_half, after + 1, tile);
    }
    if (block == kRowBlocks / 2) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const auto decay_of = [&](int of) {
          return *reinterpret_cast<const float2*>(&shared.block_decays[of][first_channel + tile * 8 + t * 2]);
        };
        const float2 third = decay_of(2), fourth = decay_of(3);
#pragma unroll
        for (int e = 0; e < 4; ++e) sums[0][tile][e] *= e % 2 == 0 ? third.x * fourth.x : third.y * fourth.y;
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (block < half * 2) continue;
      const float* x = &shared.scores[kOfKeys][j * kScorePitch + half * kHalf + g];
      const unsigned a[4] = {operand<P>(x[0]), operand<P>(x[8]), operand<P>(x[kScorePitch]), operand<P>(x[kScorePitch + 8])};
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) multiply_add_f32<P>(a, b[tile], sums[half][tile]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 8 + g;
    const float beta = shared.betas[row];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float* sum = &sums[i / 2][tile][i % 2 * 2];
      const int at = P::kImage.accumulate() + wide_offset<P::kKeys>(row, first_channel + tile * 8 + t * 2);
      store_terms<P>(beta * sum[0], beta * sum[1], P::kImage.wide(), image + at);
    }
  }
}

/// A T into the image: element (i, j) is beta_j times the sum over l from j to i of A_il X_lj. A warp makes a tile of 16 by 8 at a time. Where it
/// is not finite, what should not be summed may be why: then it is summed element by element.
template <class P>
__device__ __forceinline__ void fold_scores(unsigned char* image, const PrepareShared<P>& shared) {
  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const float *queries = shared.scores[kOfQueries], *x = shared.scores[kOfKeys];
  for (int tile = threadIdx.x / kWarpSize; tile < 6; tile += P::kWarps) {
    const int first_row = tile < 2 ? 0 : kHalf, first_column = (tile < 2 ? tile : tile - 2) * 8;
    float sums[4] = {};
    for (int in_half = first_column / kHalf; in_half <= first_row / kHalf; ++in_half) {
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int l = in_half * kHalf + token_in_half(step, t);
        unsigned a[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = first_row + half * 8 + g;
          const float2 score = *reinterpret_cast<const float2*>(&queries[row * kScorePitch + l]);
          a[half] = operand<P>(l <= row ? score.x : 0.0f);
          a[2 + half] = operand<P>(l + 1 <= row ? score.y : 0.0f);
        }
        const float* in_x = &x[l * kScorePitch + first_column + g];
        multiply_add_f32<P>(a, {operand<P>(in_x[0]), operand<P>(in_x[kScorePitch])}, sums);
      }
    }
    const bool finite = isfinite(sums[0]) && isfinite(sums[1]) && isfinite(sums[2]) && isfinite(sums[3]);
    const bool apart = __any_sync(kFullWarp, !finite);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + half * 8 + g, column = first_column + t * 2;
      float product[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = sums[half * 2 + e];
        if (apart) {
          sum = 0.0f;
#pragma unroll 1
          for (int l = column + e; l <= row; ++l) sum = fmaf(queries[row * kScorePitch + l], x[l * kScorePitch + column + e], sum);
        }
        product[e] = column + e <= row ? sum * shared.betas[column + e] : 0.0f;
      }
      store_terms<P>(product[0], product[1], P::kImage.square(), image + P::kImage.attend() + square_offset(row, column));
    }
  }
}

/// A diag(beta) into the image, for the additive update. All threads.
template <class P>
__device__ __forceinline__ void store_scores(unsigned char* image, const PrepareShared<P>& shared) {
  for (int i = threadIdx.x; i < kChunk * kChunk / 2; i += P::kThreads) {
    const int row = i / (kChunk / 2), column = i % (kChunk / 2) * 2;
    const float* x = &shared.scores[kOfQueries][row * kScorePitch + column];
    store_terms<P>(column <= row ? x[0] * shared.betas[column] : 0.0f, column + 1 <= row ? x[1] * shared.betas[column + 1] : 0.0f,
                   P::kImage.square(), image + P::kImage.attend() + square_offset(row, column));
  }
}

/// All factors of one chunk of one value head. All threads of the block.
template <class P>
__device__ __forceinline__ void prepare_chunk(const Params& params, unsigned block, PrepareShared<P>& shared) {
  const Problem& p = params.problem;
  const Share share;
  if (share.warp == 0) {  // one warp finds it for all: instructions are what bounds this launch
    const ChunkPlace found = chunk_place_of(params, block, P::kImage.bytes());
    if (share.lane == 0) {
      shared.place = found;
      shared.beyond_quotients = 0;
    }
  }
  __syncthreads();
  const ChunkPlace place = shared.place;
  if (!place.exists) return;
  if (threadIdx.x < kChunk) {
    const int row = threadIdx.x;
    shared.betas[row] = row < place.tokens.rows ? load_beta(p, place.batch, place.tokens.begin + row, place.value_head) : 0.0f;
  }

  Rows decays;
  const Extent extent(p, place, share);
  HeadRows<P> k, q;
  start_heads(place, share, extent, p.k, params.pairs_in_k, k);
  start_heads(place, share, extent, p.q, params.pairs_in_q, q);
  load_decays<P>(params, place, share, extent, decays);
  if (p.qk_l2norm) sum_squares(share, k, q, shared);
  float block_decay[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    block_decay[0] *= decays[i][0];
    block_decay[1] *= decays[i][1];
  }
  *reinterpret_cast<float2*>(&shared.block_decays[share.block][share.channel]) = make_float2(block_decay[0], block_decay[1]);
  __syncthreads();

  const float factor = row_factor(p, share, shared);
  const bool is_delta = p.update == Update::delta;
  constexpr int kScores = 2 * kTilesOfScores;
#pragma unroll
  for (int pass = 0; pass < P::kPasses; ++pass) {
    if (pass > 0) __syncthreads();  // the products of the pass before have read their copies
    if (P::kPasses == 1 || share.channel / P::kWidth == pass) {
      const bool any_beyond = store_from_start(p, share, k, q, factor, decays, place.image, shared);
      if (any_beyond) take_out_quotients(share, decays, place.image, shared);
      store_to_end(p, share, k, factor, decays, place.image, shared);
    }
    __syncthreads();
    multiply_scores(p, pass, 0, pass + 1 < P::kPasses ? kScores : P::kScoresAtOnce, share.warp, P::kWarps, shared);
  }
  __syncthreads();
  const unsigned beyond = shared.beyond_quotients;
  if (beyond != 0) {
    multiply_scores(p, P::kPasses - 1, P::kScoresAtOnce, kScores, share.warp, P::kWarps, shared);
    __syncthreads();
#pragma unroll 1
    for (int i = share.warp; i < 2 * kChunk; i += P::kWarps) {
      if (beyond >> i / 2 & 1) sum_pairs(params, i % 2 == 0 ? kOfKeys : kOfQueries, i / 2, shared);
    }
    __syncthreads();
  }
  // The last warp inverts while the others make what scores are left.
  if (share.warp == P::kWarps - 1) {
    if (is_delta) invert_diagonal(shared);
  } else if (beyond == 0) {
    multiply_scores(p, P::kPasses - 1, P::kScoresAtOnce, kScores, share.warp, P::kWarps - 1, shared);
  }
  __syncthreads();
  if (!is_delta) return store_scores<P>(shared.place.image, shared);
  merge_inverses(shared);
  fold_keys<P>(shared.place.image, shared);
  fold_scores<P>(shared.place.image, shared);
}

}  // namespace delta_attention::chunkwise
