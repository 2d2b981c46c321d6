#pragma once

// The first launch of v5_chunkwise: everything of a chunk that needs no state. chunkwise.cu tells the story.
//
// A block takes one chunk (32 tokens) of one value head. A warp has 8 tokens, one block of rows, and 64 channels, a lane two of them; q, k
// and the decays of its 16 elements stay in registers. From a row block's first token on, decays are multiplied up, to its last they are
// multiplied down, so that no logarithm loses bits and no exponential overflows:
//     P_i  over the block's tokens up to i            R_j  over the block's tokens after j            D  over the whole block
// Scores <q_i, k_j> and <k_i, k_j> with the decay from j to i then are products of
//     i, j in the same block       P_i q_i  and  k_j / P_j      (j <= i, so the quotient is a decay; see below)
//     j in the block before        P_i q_i  and  k_j R_j
//     j two or three blocks back   the same, with the D of the blocks between on either side
// Only k_j / P_j grows. Where P falls below 2^-110 at some token, in any channel, the token's scores inside its block are summed up pair by
// pair instead (sum_pairs), whatever the decays: down to 0, they are exact. Scores are tf32 products, one where the chain works
// with single bf16 terms, three (split operands) where it works with more.

#include <cstdint>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/warp.cuh"
#include "state/gate.h"

namespace delta_attention::chunkwise {

constexpr int kRowBlock = 8, kRowBlocks = kChunk / kRowBlock;
constexpr int kSlab = 64;               // channels of a warp
constexpr float kLeastQuotient = 0x1p-110f;  // of P

template <class Element_, int kKeys_>
struct PreparePolicy {
  using Element = Element_;
  static constexpr int kTerms = TermsOf<Element>::value;
  static constexpr int kKeys = kKeys_;  // channels, padded: 64, 128 or 256
  static constexpr int kWarps = kKeys / kSlab * kRowBlocks, kThreads = kWarps * kWarpSize;
  static constexpr int kWidth = kKeys < 128 ? kKeys : 128;  // channels whose copies are in shared memory at once
  static constexpr int kPasses = kKeys / kWidth;
  static constexpr Image kImage = {kTerms, kKeys};
};

/// Copies of k and q for the products, f32, rows swizzled like 16-bit ones.
enum Copies { kDecayedKeys = 0, kDecayedQueries = kChunk, kQuotientKeys = 2 * kChunk, kEndKeys = 3 * kChunk };
constexpr int kCopies = 4 * kChunk - kRowBlock;  // nobody reads the last block's end keys

enum Matrix { kOfKeys, kOfQueries };
constexpr int kScorePitch = kChunk + 4;

template <class P>
struct PrepareShared {
  float copies[kCopies * P::kWidth];
  float block_decays[kRowBlocks][P::kKeys];        // D
  float scores[2][kChunk * kScorePitch];           // by Matrix: <k_i, k_j> and <q_i, k_j>
  float squares[P::kKeys / kSlab][2][kChunk];      // by Matrix: parts of |k|^2 and |q|^2
  float factors[2][kChunk];                        // what k and q are multiplied with: normalisation, scale
  float betas[kChunk];
  unsigned beyond_quotients;                       // rows, bit by bit
};

/// The chunk that a block works on.
struct ChunkPlace {
  std::int64_t sequence, batch, value_head, key_head;
  Tokens tokens;
  unsigned char* image;
  bool exists;
};

__device__ __forceinline__ ChunkPlace chunk_place_of(const Params& params, std::int64_t block, int image_bytes) {
  const Problem& p = params.problem;
  const std::int64_t chunk = block / p.value_heads, head = block % p.value_heads;
  std::int64_t n = 0;
  if (params.first_chunks == nullptr) {
    n = chunk / params.chunks;
  } else {
    std::int64_t beyond = p.sequences;  // the last n with first_chunks[n] <= chunk
    if (chunk >= params.first_chunks[p.sequences]) return {};
    while (n + 1 < beyond) {
      const std::int64_t middle = (n + beyond) / 2;
      (params.first_chunks[middle] <= chunk ? n : beyond) = middle;
    }
  }
  const Sequence sequence = p.sequence(n);
  const Tokens tokens = ChunkCursor(Chunking::of(p), sequence, chunk - chunks_of(params, n).first).next();
  return {n, sequence.batch, head, p.key_head(head), tokens, params.factors + block * image_bytes, true};
}

/// This lane's elements of a row block: [row][channel].
using Rows = float[kRowBlock][2];

/// Which part of the chunk this thread has.
struct Share {
  int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int block = warp % kRowBlocks, slab = warp / kRowBlocks;
  int first_row = block * kRowBlock;
  int channel = slab * kSlab + lane * 2;
};

template <class Element>
struct alignas(sizeof(Element) * 2) ElementPair {
  Element low, high;
};

/// Rows of one operand whose row 0 starts at element `start`; what does not exist is 0.
template <class Element>
__device__ __forceinline__ void load_rows(const void* data, std::int64_t start, std::int64_t stride, int rows, int channels, bool pairs,
                                             Rows& x) {
  const Element* from = static_cast<const Element*>(data) + start;
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i, from += stride) {
    x[i][0] = x[i][1] = 0.0f;
    if (i < rows && pairs && channels > 0) {
      const auto pair = *reinterpret_cast<const ElementPair<Element>*>(from);
      x[i][0] = to_float(pair.low);
      x[i][1] = to_float(pair.high);
    } else if (i < rows) {
      if (channels > 0) x[i][0] = to_float(from[0]);
      if (channels > 1) x[i][1] = to_float(from[1]);
    }
  }
}

