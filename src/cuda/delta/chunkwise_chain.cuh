#pragma once

// The second launch of v5_chunkwise: the state, chunk after chunk, and the outputs. chunkwise.cu tells the story.
//
// A block takes one (sequence, value head) and a slice of its value columns, 16 columns a team of warps. The state is held transposed, S^T: a
// value column is a row of the tensor cores' M side, so that the state, R and U are left operands straight from the registers they were summed
// in, and all that is read from shared memory are the chunk's factors, as right operands. A team of three warps has 16 columns:
//     two state warps, each with half of the channels of S^T
//                        R^T = V^T - S^T (b k)^T, the second one's half to the first
//                        the first: U^T = R^T T^T (additive: U = beta V), for all
//                        S^T = S^T diag(D) + U^T (d k)
//     a reading warp     O^T = S^T (b q)^T + U^T A^T, out
// S, as the operand that it is for both products, and U go from one to the other through shared memory. The reading warp starts with the state
// before the chunk, as the state warps do, and is ready for U by the time it comes.
//
// NaN and infinities: a product with the zeros of T and A would carry them from a token to those before it. Where a result shows any, they are
// taken out of R or U, and everything from the first such token of a value column on is NaN, as it is in the recurrence.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/bulk_copy.cuh"
#include "cuda/device/warp.cuh"
#include "state/gate.h"

namespace delta_attention::chunkwise {

constexpr int kTiles = kChunk / 8;  // of tokens

template <class Element_, int kKeys_>
struct ChainPolicy {
  using Element = Element_;
  static constexpr int kTerms = TermsOf<Element>::value;
  static constexpr int kKeys = kKeys_;
  static constexpr Image kImage = {kTerms, kKeys};
  static constexpr int kSteps = kKeys / 16;         // products that a whole state takes, one behind the other
  static constexpr int kHalfSteps = kSteps / 2;     // of a state warp
  static constexpr int kBlocksAtOnce = kTerms == 1 && kKeys <= 128 ? 2 : 1;  // a multiprocessor, by registers
};

/// Sums of 16 value columns and the chunk's tokens: [tokens / 8][fragment].
using TokenSums = float[kTiles][4];

/// Shared memory of a block: a ring of stages, each the image of a chunk and its values, and what each team exchanges.
template <class P>
struct ChainShared {
  int teams, stages;

