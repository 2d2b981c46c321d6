#pragma once

// The second launch of v5_chunkwise: the state, chunk after chunk, and the outputs. chunkwise.cu tells the story.
//
// A block takes one (sequence, value head) and a slice of its value columns, 16 columns a pair of warps. The state is held transposed, S^T: a
// value column is a row of the tensor cores' M side, so that the state, R and U are left operands straight from the registers they were summed
// in, and all that is read from shared memory are the chunk's factors, as right operands. Of each pair
//     the state warp     R^T = V^T - S^T (b k)^T        U^T = R^T T^T  (additive: U = beta V)        S^T = S^T diag(D) + U^T (d k)
//     the reading warp   O^T = S^T (b q)^T + U^T A^T, out
// S, as the operand that it is for both, and U go from one to the other through shared memory. The reading warp starts with the state before
// the chunk, as the state warp does, and is ready for U by the time it comes.
//
// NaN and infinities: a product with the zeros of T and A would carry them from a token to those before it. So they are taken out of R and U,
// and everything from the first such token of a value column on is NaN, as it is in the recurrence.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/warp.cuh"
#include "state/gate.h"

namespace delta_attention::chunkwise {

constexpr int kColumns = 16;        // value columns of a pair of warps
constexpr int kMostPairs = 4;       // a block; each has two barriers of the block's 15
constexpr int kTiles = kChunk / 8;  // of tokens

template <class Element_, int kKeys_>
struct ChainPolicy {
  using Element = Element_;
  static constexpr int kTerms = TermsOf<Element>::value;
  static constexpr int kKeys = kKeys_;
  static constexpr Image kImage = {kTerms, kKeys};
};

/// Sums of 16 value columns and the chunk's tokens: [tokens / 8][fragment].
using TokenSums = float[kTiles][4];

/// Shared memory of a block: a ring of stages, each the image of a chunk and its values, and what each pair of warps exchanges.
template <class P>
struct ChainShared {
  int pairs, stages;

  DELTA_ATTENTION_HOST_DEVICE int value_pitch() const { return pairs * kColumns * static_cast<int>(sizeof(typename P::Element)) + 16; }
  DELTA_ATTENTION_HOST_DEVICE int stage_bytes() const { return P::kImage.bytes() + kChunk * value_pitch(); }
  static constexpr int state_bytes() { return P::kKeys / 16 * P::kTerms * kWarpSize * 16; }
  static constexpr int update_bytes() { return kChunk / 16 * P::kTerms * kWarpSize * 16; }
  static constexpr int exchange_bytes() { return state_bytes() + update_bytes() + kColumns * 4; }
  DELTA_ATTENTION_HOST_DEVICE int bytes() const { return stages * stage_bytes() + pairs * exchange_bytes(); }
};

/// What a block works on.
struct ChainPlace {
  std::int64_t sequence, value_head;
  Sequence tokens;
  Chunks chunks;
  std::int64_t first_column;  // of the block
  int pairs, pair;
  bool reads;                 // this warp is its pair's reading warp
};

__device__ __forceinline__ ChainPlace chain_place_of(const Params& params, std::int64_t block, int pairs) {
  const Problem& p = params.problem;
  const std::int64_t slices = ceil_div(p.value_dim, std::int64_t{pairs} * kColumns);
  const std::int64_t slice = block % slices, head = block / slices % p.value_heads, n = block / slices / p.value_heads;
  const int warp = threadIdx.x / kWarpSize;
  return {n, head, p.sequence(n), chunks_of(params, n), slice * pairs * kColumns, pairs, warp % pairs, warp >= pairs};
}

/// The barriers of a pair, apart from every other's.
__device__ __forceinline__ int updates_ready(const ChainPlace& place) { return 1 + place.pair; }
__device__ __forceinline__ int state_read(const ChainPlace& place) { return 1 + place.pairs + place.pair; }

// ------------------------------------------------------------------------------------------------------------------------- loads

/// Starts copying the block's values of a chunk; tokens and columns that do not exist become 0. The reading warps.
template <class P>
__device__ __forceinline__ void start_values(const Params& params, const ChainPlace& place, const Tokens& tokens, int pitch,
                                             unsigned char* to) {
  using Element = typename P::Element;
  const Problem& p = params.problem;
  constexpr int kPiece = 16 / sizeof(Element), kPieces = kColumns / kPiece;  // of a pair's columns
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t first_column = place.first_column + place.pair * kColumns;
  const std::int64_t start = p.v.offset(place.tokens.batch, tokens.begin, place.value_head, first_column);
  const Element* from = static_cast<const Element*>(p.v.data) + start;
  const int columns_left = static_cast<int>(p.value_dim - first_column);
#pragma unroll
  for (int i = 0; i < kChunk * kPieces / kWarpSize; ++i) {
    const int row = i * (kWarpSize / kPieces) + lane / kPieces, column = lane % kPieces * kPiece;
    int exist = row < tokens.rows ? columns_left - column : 0;
    exist = exist < 0 ? 0 : exist > kPiece ? kPiece : exist;
    const Element* piece = exist > 0 ? from + row * p.v.strides[1] + column : static_cast<const Element*>(p.v.data);
    unsigned char* target = to + row * pitch + place.pair * kColumns * static_cast<int>(sizeof(Element)) + lane % kPieces * 16;
    if (params.pieces_in_v) {
      start_copy(target, piece, exist * static_cast<int>(sizeof(Element)));
    } else {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) reinterpret_cast<Element*>(target)[e] = e < exist ? piece[e] : from_float<Element>(0.0f);
    }
  }
}