/// This lane's rows of q or k.
template <class P>
__device__ __forceinline__ void load_heads(const Problem& p, const ChunkPlace& place, const Share& share, const InputOperand& x, bool pairs,
                                           Rows& rows) {
  const std::int64_t start = x.offset(place.batch, place.tokens.begin + share.first_row, place.key_head, share.channel);
  load_rows<typename P::Element>(x.data, start, x.strides[1], place.tokens.rows - share.first_row,
                                 static_cast<int>(p.key_dim) - share.channel, pairs, rows);
}

/// This lane's decays: 1 where there is no token or channel.
__device__ __forceinline__ void load_decays(const Params& params, const ChunkPlace& place, const Share& share, Rows& decays) {
  const Problem& p = params.problem;
  const int rows = place.tokens.rows - share.first_row, channels = static_cast<int>(p.key_dim) - share.channel;
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) decays[i][0] = decays[i][1] = 1.0f;
  if (p.gate == Gate::none) return;
  const InputOperand& gate = p.log_decay;
  const DecayReader reader(p, place.value_head);
  const std::int64_t token = place.tokens.begin + share.first_row;
  if (p.gate == Gate::scalar) {
    const bool own = share.lane < kRowBlock && share.lane < rows;
    const float decay = own ? reader.decay(reader.load(place.batch, token + share.lane, 0), 0) : 1.0f;
#pragma unroll
    for (int i = 0; i < kRowBlock; ++i) decays[i][0] = decays[i][1] = __shfl_sync(kFullWarp, decay, i);
    return;
  }
  if (channels <= 0) return;
  Rows raw;
  const std::int64_t start = gate.offset(place.batch, token, place.value_head, share.channel);
  const bool pairs = params.pairs_in_gate;
  if (gate.dtype == DType::f32) load_rows<float>(gate.data, start, gate.strides[1], rows, channels, pairs, raw);
  if (gate.dtype == DType::f16) load_rows<Half>(gate.data, start, gate.strides[1], rows, channels, pairs, raw);
  if (gate.dtype == DType::bf16) load_rows<BFloat16>(gate.data, start, gate.strides[1], rows, channels, pairs, raw);
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    if (e >= channels) continue;
    const float bias = reader.bias(share.channel + e);
#pragma unroll
    for (int i = 0; i < kRowBlock; ++i) {
      if (i < rows) decays[i][e] = decay_factor(raw[i][e], p.gate_space, reader.exp_a_log, bias, p.gate_lower_bound);
    }
  }
}