  DELTA_ATTENTION_HOST_DEVICE int value_pitch() const { return teams * kColumns * static_cast<int>(sizeof(typename P::Element)) + 16; }
  /// Rows of images stay aligned to their length, which addresses are computed with.
  DELTA_ATTENTION_HOST_DEVICE int stage_bytes() const { return (P::kImage.bytes() + kChunk * value_pitch() + 1023) / 1024 * 1024; }
  /// Per stage, a barrier that counts the image's bytes (cuda/device/bulk_copy.cuh).
  DELTA_ATTENTION_HOST_DEVICE int arrivals_offset() const { return stages * stage_bytes() + teams * exchange_bytes(); }
  static constexpr int state_bytes() { return P::kKeys / 16 * P::kTerms * kWarpSize * 16; }
  static constexpr int update_bytes() { return kChunk / 16 * P::kTerms * kWarpSize * 16; }
  static constexpr int residual_bytes() { return kTiles * kWarpSize * 16; }
  static constexpr int exchange_bytes() { return state_bytes() + update_bytes() + residual_bytes(); }
  DELTA_ATTENTION_HOST_DEVICE int bytes() const { return arrivals_offset() + stages * static_cast<int>(sizeof(CopyArrival)); }
};

/// Warps of a block: of each team two with the state and one that reads, then one that loads for all.
enum class Role { first_state, second_state, reading, loading };
constexpr int kTeamWarps = 3;
DELTA_ATTENTION_HOST_DEVICE constexpr int chain_threads(int teams) { return (kTeamWarps * teams + 1) * kWarpSize; }

/// What a block works on.
struct ChainPlace {
  std::int64_t sequence, value_head;
  Sequence tokens;
  std::int64_t first_chunk;
  int chunks;
  std::int64_t first_column;  // of the block
  int teams, team;
  Role role;
};

__device__ __forceinline__ ChainPlace chain_place_of(const Params& params, std::int64_t block, int teams) {
  const Problem& p = params.problem;
  const std::int64_t slices = ceil_div(p.value_dim, std::int64_t{teams} * kColumns);
  const std::int64_t slice = block % slices, head = block / slices % p.value_heads, n = block / slices / p.value_heads;
  const int warp = threadIdx.x / kWarpSize;
  const auto role = static_cast<Role>(warp / teams);
  const Chunks chunks = chunks_of(params, n);
  return {n, head, p.sequence(n), chunks.first, static_cast<int>(chunks.count), slice * teams * kColumns, teams, warp % teams, role};
}

/// Barriers: of all warps, which wait at different places; and of two warps of a team, one of which arrives and the other waits. (Three warps at
/// one barrier would do, but racecheck does not see what that orders.)
__device__ __forceinline__ void meet_all(int teams) { sync_part(1, chain_threads(teams)); }
enum Handover { kResiduals, kUpdatesToSecond, kUpdatesToReading, kStateReadToFirst, kStateReadToSecond, kHandovers };
__device__ __forceinline__ int barrier_of(const ChainPlace& place, Handover handover) { return 2 + place.team * kHandovers + handover; }
__device__ __forceinline__ void arrive(const ChainPlace& place, Handover handover) {
  arrive_at_part(barrier_of(place, handover), 2 * kWarpSize);
}
__device__ __forceinline__ void await(const ChainPlace& place, Handover handover) { sync_part(barrier_of(place, handover), 2 * kWarpSize); }

// ------------------------------------------------------------------------------------------------------------------------- loads

/// Starts copying the block's values of a chunk; tokens and columns that do not exist become 0.
template <class P>
__device__ __forceinline__ void start_values(const Params& params, const ChainPlace& place, const Tokens& tokens, int pitch,
                                             unsigned char* to) {
  using Element = typename P::Element;
  const Problem& p = params.problem;
  constexpr int kPiece = 16 / sizeof(Element), kPieces = kColumns / kPiece;  // of a team's columns
  const int lane = threadIdx.x % kWarpSize;
  const std::int64_t stride = p.v.strides[1];
  const Element* from =
      static_cast<const Element*>(p.v.data) + p.v.offset(place.tokens.batch, tokens.begin, place.value_head, place.first_column);
  const int columns = static_cast<int>(p.value_dim - place.first_column);
  for (int team = 0; team < place.teams; ++team) {
#pragma unroll
    for (int i = 0; i < kChunk * kPieces / kWarpSize; ++i) {
      const int row = i * (kWarpSize / kPieces) + lane / kPieces, column = team * kColumns + lane % kPieces * kPiece;
      int exist = row < tokens.rows ? columns - column : 0;
      exist = exist < 0 ? 0 : exist > kPiece ? kPiece : exist;
      const Element* piece = exist > 0 ? from + row * stride + column : static_cast<const Element*>(p.v.data);
      unsigned char* target = to + row * pitch + column * static_cast<int>(sizeof(Element));
      if (params.pieces_in_v) {
        start_copy(target, piece, exist * static_cast<int>(sizeof(Element)));
      } else {
#pragma unroll
        for (int e = 0; e < kPiece; ++e) reinterpret_cast<Element*>(target)[e] = e < exist ? piece[e] : from_float<Element>(0.0f);
      }
    }
  }
}

/// The chunks that the loading warp copies into the ring of stages, one after another.
template <class P>
struct Loads {
  ChunkCursor cursor;
  int left;                    // chunks; with wrong offsets fewer than the sequence has
  const unsigned char* image;  // of the next chunk
  int slot = 0;                // for it