/// Starts copying an image from byte kBegin on. The reading warps, kPairs of them.
template <class P, int kBegin, int kPairs>
__device__ __forceinline__ void start_image(const unsigned char* image, int pair, unsigned char* stage) {
  constexpr int kStep = kPairs * kWarpSize * 16, kRounds = (P::kImage.bytes() - kBegin + kStep - 1) / kStep;
  const int first = kBegin + (pair * kWarpSize + static_cast<int>(threadIdx.x) % kWarpSize) * 16;
#pragma unroll
  for (int i = 0; i < kRounds; ++i) {
    if (i + 1 < kRounds || first + i * kStep < P::kImage.bytes()) start_copy(stage + first + i * kStep, image + first + i * kStep, 16);
  }
}
template <class P, int kBegin>
__device__ __forceinline__ void start_image(const unsigned char* image, const ChainPlace& place, unsigned char* stage) {
  if (place.pairs == 1) return start_image<P, kBegin, 1>(image, place.pair, stage);
  if (place.pairs == 2) return start_image<P, kBegin, 2>(image, place.pair, stage);
  start_image<P, kBegin, kMostPairs>(image, place.pair, stage);
}

/// Starts copying what a chunk needs into a stage. The reading warps.
template <class P>
__device__ __forceinline__ void start_stage(const Params& params, const ChainPlace& place, const ChainShared<P>& shared, ChunkCursor& cursor,
                                            const unsigned char*& image, unsigned char* stage) {
  const Tokens tokens = cursor.next();
  if (tokens.rows > 0) {
    if (params.problem.update == Update::delta) {
      start_image<P, 0>(image, place, stage);
    } else {
      start_image<P, P::kImage.read()>(image, place, stage);
    }
    image += params.problem.value_heads * P::kImage.bytes();
    start_values<P>(params, place, tokens, shared.value_pitch(), stage + P::kImage.bytes());
  }
  __pipeline_commit();
}

/// Waits for all stages but the last `in_flight` that were started.
__device__ __forceinline__ void wait_for_stages(int in_flight) {
  switch (in_flight) {
    case 0: return __pipeline_wait_prior(0);
    case 1: return __pipeline_wait_prior(1);
    default: return __pipeline_wait_prior(2);
  }
}

// --------------------------------------------------------------------------------------------------------------- products of a warp

/// Fragments of a left operand, 16 value columns by 16 channels or tokens, in terms.
template <class P>
using Fragment = unsigned[P::kTerms][4];

/// Two neighbouring tiles of sums as a left operand: the layouts of sums and operands agree.
template <class P>
__device__ __forceinline__ void pack_fragment(const float (&first)[4], const float (&second)[4], Fragment<P>& fragment) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = (i < 2 ? first : second) + i % 2 * 2;
    unsigned terms[P::kTerms];
    split(pair[0], pair[1], terms);
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) fragment[t][i] = terms[t];
  }
}