/// Parts of the squared lengths of this warp's rows of k and q.
template <class P>
__device__ __forceinline__ void sum_squares(const Share& share, const Rows& k, const Rows& q, PrepareShared<P>& shared) {
  float squares[2 * kRowBlock];
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    squares[i] = k[i][0] * k[i][0] + k[i][1] * k[i][1];
    squares[kRowBlock + i] = q[i][0] * q[i][0] + q[i][1] * q[i][1];
  }
  const float sum = spread_sum<kWarpSize, 1>(squares, share.lane);
  const int which = share.lane / 2;  // of the sums
  if (share.lane % 2 == 0) shared.squares[share.slab][which / kRowBlock][share.first_row + which % kRowBlock] = sum;
}

/// Multiplies rows of k and q with what belongs to them; the first slab's warps keep it for later.
template <class P>
__device__ __forceinline__ void scale_rows(const Problem& p, const Share& share, Rows& k, Rows& q, PrepareShared<P>& shared) {
  const int which = share.lane / kRowBlock % 2, row = share.first_row + share.lane % kRowBlock;
  float factor = 1.0f;
  if (p.qk_l2norm) {
    float squares = 0.0f;
#pragma unroll
    for (int slab = 0; slab < P::kKeys / kSlab; ++slab) squares += shared.squares[slab][which][row];
    factor = l2norm_factor(squares);
  }
  if (which == kOfQueries) factor *= p.scale;
  if (share.slab == 0 && share.lane < 2 * kRowBlock) shared.factors[which][row] = factor;
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    const float of_k = __shfl_sync(kFullWarp, factor, i), of_q = __shfl_sync(kFullWarp, factor, kRowBlock + i);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      k[i][e] *= of_k;
      q[i][e] *= of_q;
    }
  }
}

/// A pair of this lane's channels into a plane or several of the image.
template <class P>
__device__ __forceinline__ void store_wide(unsigned char* image, int matrix, int row, int channel, float low, float high) {
  unsigned terms[P::kTerms];
  split(low, high, terms);
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    *reinterpret_cast<unsigned*>(image + matrix + t * P::kImage.wide() + wide_offset(row, channel, P::kKeys)) = terms[t];
  }
}

template <class P>
__device__ __forceinline__ void store_copy(PrepareShared<P>& shared, int copy, int row, int channel, float low, float high) {
  const int in_width = channel % P::kWidth;
  const int piece = swizzled<P::kWidth / 4>(copy + row, in_width / 4);
  reinterpret_cast<float2*>(shared.copies)[piece * 2 + in_width % 4 / 2] = make_float2(low, high);
}

/// What the decays of the other row blocks multiply to, for this lane's channels.
struct Around {
  float2 before = {1.0f, 1.0f}, after = {1.0f, 1.0f};
};
template <class P>
__device__ __forceinline__ Around around(const Share& share, const PrepareShared<P>& shared) {
  Around a;
#pragma unroll
  for (int b = 0; b < kRowBlocks; ++b) {
    const float2 d = *reinterpret_cast<const float2*>(&shared.block_decays[b][share.channel]);
    float2* side = b < share.block ? &a.before : &a.after;
    if (b == share.block) continue;
    side->x *= d.x;
    side->y *= d.y;
  }
  return a;
}

/// The chain's factors of this lane's rows and channels.
template <class P>
__device__ __forceinline__ void store_factors(const Problem& p, const Share& share, const Rows& k, const Rows& q, const Rows& decays,
                                              const PrepareShared<P>& shared, unsigned char* image) {
  const Around a = around(share, shared);
  float up[2] = {a.before.x, a.before.y}, down[2] = {a.after.x, a.after.y};
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    const int row = share.first_row + i, back = kRowBlock - 1 - i;
#pragma unroll
    for (int e = 0; e < 2; ++e) up[e] *= decays[i][e];
    if (p.update == Update::delta) store_wide<P>(image, P::kImage.predict(), row, share.channel, -k[i][0] * up[0], -k[i][1] * up[1]);
    store_wide<P>(image, P::kImage.read(), row, share.channel, q[i][0] * up[0], q[i][1] * up[1]);
    store_wide<P>(image, P::kImage.accumulate(), share.first_row + back, share.channel, k[back][0] * down[0], k[back][1] * down[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) down[e] *= decays[back][e];
  }
  if (share.block == kRowBlocks - 1) {
    reinterpret_cast<float2*>(image + P::kImage.decays())[share.channel / 2] = make_float2(up[0], up[1]);
  }
}