  __device__ Loads(const Params& params, const ChainPlace& place)
      : cursor(Chunking::of(params.problem), place.tokens, 0), left(place.chunks) {
    image = params.factors + (place.first_chunk * params.problem.value_heads + place.value_head) * P::kImage.bytes();
  }

  /// Starts copying what the next chunk needs.
  __device__ __forceinline__ void start_next(const Params& params, const ChainPlace& place, const ChainShared<P>& shared, unsigned char* memory,
                                             CopyArrival* arrivals) {
    const Tokens tokens = cursor.next();
    if (left-- > 0) {
      unsigned char* stage = memory + slot * shared.stage_bytes();
      const int begin = params.problem.update == Update::delta ? 0 : P::kImage.read();
      start_bulk_copy(stage + begin, image + begin, P::kImage.bytes() - begin, arrivals[slot]);
      start_values<P>(params, place, tokens, shared.value_pitch(), stage + P::kImage.bytes());
      image += params.problem.value_heads * P::kImage.bytes();
    }
    __pipeline_commit();
    slot = slot + 1 == shared.stages ? 0 : slot + 1;
  }
};

/// Waits for all of this thread's commits but the last `in_flight`, at most two.
__device__ __forceinline__ void wait_for_commits(int in_flight) {
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

/// Where this lane's rows of a right operand start, in bytes of a matrix of the image. Later channels or tokens are found by exclusive or:
/// they differ in bits of the row's own, also where it is swizzled.
struct LaneRows {
  int wide, wide_transposed, square;

  __device__ explicit LaneRows(int keys) {
    const int lane = threadIdx.x % kWarpSize, row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
    wide = wide_offset(row, piece * 8, keys);
    wide_transposed = wide_offset(lane % 16, lane / 16 * 8, keys);
    square = square_offset(row, piece * 8);
  }
};

/// Right operands of all tokens and channels [16 step, 16 step + 16): [pair of tiles][term].
template <class P>
using ChannelOperands = unsigned[kTiles / 2][P::kTerms][4];

template <class P>
__device__ __forceinline__ void load_channels(unsigned rows, int step, ChannelOperands<P>& b) {
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) load_matrices((rows ^ (step * 32)) + pair * 16 * P::kKeys * 2 + t * P::kImage.wide(), b[pair][t]);
  }
}

/// sums[token] += S^T * (the token's row of a matrix), over channels [16 first, 16 (first + kCount)); get(step, fragment) gives the state's
/// fragments, `rows` is the address of this lane's rows. Where registers suffice, operands are fetched a step ahead.
template <class P, int kCount, class GetState>
__device__ __forceinline__ void multiply_state(const GetState& get, unsigned rows, int first, TokenSums& sums) {
  constexpr int kAhead = P::kTerms * P::kKeys <= 384 ? 1 : 0;
  ChannelOperands<P> b[1 + kAhead];
  if (kAhead == 1) load_channels<P>(rows, first, b[0]);
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    const int next = step + kAhead;
    if (next < kCount) load_channels<P>(rows, first + next, b[next % (1 + kAhead)]);
    Fragment<P> state;
    get(step, state);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) multiply_terms<P>(state, b[step % (1 + kAhead)][n / 2], n % 2, sums[n]);
  }
}

/// sums[token i] += a * (tokens j in [16 step, 16 step + 16) of row i of a lower triangular matrix); `rows`: the address of this lane's.
template <class P>
__device__ __forceinline__ void multiply_tokens(const Fragment<P>& a, unsigned rows, int step, TokenSums& sums) {
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    if (pair < step) continue;  // tokens before these
    unsigned b[P::kTerms][4];
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) load_matrices((rows ^ (step * 32)) + pair * 16 * kChunk * 2 + t * P::kImage.square(), b[t]);
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
  float zeros[4] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) zeros[e] = fmaf(x[n][e], 0.0f, zeros[e]);
  }
  return (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]) == 0.0f;
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