/// c += a b over all pairs of terms that matter, smallest first.
template <class P>
__device__ __forceinline__ void multiply_terms(const Fragment<P>& a, const unsigned (&b)[P::kTerms][4], int half, float (&c)[4]) {
#pragma unroll
  for (int order = P::kTerms - 1; order >= 0; --order) {
#pragma unroll
    for (int t = 0; t <= order; ++t) multiply_add<BFloat16>(a[t], b[order - t][half * 2], b[order - t][half * 2 + 1], c);
  }
}

/// sums[token] += a * (channels [16 step, 16 step + 16) of the tokens' rows in `matrix`)
template <class P>
__device__ __forceinline__ void multiply_channels(const Fragment<P>& a, const unsigned char* matrix, int step, TokenSums& sums) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    const int token = pair * 16 + lane / 16 * 8 + lane % 8, channel = step * 16 + lane / 8 % 2 * 8;
    unsigned b[P::kTerms][4];
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) {
      load_matrices(shared_address(matrix + t * P::kImage.wide() + wide_offset(token, channel, P::kKeys)), b[t]);
    }
    multiply_terms<P>(a, b, 0, sums[pair * 2]);
    multiply_terms<P>(a, b, 1, sums[pair * 2 + 1]);
  }
}

/// sums[token i] += a * (tokens j in [16 step, 16 step + 16) of row i of the lower triangular `matrix`)
template <class P>
__device__ __forceinline__ void multiply_tokens(const Fragment<P>& a, const unsigned char* matrix, int step, TokenSums& sums) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    if (pair < step) continue;  // tokens before these
    const int row = pair * 16 + lane / 16 * 8 + lane % 8, column = step * 16 + lane / 8 % 2 * 8;
    unsigned b[P::kTerms][4];
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) load_matrices(shared_address(matrix + t * P::kImage.square() + square_offset(row, column)), b[t]);
    multiply_terms<P>(a, b, 0, sums[pair * 2]);
    multiply_terms<P>(a, b, 1, sums[pair * 2 + 1]);
  }
}

// ------------------------------------------------------------------------------------------------------------------- numbers to avoid

/// First token of this lane's two value columns whose number is not finite; kChunk if there is none.
struct FirstBad {
  int token[2];
};

__device__ __forceinline__ bool all_finite(const TokenSums& x) {
  float zero = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) zero = fmaf(x[n][e], 0.0f, zero);
  }
  return zero == 0.0f;
}

__device__ __forceinline__ int token_of(int tile, int e) { return tile * 8 + threadIdx.x % 4 * 2 + e; }

/// Lowers `bad` to x's first bad tokens, and takes what comes from there on out of x.
__device__ __forceinline__ void take_out_bad(TokenSums& x, FirstBad& bad) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int first = bad.token[half];
#pragma unroll
    for (int n = kTiles - 1; n >= 0; --n) {
#pragma unroll
      for (int e = 1; e >= 0; --e) {
        if (!isfinite(x[n][half * 2 + e]) && token_of(n, e) < first) first = token_of(n, e);
      }
    }
    const int other = __shfl_xor_sync(kFullWarp, first, 1);
    first = other < first ? other : first;
    const int others = __shfl_xor_sync(kFullWarp, first, 2);
    first = others < first ? others : first;
    bad.token[half] = first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (token_of(n, e) >= first) x[n][half * 2 + e] = 0.0f;
      }
    }
  }
}

/// Puts NaN where something bad was, or something after it.
__device__ __forceinline__ void put_nan(const FirstBad& bad, TokenSums& x) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (token_of(n, e % 2) >= bad.token[e / 2]) x[n][e] = NAN;
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------------ state warp

/// This lane's part of the state: tile n has channels 8 n + 2 t + e of value columns g and g + 8, at [e] and [2 + e].
template <class P>
using StateSums = float[P::kKeys / 8][4];