/// The copies that scores are made of; returns the rows (bits) whose quotients would be out of range.
template <class P>
__device__ __forceinline__ unsigned store_copies(const Share& share, const Rows& k, const Rows& q, const Rows& decays, PrepareShared<P>& shared) {
  unsigned beyond = 0;
  float up[2] = {1.0f, 1.0f}, down[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    const int row = share.first_row + i, back = kRowBlock - 1 - i;
    float quotient[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      up[e] *= decays[i][e];
      const bool in_range = up[e] >= kLeastQuotient;
      quotient[e] = in_range ? __fdividef(k[i][e], up[e]) : 0.0f;
      beyond |= static_cast<unsigned>(!in_range) << row;
    }
    store_copy(shared, kDecayedKeys, row, share.channel, k[i][0] * up[0], k[i][1] * up[1]);
    store_copy(shared, kDecayedQueries, row, share.channel, q[i][0] * up[0], q[i][1] * up[1]);
    store_copy(shared, kQuotientKeys, row, share.channel, quotient[0], quotient[1]);
    if (share.block < kRowBlocks - 1) {
      store_copy(shared, kEndKeys, share.first_row + back, share.channel, k[back][0] * down[0], k[back][1] * down[1]);
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) down[e] *= decays[back][e];
  }
  return beyond;
}

/// One tile of scores: 16 rows by the 8 keys of one row block, as many of its rows as are used.
struct Tile {
  int first_row;       // 0 or 16
  int key_block;       // row block of the keys
  int keys;            // kQuotientKeys or kEndKeys
  bool upper, lower;   // which row block of the two is used
  bool across;         // rows and keys meet at the chunk's middle: see multiply_tile
};

/// The eight tiles whose scores are not all hidden.
__device__ __forceinline__ Tile tile_of(int i) {
  switch (i) {
    case 0: return {0, 0, kQuotientKeys, true, false, false};
    case 1: return {0, 0, kEndKeys, false, true, false};
    case 2: return {0, 1, kQuotientKeys, false, true, false};
    case 3: return {16, 0, kEndKeys, true, true, true};
    case 4: return {16, 1, kEndKeys, true, true, true};
    case 5: return {16, 2, kQuotientKeys, true, false, false};
    case 6: return {16, 2, kEndKeys, false, true, false};
    default: return {16, 3, kQuotientKeys, false, true, false};
  }
}