__device__ __forceinline__ void copy(const TokenSums& from, TokenSums& to) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[n][e] = from[n][e];
  }
}
__device__ __forceinline__ void set_zero(TokenSums& x) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) x[n][e] = 0.0f;
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

/// This lane's part of the state, of a state warp's half of the channels: tile n has channels 8 n + 2 t + e of value columns g and g + 8, at
/// [e] and [2 + e].
template <class P>
using StateSums = float[P::kHalfSteps * 2][4];

/// The first channel, counted in 16s, of a state warp.
template <class P>
__device__ __forceinline__ int first_step(const ChainPlace& place) {
  return place.role == Role::first_state ? 0 : P::kHalfSteps;
}

/// Calls visit(element, offset) for every element of state number n of `operand` that this lane has and that exists.
template <class P, class Operand, class State, class Visit>
__device__ __forceinline__ void for_state(const Problem& p, const ChainPlace& place, const Operand& operand, std::int64_t n, State& state,
                                          const Visit& visit) {
  const int lane = threadIdx.x % kWarpSize, first_channel = first_step<P>(place) * 16 + lane % 4 * 2;
  const std::int64_t first_column = place.first_column + place.team * kColumns + lane / 4;
  const int channels = static_cast<int>(p.key_dim) - first_channel, columns = static_cast<int>(p.value_dim - first_column);
  const std::int64_t start = operand.offset(n, place.value_head, first_channel, first_column);
#pragma unroll
  for (int i = 0; i < P::kHalfSteps * 2; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int channel = i * 8 + e % 2, column = e / 2 * 8;
      if (channel < channels && column < columns) visit(state[i][e], start + channel * operand.strides[2] + column * operand.strides[3]);
    }
  }
}

template <class P>
__device__ __forceinline__ void load_state(const Problem& p, const ChainPlace& place, StateSums<P>& state) {
  for_state<P>(p, place, p.initial_state, place.sequence, state,
               [&](float& x, std::int64_t offset) { x = p.initial_state.load(offset); });
}

/// As state number n of `to`.
template <class P>
__device__ __forceinline__ void store_state(const Problem& p, const ChainPlace& place, const OutputOperand& to, std::int64_t n,
                                            const StateSums<P>& state) {
  for_state<P>(p, place, to, n, state, [&](float x, std::int64_t offset) { to.store(offset, x); });
}

/// Where a team's warps leave things for each other.
template <class P>
struct Exchange {
  uint4* state;       // [channels / 16][term][lane]
  uint4* updates;     // [tokens / 16][term][lane]
  float4* residuals;  // [tokens / 8][lane]: the second state warp's part of R^T; once there are updates, outputs on their way out

  __device__ Exchange(unsigned char* memory, int team) {
    unsigned char* own = memory + team * ChainShared<P>::exchange_bytes();
    state = reinterpret_cast<uint4*>(own);
    updates = reinterpret_cast<uint4*>(own + ChainShared<P>::state_bytes());
    residuals = reinterpret_cast<float4*>(own + ChainShared<P>::state_bytes() + ChainShared<P>::update_bytes());
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

/// Channels [16 step, 16 step + 16) of a state warp's half, the first of which is step `first` of the whole, as a left operand in the exchange,
/// for itself and for the reading warp.
template <class P>
__device__ __forceinline__ void put_state(const StateSums<P>& state, int first, int step, const Exchange<P>& exchange) {
  Fragment<P> fragment;
  pack_fragment<P>(state[step * 2], state[step * 2 + 1], fragment);
  put_fragment<P>(fragment, first + step, exchange.state);
}

/// V^T of this team's columns.
template <class P>
__device__ __forceinline__ void load_values(const ChainPlace& place, const unsigned char* values, int pitch, TokenSums& x) {
  using Element = typename P::Element;
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (sizeof(Element) == 2) {
#pragma unroll
    for (int pair = 0; pair < kTiles / 2; ++pair) {
      unsigned raw[4];
      const unsigned char* row = values + (pair * 16 + lane % 16) * pitch;
      load_matrices_transposed(shared_address(row + (place.team * kColumns + lane / 16 * 8) * 2), raw);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 tokens = unpack<Element>(raw[i]);
        x[pair * 2 + i % 2][i / 2 * 2] = tokens.x;
        x[pair * 2 + i % 2][i / 2 * 2 + 1] = tokens.y;
      }
    }
  } else {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const auto* row = reinterpret_cast<const Element*>(values + token_of(n, e % 2) * pitch);
        x[n][e] = row[place.team * kColumns + e / 2 * 8 + lane / 4];
      }
    }
  }
}