/// Calls visit(element, channel, column) for every element of the state that this lane has and that exists.
template <class P, class State, class Visit>
__device__ __forceinline__ void for_state(const Problem& p, const ChainPlace& place, State& state, const Visit& visit) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int n = 0; n < P::kKeys / 8; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const std::int64_t channel = n * 8 + lane % 4 * 2 + e % 2;
      const std::int64_t column = place.first_column + place.pair * kColumns + e / 2 * 8 + lane / 4;
      if (channel < p.key_dim && column < p.value_dim) visit(state[n][e], channel, column);
    }
  }
}

template <class P>
__device__ __forceinline__ void load_state(const Problem& p, const ChainPlace& place, StateSums<P>& state) {
  for_state<P>(p, place, state, [&](float& x, std::int64_t channel, std::int64_t column) {
    x = p.initial_state.load(p.initial_state.offset(place.sequence, place.value_head, channel, column));
  });
}

/// As state number n of `to`.
template <class P>
__device__ __forceinline__ void store_state(const Problem& p, const ChainPlace& place, const OutputOperand& to, std::int64_t n,
                                            const StateSums<P>& state) {
  for_state<P>(p, place, state, [&](float x, std::int64_t channel, std::int64_t column) {
    to.store(to.offset(n, place.value_head, channel, column), x);
  });
}

/// Where the pair's two warps leave things for each other.
template <class P>
struct Exchange {
  uint4* state;    // [channels / 16][term][lane]
  uint4* updates;  // [tokens / 16][term][lane]; when they are read, outputs on their way out
  int* first_bad;  // [value column]

  __device__ Exchange(unsigned char* memory, int pair) {
    unsigned char* own = memory + pair * ChainShared<P>::exchange_bytes();
    state = reinterpret_cast<uint4*>(own);
    updates = reinterpret_cast<uint4*>(own + ChainShared<P>::state_bytes());
    first_bad = reinterpret_cast<int*>(own + ChainShared<P>::exchange_bytes()) - kColumns;
  }
};

template <class P>
__device__ __forceinline__ void put_fragment(const Fragment<P>& fragment, int step, uint4* to) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    const unsigned(&x)[4] = fragment[t];
    to[(step * P::kTerms + t) * kWarpSize + threadIdx.x % kWarpSize] = uint4{x[0], x[1], x[2], x[3]};
  }
}
template <class P>
__device__ __forceinline__ void get_fragment(const uint4* from, int step, Fragment<P>& fragment) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    const uint4 x = from[(step * P::kTerms + t) * kWarpSize + threadIdx.x % kWarpSize];
    fragment[t][0] = x.x;
    fragment[t][1] = x.y;
    fragment[t][2] = x.z;
    fragment[t][3] = x.w;
  }
}

/// The state as a left operand, for this warp and the reading one.
template <class P>
__device__ __forceinline__ void put_state(const StateSums<P>& state, const Exchange<P>& exchange) {
#pragma unroll
  for (int step = 0; step < P::kKeys / 16; ++step) {
    Fragment<P> fragment;
    pack_fragment<P>(state[step * 2], state[step * 2 + 1], fragment);
    put_fragment<P>(fragment, step, exchange.state);
  }
}

/// V^T of this pair's columns.
template <class P>
__device__ __forceinline__ void load_values(const ChainPlace& place, const unsigned char* values, int pitch, TokenSums& x) {
  const int column = place.pair * kColumns + threadIdx.x % kWarpSize / 4;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      x[n][e] = to_float(reinterpret_cast<const typename P::Element*>(values + token_of(n, e % 2) * pitch)[column + e / 2 * 8]);
    }
  }
}

/// U of a chunk: with the delta update T (V - S^T b k), else beta V.
template <class P>
__device__ __forceinline__ void make_updates(const Problem& p, const Exchange<P>& exchange, const unsigned char* stage, TokenSums& values,
                                             TokenSums& updates, FirstBad& bad) {
  if (p.update == Update::additive) {
    const float* betas = reinterpret_cast<const float*>(stage + P::kImage.betas());
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) updates[n][e] = values[n][e] * betas[token_of(n, e % 2)];
    }
    return;
  }