/// c += a b: one tf32 product, or three of operands in two terms.
template <bool kSplit>
__device__ __forceinline__ void multiply_scores(const float (&a)[4], const float (&b)[2], float (&c)[4]) {
  unsigned a_high[4], b_high[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) a_high[i] = to_tf32(a[i]);
#pragma unroll
  for (int i = 0; i < 2; ++i) b_high[i] = to_tf32(b[i]);
  if constexpr (kSplit) {
    unsigned a_low[4], b_low[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a_low[i] = to_tf32(a[i] - __uint_as_float(a_high[i]));
#pragma unroll
    for (int i = 0; i < 2; ++i) b_low[i] = to_tf32(b[i] - __uint_as_float(b_high[i]));
    multiply_add_tf32(a_low, b_high, c);
    multiply_add_tf32(a_high, b_low, c);
  }
  multiply_add_tf32(a_high, b_high, c);
}

/// The tile's scores over the channels of pass `pass`. Across the chunk's middle, the last row block's rows start a block earlier and the
/// first block's keys end a block later than their copies do.
template <class P>
__device__ __forceinline__ void multiply_tile(const Tile& tile, int queries, int pass, const PrepareShared<P>& shared, float (&scores)[4]) {
  constexpr int kPieces = P::kWidth / 4;
  const int lane = threadIdx.x % kWarpSize;
  const auto* copies = reinterpret_cast<const uint4*>(shared.copies);
  const int a_row = queries + tile.first_row + lane % 16, b_row = tile.keys + tile.key_block * kRowBlock + lane % 8;
#pragma unroll 2
  for (int c = 0; c < P::kWidth; c += 16) {
    unsigned raw_a[2][4], raw_b[4];
    load_matrices(shared_address(copies + swizzled<kPieces>(a_row, c / 4 + lane / 16)), raw_a[0]);
    load_matrices(shared_address(copies + swizzled<kPieces>(a_row, c / 4 + 2 + lane / 16)), raw_a[1]);
    load_matrices(shared_address(copies + swizzled<kPieces>(b_row, c / 4 + lane / 8)), raw_b);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float a[4], b[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = __uint_as_float(raw_a[half][i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        b[i] = __uint_as_float(raw_b[half * 2 + i]);
        if (!tile.across) continue;
        const int channel = pass * P::kWidth + c + half * 8 + i * 4 + lane % 4;
        a[i * 2 + 1] *= shared.block_decays[2][channel];
        if (tile.key_block == 0) b[i] *= shared.block_decays[1][channel];
      }
      multiply_scores<(P::kTerms > 1)>(a, b, scores);
    }
  }
}

/// The scores of all tiles over the channels of one pass, added to those of the passes before.
template <class P>
__device__ __forceinline__ void multiply_pass(const Problem& p, int pass, PrepareShared<P>& shared) {
  const int lane = threadIdx.x % kWarpSize;
  for (int job = threadIdx.x / kWarpSize; job < 16; job += P::kWarps) {
    const Tile tile = tile_of(job % 8);
    const int matrix = job / 8;
    if (matrix == kOfKeys && p.update == Update::additive) continue;
    float sums[4] = {};
    multiply_tile(tile, matrix == kOfKeys ? kDecayedKeys : kDecayedQueries, pass, shared, sums);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!(half == 0 ? tile.upper : tile.lower)) continue;
      const int row = tile.first_row + half * 8 + lane / 4, column = tile.key_block * kRowBlock + lane % 4 * 2;
      float* to = &shared.scores[matrix][row * kScorePitch + column];
#pragma unroll
      for (int e = 0; e < 2; ++e) to[e] = pass == 0 ? sums[half * 2 + e] : to[e] + sums[half * 2 + e];
    }
  }
}

/// Scores of row `row` with the keys of its own row block, pair by pair: right for any decay. One warp.
template <class P>
__device__ __forceinline__ void sum_pairs(const Params& params, const ChunkPlace& place, int row, PrepareShared<P>& shared) {
  const Problem& p = params.problem;
  const int lane = threadIdx.x % kWarpSize, first = row / kRowBlock * kRowBlock;
  const DecayReader reader(p, place.value_head);
  const std::int64_t token = place.tokens.begin + row;
  const auto element = [&](const InputOperand& x, int back, std::int64_t channel) {
    return x.load(x.offset(place.batch, token - back, place.key_head, channel));
  };
  float sums[2 * kRowBlock] = {};  // by Matrix, then by tokens back
  for (std::int64_t channel = lane; channel < p.key_dim; channel += kWarpSize) {
    float own_key = element(p.k, 0, channel) * shared.factors[kOfKeys][row];
    float own_query = element(p.q, 0, channel) * shared.factors[kOfQueries][row];
#pragma unroll
    for (int back = 0; back < kRowBlock; ++back) {
      if (row - back < first) break;
      const float key = element(p.k, back, channel) * shared.factors[kOfKeys][row - back];
      sums[back] += own_key * key;
      sums[kRowBlock + back] += own_query * key;
      const std::int64_t gate_channel = p.gate == Gate::channel ? channel : 0;
      const float decay = reader.decay(reader.load(place.batch, token - back, gate_channel), gate_channel);
      own_key *= decay;
      own_query *= decay;
    }
  }
  warp_sums(sums);
#pragma unroll
  for (int back = 0; back < kRowBlock; ++back) {
    if (lane != 0 || row - back < first) continue;
    shared.scores[kOfKeys][row * kScorePitch + row - back] = sums[back];
    shared.scores[kOfQueries][row * kScorePitch + row - back] = sums[kRowBlock + back];
  }
}