/// T R, from R^T.
template <class P>
__device__ __forceinline__ void solve_updates(const TokenSums& residuals, unsigned rows, TokenSums& updates) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    Fragment<P> a;
    pack_fragment<P>(residuals[step * 2], residuals[step * 2 + 1], a);
    multiply_tokens<P>(a, rows, step, updates);
  }
}

/// A half's part of R^T: sums -= S^T (b k)^T
template <class P>
__device__ __forceinline__ void predict(int first, const Exchange<P>& exchange, const unsigned char* stage, const LaneRows& lane_rows,
                                        TokenSums& sums) {
  const auto get = [&](int step, Fragment<P>& fragment) { get_fragment<P>(exchange.state, first + step, fragment); };
  const unsigned rows = shared_address(stage) + P::kImage.predict() + lane_rows.wide;
  multiply_state<P, P::kHalfSteps>(get, rows, first, sums);
}

/// U of the delta update from R: T R.
template <class P>
__device__ __forceinline__ void correct(const unsigned char* stage, const LaneRows& lane_rows, TokenSums& residuals, TokenSums& updates) {
  const unsigned rows = shared_address(stage) + P::kImage.solve() + lane_rows.square;
  set_zero(updates);
  solve_updates<P>(residuals, rows, updates);
  if (!__any_sync(kFullWarp, !all_finite(residuals))) return;
  FirstBad bad = {{kChunk, kChunk}};
  take_out_bad(residuals, bad);
  set_zero(updates);
  solve_updates<P>(residuals, rows, updates);
  put_nan(bad, updates);
}

/// U of the additive update: beta V.
template <class P>
__device__ __forceinline__ void scale_values(const unsigned char* stage, const TokenSums& values, TokenSums& updates) {
  const float* betas = reinterpret_cast<const float*>(stage + P::kImage.betas());
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) updates[n][e] = values[n][e] * betas[token_of(n, e % 2)];
  }
}