#pragma unroll
  for (int step = 0; step < P::kKeys / 16; ++step) {
    Fragment<P> state;
    get_fragment<P>(exchange.state, step, state);
    multiply_channels<P>(state, stage + P::kImage.predict(), step, values);
  }
  if (__any_sync(kFullWarp, !all_finite(values))) take_out_bad(values, bad);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    Fragment<P> a;
    pack_fragment<P>(values[step * 2], values[step * 2 + 1], a);
    multiply_tokens<P>(a, stage + P::kImage.solve(), step, updates);
  }
}

/// S^T = S^T diag(D) + U^T (d k)
template <class P>
__device__ __forceinline__ void advance(const TokenSums& updates, const unsigned char* stage, StateSums<P>& state) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned char* keys = stage + P::kImage.accumulate();
  const auto* decays = reinterpret_cast<const float2*>(stage + P::kImage.decays());
  Fragment<P> a[kChunk / 16];
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) pack_fragment<P>(updates[step * 2], updates[step * 2 + 1], a[step]);
#pragma unroll
  for (int pair = 0; pair < P::kKeys / 16; ++pair) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 decay = decays[(pair * 2 + half) * 4 + lane % 4];
      float(&sums)[4] = state[pair * 2 + half];
      sums[0] *= decay.x;
      sums[1] *= decay.y;
      sums[2] *= decay.x;
      sums[3] *= decay.y;
    }
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      unsigned b[P::kTerms][4];
#pragma unroll
      for (int t = 0; t < P::kTerms; ++t) {
        const int at = t * P::kImage.wide() + wide_offset(step * 16 + lane % 16, pair * 16 + lane / 16 * 8, P::kKeys);
        load_matrices_transposed(shared_address(keys + at), b[t]);
      }
      multiply_terms<P>(a[step], b, 0, state[pair * 2]);
      multiply_terms<P>(a[step], b, 1, state[pair * 2 + 1]);
    }
  }
}

/// The state warp's part of a chunk.
template <class P>
__device__ __forceinline__ void step_state(const Problem& p, const ChainPlace& place, const ChainShared<P>& shared, const unsigned char* stage,
                                           const Exchange<P>& exchange, StateSums<P>& state) {
  TokenSums values, updates = {};
  FirstBad bad = {{kChunk, kChunk}};
  load_values<P>(place, stage + P::kImage.bytes(), shared.value_pitch(), values);
  make_updates<P>(p, exchange, stage, values, updates, bad);
  if (__any_sync(kFullWarp, !all_finite(updates))) take_out_bad(updates, bad);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    Fragment<P> fragment;
    pack_fragment<P>(updates[step * 2], updates[step * 2 + 1], fragment);
    put_fragment<P>(fragment, step, exchange.updates);
  }
  const int lane = threadIdx.x % kWarpSize;
  if (lane % 4 < 2) exchange.first_bad[lane % 4 * 8 + lane / 4] = lane % 4 == 0 ? bad.token[0] : bad.token[1];
  arrive_at_part(updates_ready(place), 2 * kWarpSize);
  put_nan(bad, updates);
  advance<P>(updates, stage, state);
}

// ---------------------------------------------------------------------------------------------------------------------- reading warp

/// Outputs of a chunk through shared memory to global memory, 16 columns a token.
template <class P>
__device__ __forceinline__ void store_outputs(const Params& params, const ChainPlace& place, const Tokens& tokens, const TokenSums& out,
                                                 void* staging) {
  using Element = typename P::Element;
  static_assert(kChunk * kColumns * sizeof(Element) <= ChainShared<P>::update_bytes());
  const Problem& p = params.problem;
  constexpr int kPiece = 16 / sizeof(Element), kPieces = kColumns / kPiece;
  const int lane = threadIdx.x % kWarpSize;
  auto* staged = static_cast<Element*>(staging);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) staged[token_of(n, e % 2) * kColumns + e / 2 * 8 + lane / 4] = from_float<Element>(out[n][e]);
  }
  __syncwarp();
  const std::int64_t first_column = place.first_column + place.pair * kColumns, left = p.value_dim - first_column;
  const std::int64_t start = p.out.offset(place.tokens.batch, tokens.begin, place.value_head, first_column);
  Element* to = static_cast<Element*>(p.out.data) + start;
  for (int i = lane; i < tokens.rows * kPieces; i += kWarpSize) {
    const int row = i / kPieces, column = i % kPieces * kPiece;
    Element* piece = to + row * p.out.strides[1] + column;
    const Element* from = staged + row * kColumns + column;
    if (params.pieces_in_out && column + kPiece <= left) {
      *reinterpret_cast<uint4*>(piece) = *reinterpret_cast<const uint4*>(from);
    } else {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        if (column + e < left) piece[e] = from[e];
      }
    }
  }
}