/// T = (I + L)^-1 diag(beta) with L_ij = beta_i <k_i, k_j>, j < i, by substitution in f32. One warp, a lane a column.
template <class P>
__device__ __forceinline__ void solve(const PrepareShared<P>& shared, unsigned char* image) {
  const int column = threadIdx.x % kWarpSize;
  const float own_beta = shared.betas[column];
  float x[kChunk];
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    const float* row = &shared.scores[kOfKeys][i * kScorePitch];
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < i; ++j) sums[j % 2] = fmaf(row[j], x[j], sums[j % 2]);
    x[i] = (i == column ? 1.0f : 0.0f) - shared.betas[i] * (sums[0] + sums[1]);
    unsigned terms[P::kTerms];
    split(i >= column ? x[i] * own_beta : 0.0f, 0.0f, terms);
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) {
      const int at = P::kImage.solve() + t * P::kImage.square() + square_offset(i, column);
      *reinterpret_cast<std::uint16_t*>(image + at) = static_cast<std::uint16_t>(terms[t]);
    }
  }
}

/// A: the scores that a query sees.
template <class P>
__device__ __forceinline__ void store_attend(const PrepareShared<P>& shared, int thread, int threads, unsigned char* image) {
  for (int i = thread; i < kChunk * kChunk / 2; i += threads) {
    const int row = i / (kChunk / 2), column = i % (kChunk / 2) * 2;
    const float* score = &shared.scores[kOfQueries][row * kScorePitch + column];
    unsigned terms[P::kTerms];
    split(column <= row ? score[0] : 0.0f, column + 1 <= row ? score[1] : 0.0f, terms);
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) {
      const int at = P::kImage.attend() + t * P::kImage.square() + square_offset(row, column);
      *reinterpret_cast<unsigned*>(image + at) = terms[t];
    }
  }
}

/// All factors of one chunk of one value head. All threads of the block.
template <class P>
__device__ __forceinline__ void prepare_chunk(const Params& params, std::int64_t block, PrepareShared<P>& shared) {
  const Problem& p = params.problem;
  const ChunkPlace place = chunk_place_of(params, block, P::kImage.bytes());
  if (!place.exists) return;
  const Share share;
  if (threadIdx.x < kChunk) {
    const int row = threadIdx.x;
    const float beta = row < place.tokens.rows ? load_beta(p, place.batch, place.tokens.begin + row, place.value_head) : 0.0f;
    shared.betas[row] = beta;
    reinterpret_cast<float*>(place.image + P::kImage.betas())[row] = beta;
  }
  if (threadIdx.x == 0) shared.beyond_quotients = 0;

  Rows k, q, decays;
  load_heads<P>(p, place, share, p.k, params.pairs_in_k, k);
  load_heads<P>(p, place, share, p.q, params.pairs_in_q, q);
  load_decays(params, place, share, decays);
  if (p.qk_l2norm) sum_squares(share, k, q, shared);
  float block_decay[2] = {1.0f, 1.0f};
#pragma unroll
  for (int i = 0; i < kRowBlock; ++i) {
    block_decay[0] *= decays[i][0];
    block_decay[1] *= decays[i][1];
  }
  *reinterpret_cast<float2*>(&shared.block_decays[share.block][share.channel]) = make_float2(block_decay[0], block_decay[1]);
  __syncthreads();

  scale_rows(p, share, k, q, shared);
  store_factors(p, share, k, q, decays, shared, place.image);
#pragma unroll
  for (int pass = 0; pass < P::kPasses; ++pass) {
    if (pass > 0) __syncthreads();  // the products of the pass before have read their copies
    if (share.channel / P::kWidth == pass) {
      const unsigned beyond = __reduce_or_sync(kFullWarp, store_copies(share, k, q, decays, shared));
      if (share.lane == 0 && beyond != 0) atomicOr(&shared.beyond_quotients, beyond);
    }
    __syncthreads();
    multiply_pass(p, pass, shared);
  }
  __syncthreads();
  if (const unsigned rows = shared.beyond_quotients; rows != 0) {
    for (int row = share.warp; row < place.tokens.rows; row += P::kWarps) {
      if (rows >> row & 1) sum_pairs(params, place, row, shared);
    }
    __syncthreads();
  }
  if (share.warp > 0) {
    store_attend(shared, threadIdx.x - kWarpSize, P::kThreads - kWarpSize, place.image);
  } else if (p.update == Update::delta) {
    solve(shared, place.image);
  }
}

}  // namespace delta_attention::chunkwise