/// S^T = S^T diag(D) + U^T (d k), and the new state as an operand; `updates`: U^T as a left operand. A chunk's products have sums of their own:
/// tensor cores cut off what does not fit a sum's digits, and a long memory would be short of it each time.
template <class P>
__device__ __forceinline__ void advance(const Fragment<P> (&updates)[kChunk / 16], const unsigned char* stage, const LaneRows& lane_rows,
                                        const Exchange<P>& exchange, int first, StateSums<P>& state) {
  const unsigned keys = shared_address(stage + P::kImage.accumulate()) + lane_rows.wide_transposed;
  const auto* decays = reinterpret_cast<const float2*>(stage + P::kImage.decays()) + first * 8 + threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < P::kHalfSteps; ++step) {
    float sums[2][4] = {};
#pragma unroll
    for (int half = 0; half < kChunk / 16; ++half) {
      unsigned b[P::kTerms][4];
#pragma unroll
      for (int t = 0; t < P::kTerms; ++t) {
        load_matrices_transposed((keys ^ ((first + step) * 32)) + half * 16 * P::kKeys * 2 + t * P::kImage.wide(), b[t]);
      }
      multiply_terms<P>(updates[half], b, 0, sums[0]);
      multiply_terms<P>(updates[half], b, 1, sums[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 d = decays[(step * 2 + half) * 4];
      float(&tile)[4] = state[step * 2 + half];
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[e] = fmaf(tile[e], e % 2 == 0 ? d.x : d.y, sums[half][e]);
    }
  }
#pragma unroll
  for (int step = 0; step < P::kHalfSteps; ++step) put_state<P>(state, first, step, exchange);
}

/// The first state warp's part of a chunk, until the updates are there: U^T as a left operand.
template <class P>
__device__ __forceinline__ void make_updates(const Problem& p, const ChainPlace& place, const ChainShared<P>& shared, const unsigned char* stage,
                                             const LaneRows& lane_rows, const Exchange<P>& exchange, int first,
                                             Fragment<P> (&packed)[kChunk / 16]) {
  TokenSums values, updates;
  load_values<P>(place, stage + P::kImage.bytes(), shared.value_pitch(), values);
  if (p.update == Update::delta) {
    predict<P>(first, exchange, stage, lane_rows, values);
    await(place, kResiduals);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float4 other = exchange.residuals[n * kWarpSize + threadIdx.x % kWarpSize];
      values[n][0] += other.x;
      values[n][1] += other.y;
      values[n][2] += other.z;
      values[n][3] += other.w;
    }
    correct<P>(stage, lane_rows, values, updates);
  } else {
    scale_values<P>(stage, values, updates);
  }
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    pack_fragment<P>(updates[step * 2], updates[step * 2 + 1], packed[step]);
    put_fragment<P>(packed[step], step, exchange.updates);
  }
  arrive(place, kUpdatesToSecond);
  arrive(place, kUpdatesToReading);
}

/// The second state warp's.
template <class P>
__device__ __forceinline__ void await_updates(const Problem& p, const ChainPlace& place, const unsigned char* stage, const LaneRows& lane_rows,
                                              const Exchange<P>& exchange, int first, Fragment<P> (&packed)[kChunk / 16]) {
  if (p.update == Update::delta) {
    TokenSums residuals = {};
    predict<P>(first, exchange, stage, lane_rows, residuals);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const float(&x)[4] = residuals[n];
      exchange.residuals[n * kWarpSize + threadIdx.x % kWarpSize] = make_float4(x[0], x[1], x[2], x[3]);
    }
    arrive(place, kResiduals);
  }
  await(place, kUpdatesToSecond);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) get_fragment<P>(exchange.updates, step, packed[step]);
}

/// A state warp's part of a chunk.
template <class P>
__device__ __forceinline__ void step_state(const Problem& p, const ChainPlace& place, const ChainShared<P>& shared, const unsigned char* stage,
                                           const LaneRows& lane_rows, const Exchange<P>& exchange, int first,
                                           StateSums<P>& state) {
  Fragment<P> updates[kChunk / 16];
  if (place.role == Role::first_state) {
    make_updates<P>(p, place, shared, stage, lane_rows, exchange, first, updates);
  } else {
    await_updates<P>(p, place, stage, lane_rows, exchange, first, updates);
  }
  await(place, place.role == Role::first_state ? kStateReadToFirst : kStateReadToSecond);
  advance<P>(updates, stage, lane_rows, exchange, first, state);
}

// ---------------------------------------------------------------------------------------------------------------------- reading warp