/// The reading warp's part of a chunk.
template <class P>
__device__ __forceinline__ void read_chunk(const Params& params, const ChainPlace& place, const Tokens& tokens, const unsigned char* stage,
                                           const Exchange<P>& exchange) {
  TokenSums out = {};
#pragma unroll
  for (int step = 0; step < P::kKeys / 16; ++step) {
    Fragment<P> state;
    get_fragment<P>(exchange.state, step, state);
    multiply_channels<P>(state, stage + P::kImage.read(), step, out);
  }
  arrive_at_part(state_read(place), 2 * kWarpSize);
  sync_part(updates_ready(place), 2 * kWarpSize);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    Fragment<P> updates;
    get_fragment<P>(exchange.updates, step, updates);
    multiply_tokens<P>(updates, stage + P::kImage.attend(), step, out);
  }
  const int column = threadIdx.x % kWarpSize / 4;
  put_nan({{exchange.first_bad[column], exchange.first_bad[8 + column]}}, out);
  __syncwarp();  // every lane has its updates: their place is free
  store_outputs<P>(params, place, tokens, out, exchange.updates);
}

// ------------------------------------------------------------------------------------------------------------------------------ chain

/// One block's work. `memory`: shared.bytes() of shared memory.
template <class P>
__device__ __forceinline__ void run_chain(const Params& params, std::int64_t block, const ChainShared<P>& shared, unsigned char* memory) {
  const Problem& p = params.problem;
  const ChainPlace place = chain_place_of(params, block, shared.pairs);
  const Exchange<P> exchange(memory + shared.stages * shared.stage_bytes(), place.pair);
  ChunkCursor cursor(Chunking::of(p), place.tokens, 0), loads = cursor;
  const unsigned char* image = params.factors + (place.chunks.first * p.value_heads + place.value_head) * P::kImage.bytes();
  const int ahead = shared.stages - 1, stage_bytes = shared.stage_bytes();
  StateSums<P> state = {};
  std::int64_t stored = 0, most_stored = 0;  // intermediate states
  if (place.reads) {
    for (int i = 0; i < ahead; ++i) start_stage<P>(params, place, shared, loads, image, memory + i * stage_bytes);
  } else {
    if (p.initial_state.present) load_state<P>(p, place, state);
    put_state<P>(state, exchange);
    stored = params.first_states == nullptr ? place.sequence * p.intermediate_count(place.tokens) : params.first_states[place.sequence];
    most_stored = p.intermediate_capacity();
  }
  int slot = 0, next = ahead;  // next: the slot that is filled next
#pragma unroll 1
  for (std::int64_t chunk = 0; chunk < place.chunks.count; ++chunk) {
    if (ahead == 0) {
      __syncthreads();  // nobody needs the chunk before any more
      if (place.reads) start_stage<P>(params, place, shared, loads, image, memory);
    }
    wait_for_stages(ahead > 0 ? ahead - 1 : 0);
    __syncthreads();
    const unsigned char* stage = memory + slot * stage_bytes;
    const Tokens tokens = cursor.next();
    if (place.reads) {
      if (ahead > 0) start_stage<P>(params, place, shared, loads, image, memory + next * stage_bytes);
      read_chunk<P>(params, place, tokens, stage, exchange);
    } else {
      step_state<P>(p, place, shared, stage, exchange, state);
      sync_part(state_read(place), 2 * kWarpSize);
      put_state<P>(state, exchange);
      if (tokens.ends_span && stored < most_stored) store_state<P>(p, place, p.intermediate_states, stored++, state);
    }
    slot = slot + 1 == shared.stages ? 0 : slot + 1;
    next = next + 1 == shared.stages ? 0 : next + 1;
  }
  if (!place.reads && p.final_state.present) store_state<P>(p, place, p.final_state, place.sequence, state);
}

}  // namespace delta_attention::chunkwise