/// Outputs of a chunk through shared memory to global memory, 16 columns a token.
template <class P>
__device__ __forceinline__ void store_outputs(const Params& params, const ChainPlace& place, const Tokens& tokens, const TokenSums& out,
                                                 void* staging) {
  using Element = typename P::Element;
  static_assert(kChunk * kColumns * sizeof(Element) <= ChainShared<P>::residual_bytes());
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
  const std::int64_t first_column = place.first_column + place.team * kColumns, left = p.value_dim - first_column;
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

/// S^T (b q)^T
template <class P>
__device__ __forceinline__ void read_state(const unsigned char* stage, const LaneRows& lane_rows, const Exchange<P>& exchange, TokenSums& out) {
  const auto get = [&](int step, Fragment<P>& fragment) { get_fragment<P>(exchange.state, step, fragment); };
  multiply_state<P, P::kSteps>(get, shared_address(stage) + P::kImage.read() + lane_rows.wide, 0, out);
}

/// sums += U^T A^T
template <class P>
__device__ __forceinline__ void read_updates(const Fragment<P> (&updates)[kChunk / 16], unsigned rows, TokenSums& sums) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) multiply_tokens<P>(updates[step], rows, step, sums);
}

/// Takes what is not finite, and what comes after it, out of U^T as a left operand.
template <class P>
__device__ __forceinline__ void take_out_bad(Fragment<P> (&updates)[kChunk / 16], FirstBad& bad) {
  TokenSums x = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < P::kTerms; ++t) {
        const float2 term = unpack<BFloat16>(updates[n / 2][t][n % 2 * 2 + half]);
        x[n][half * 2] += term.x;
        x[n][half * 2 + 1] += term.y;
      }
    }
  }
  take_out_bad(x, bad);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) pack_fragment<P>(x[step * 2], x[step * 2 + 1], updates[step]);
}

/// The outputs, from S^T (b q)^T: adds U^T A^T.
template <class P>
__device__ __forceinline__ void add_updates(const unsigned char* stage, const LaneRows& lane_rows, const Exchange<P>& exchange,
                                            const TokenSums& from_state, TokenSums& out) {
  const unsigned rows = shared_address(stage) + P::kImage.attend() + lane_rows.square;
  Fragment<P> updates[kChunk / 16];
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) get_fragment<P>(exchange.updates, step, updates[step]);
  copy(from_state, out);
  read_updates<P>(updates, rows, out);
  if (!__any_sync(kFullWarp, !all_finite(out))) return;
  FirstBad bad = {{kChunk, kChunk}};
  take_out_bad<P>(updates, bad);
  copy(from_state, out);
  read_updates<P>(updates, rows, out);
  put_nan(bad, out);
}

// ------------------------------------------------------------------------------------------------------------------------------ chain

/// The ring of stages as a warp goes through it that uses what others load.
template <class P>
struct Ring {
  const ChainShared<P>& shared;
  unsigned char* memory;
  CopyArrival* arrivals;
  int slot = 0, round = 0;

  __device__ Ring(const ChainShared<P>& s, unsigned char* m) : shared(s), memory(m), arrivals(arrivals_of(s, m)) {}
  __device__ static CopyArrival* arrivals_of(const ChainShared<P>& s, unsigned char* m) {
    return reinterpret_cast<CopyArrival*>(m + s.arrivals_offset());
  }

  /// Waits for the next stage and lets go of the one before.
  __device__ __forceinline__ const unsigned char* next() {
    if (shared.stages == 1) meet_all(shared.teams);
    wait_for_arrival(arrivals[slot], round);
    meet_all(shared.teams);
    const unsigned char* stage = memory + slot * shared.stage_bytes();
    if (++slot == shared.stages) {
      slot = 0;
      round ^= 1;
    }
    return stage;
  }
};

/// The loading warp. A ring of one stage is filled when nobody needs the chunk before any more, a longer one meanwhile.
template <class P>
__device__ __forceinline__ void run_loading(const Params& params, const ChainPlace& place, const ChainShared<P>& shared, unsigned char* memory) {
  CopyArrival* arrivals = Ring<P>::arrivals_of(shared, memory);
  Loads<P> loads(params, place);
  const int ahead = shared.stages - 1;
  for (int i = 0; i < ahead; ++i) loads.start_next(params, place, shared, memory, arrivals);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    if (ahead == 0) {
      meet_all(shared.teams);
      loads.start_next(params, place, shared, memory, arrivals);
    }
    wait_for_commits(ahead > 0 ? ahead - 1 : 0);
    meet_all(shared.teams);
    if (ahead > 0) loads.start_next(params, place, shared, memory, arrivals);
  }
}

/// A reading warp.
template <class P>
__device__ __forceinline__ void run_reading(const Params& params, const ChainPlace& place, Ring<P> ring, const Exchange<P>& exchange) {
  const LaneRows lane_rows(P::kKeys);
  ChunkCursor cursor(Chunking::of(params.problem), place.tokens, 0);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    const unsigned char* stage = ring.next();
    TokenSums from_state = {}, out;
    read_state<P>(stage, lane_rows, exchange, from_state);
    arrive(place, kStateReadToFirst);
    arrive(place, kStateReadToSecond);
    await(place, kUpdatesToReading);
    add_updates<P>(stage, lane_rows, exchange, from_state, out);
    store_outputs<P>(params, place, cursor.next(), out, exchange.residuals);
  }
}

/// Which of a sequence's chunks end with an intermediate state, and where that goes.
struct IntermediateStates {
  int in_span, until;  // chunks of a span, and until the next one ends
  int next, left;      // numbers

  __device__ IntermediateStates(const Params& params, const ChainPlace& place) {
    const Problem& p = params.problem;
    const std::int64_t first =
        params.first_states == nullptr ? place.sequence * p.intermediate_count(place.tokens) : params.first_states[place.sequence];
    std::int64_t count = p.intermediate_count(place.tokens);
    if (count > p.intermediate_capacity() - first) count = p.intermediate_capacity() - first;  // wrong offsets
    next = static_cast<int>(first);
    left = static_cast<int>(count);
    in_span = until = left > 0 ? static_cast<int>(Chunking::of(p).in_span) : 0;
  }
  /// After each chunk: whether to store.
  __device__ __forceinline__ bool is_next() {
    if (left <= 0 || --until > 0) return false;
    until = in_span;
    --left;
    return true;
  }
};

/// A state warp.
template <class P>
__device__ __forceinline__ void run_state(const Params& params, const ChainPlace& place, Ring<P> ring, const Exchange<P>& exchange) {
  const Problem& p = params.problem;
  const LaneRows lane_rows(P::kKeys);
  const int first = first_step<P>(place);
  StateSums<P> state = {};
  if (p.initial_state.present) load_state<P>(p, place, state);
#pragma unroll
  for (int step = 0; step < P::kHalfSteps; ++step) put_state<P>(state, first, step, exchange);
  IntermediateStates intermediate(params, place);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    const unsigned char* stage = ring.next();
    step_state<P>(p, place, ring.shared, stage, lane_rows, exchange, first, state);
    if (intermediate.is_next()) store_state<P>(p, place, p.intermediate_states, intermediate.next++, state);
  }
  if (p.final_state.present) store_state<P>(p, place, p.final_state, place.sequence, state);
}

/// One block's work. `memory`: shared.bytes() of shared memory.
template <class P>
__device__ __forceinline__ void run_chain(const Params& params, std::int64_t block, const ChainShared<P>& shared, unsigned char* memory) {
  const ChainPlace place = chain_place_of(params, block, shared.teams);
  const Exchange<P> exchange(memory + shared.stages * shared.stage_bytes(), place.team);
  if (threadIdx.x == 0) prepare_arrivals(Ring<P>::arrivals_of(shared, memory), shared.stages);
  __syncthreads();
  if (place.role == Role::loading) {
    run_loading<P>(params, place, shared, memory);
  } else if (place.role == Role::reading) {
    run_reading<P>(params, place, Ring<P>(shared, memory), exchange);
  } else {
    run_state<P>(params, place, Ring<P>(shared, memory), exchange);
  }
}

}  // namespace delta_attention::chunkwise
