#pragma once

// The second launch of v5_chunkwise: the state, chunk after chunk, and the outputs. chunkwise.cu tells the story.
//
// A block takes one (sequence, value head) and a slice of its value columns, 16 columns a team of warps. The state is held transposed, S^T: a
// value column is a row of the tensor cores' M side, so that the state and R are left operands straight from the registers they were summed in,
// and all that is read from shared memory are the chunk's factors, as right operands. A team of three warps has 16 columns:
//     two state warps, each with half of the channels of S^T
//                        R^T = V^T - S^T (b k)^T, each one's half to the other (additive: R = V)
//                        S^T = S^T diag(D) + R^T (T^T d k)
//     a reading warp     O^T = S^T (b q)^T + R^T (A T)^T, out
// S, as the operand that it is for both products, and R go to the reading warp through shared memory. It starts with the state before the chunk,
// as the state warps do, and is ready for R by the time it comes. One more warp loads for all teams, as many chunks ahead as there are stages.
// Nobody waits for everybody: stages, and what a team's warps have for each other, are handed over at barriers in shared memory
// (cuda/device/arrivals.cuh).
//
// NaN and infinities: a product with the zeros of A T would carry them from a token to those before it. Where outputs show any, they are taken
// out of R, and everything from the first such token of a value column on is NaN, as it is in the recurrence.

#include <cstdint>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/arrivals.cuh"
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
  static constexpr int kSteps = kKeys / 16;      // products that a whole state takes, one behind the other
  static constexpr int kHalfSteps = kSteps / 2;  // of a state warp
  static constexpr bool kRegistersToSpare = kTerms * kKeys <= 384;  // to fetch operands ahead and to keep the state's
  static constexpr bool kIsSmall = kTerms == 1 && kKeys <= 128;     // so that 128 registers do
  static constexpr int kMostTeams = kIsSmall ? 4 : 2;               // a block, by registers
  static constexpr int kMostThreads = kIsSmall ? 512 : 256;         // what the compiler gives registers for
};

/// Sums of 16 value columns and the chunk's tokens: [tokens / 8][fragment].
using TokenSums = float[kTiles][4];

/// A stage is full when its image and values are there, and empty when all who read it are done.
struct StageArrivals {
  Arrivals full, empty;
};

/// What the warps of a team let each other know, once a chunk each.
enum Handover {
  kHalves,     // both state warps: their halves of R^T are there
  kState,      // both state warps: the state before the chunk is there
  kResiduals,  // the first state warp: R^T is there
  kRead,       // the reading warp: it has read state and R, which may be written anew
  kHandovers
};

/// Shared memory of a block: a ring of stages, each the image of a chunk and its values, and what each team exchanges.
template <class P>
struct ChainShared {
  int teams, stages;

  DELTA_ATTENTION_HOST_DEVICE int value_pitch() const { return teams * kColumns * static_cast<int>(sizeof(typename P::Element)) + 16; }
  /// Rows of images stay aligned to their length, which addresses are computed with.
  DELTA_ATTENTION_HOST_DEVICE int stage_bytes() const { return (P::kImage.bytes() + kChunk * value_pitch() + 1023) / 1024 * 1024; }
  DELTA_ATTENTION_HOST_DEVICE int stage_arrivals_offset() const { return stages * stage_bytes() + teams * exchange_bytes(); }
  static constexpr int state_bytes() { return P::kKeys / 16 * P::kTerms * kWarpSize * 16; }
  static constexpr int residual_bytes() { return kChunk / 16 * P::kTerms * kWarpSize * 16; }
  static constexpr int half_bytes() { return kTiles * kWarpSize * 16; }
  static constexpr int output_bytes() { return kChunk * kColumns * static_cast<int>(sizeof(typename P::Element)); }
  static constexpr int handover_bytes() { return kHandovers * static_cast<int>(sizeof(Arrivals)); }
  static constexpr int exchange_bytes() { return state_bytes() + residual_bytes() + 4 * half_bytes() + output_bytes() + handover_bytes(); }
  DELTA_ATTENTION_HOST_DEVICE int bytes() const { return stage_arrivals_offset() + stages * static_cast<int>(sizeof(StageArrivals)); }
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

// ------------------------------------------------------------------------------------------------------------------------- loads

/// Copies the block's values of a chunk, or starts to; tokens and columns that do not exist become 0.
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

// --------------------------------------------------------------------------------------------------------------- products of a warp

/// Fragments of a left operand, 16 value columns by 16 channels or tokens, in terms.
template <class P>
using Fragment = unsigned[P::kTerms][4];

template <class P>
__device__ __forceinline__ void copy(const Fragment<P>& from, Fragment<P>& to) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[t][i] = from[t][i];
  }
}

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

/// A fragment of a left operand in the exchange: term after term.
template <class P>
__device__ __forceinline__ void put_fragment(const Fragment<P>& fragment, uint4* to) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    const unsigned(&x)[4] = fragment[t];
    to[t * kWarpSize] = uint4{x[0], x[1], x[2], x[3]};
  }
}
template <class P>
__device__ __forceinline__ void get_fragment(const uint4* from, Fragment<P>& fragment) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    const uint4 x = from[t * kWarpSize];
    fragment[t][0] = x.x;
    fragment[t][1] = x.y;
    fragment[t][2] = x.z;
    fragment[t][3] = x.w;
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

/// Where this lane's rows of right operands start, in bytes of a matrix of the image, from channel 16 `first` on; and its part of the team's
/// values, in bytes of a stage. Later channels or tokens are found by exclusive or: they differ in bits of the row's own, also where it is
/// swizzled.
template <class P>
struct LaneRows {
  unsigned wide, wide_transposed, square, values;

  __device__ LaneRows(int first, int team, int value_pitch) {
    const int lane = threadIdx.x % kWarpSize, row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
    wide = kept(swizzled<P::kKeys / 8>(row, piece) * 16 ^ first * 32);
    wide_transposed = kept(swizzled<P::kKeys / 8>(lane % 16, lane / 16) * 16 ^ first * 32);
    square = kept(square_offset(row, piece * 8));
    values = kept(P::kImage.bytes() + lane % 16 * value_pitch + (team * kColumns + lane / 16 * 8) * 2);
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

/// sums[token] += S^T * (the token's row of a matrix), over 16 kCount channels; get(step, fragment) gives S^T as a left operand, `rows` is the
/// address of this lane's rows. Where registers suffice, operands are fetched a step ahead.
template <class P, int kCount, class GetState>
__device__ __forceinline__ void multiply_state(const GetState& get, unsigned rows, TokenSums& sums) {
  constexpr int kAhead = P::kRegistersToSpare ? 1 : 0;
  ChannelOperands<P> b[1 + kAhead];
  if (kAhead == 1) load_channels<P>(rows, 0, b[0]);
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    const int next = step + kAhead;
    if (next < kCount) load_channels<P>(rows, next, b[next % (1 + kAhead)]);
    Fragment<P> a;
    get(step, a);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) multiply_terms<P>(a, b[step % (1 + kAhead)][n / 2], n % 2, sums[n]);
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

/// Sums of a chunk's tokens as a left operand.
template <class P>
using TokenFragments = Fragment<P>[kChunk / 16];

template <class P>
__device__ __forceinline__ void pack_tokens(const TokenSums& x, TokenFragments<P>& packed) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) pack_fragment<P>(x[step * 2], x[step * 2 + 1], packed[step]);
}

/// sums += a * (the lower triangular matrix)^T
template <class P>
__device__ __forceinline__ void multiply_triangle(const TokenFragments<P>& a, unsigned rows, TokenSums& sums) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) multiply_tokens<P>(a[step], rows, step, sums);
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
  unsigned char* own;   // this lane's part of what lies [...][lane], 16 bytes each
  void* outputs;        // [token][column]: on their way out
  Arrivals* handovers;  // by Handover
  int round = 0;        // the chunk's number, its last bit

  __device__ Exchange(unsigned char* memory, int team) {
    using Shared = ChainShared<P>;
    const unsigned start = shared_address(memory) + team * Shared::exchange_bytes();
    own = shared_pointer<unsigned char>(kept(start + threadIdx.x % kWarpSize * 16));
    outputs = shared_pointer<void>(start + Shared::state_bytes() + Shared::residual_bytes() + 4 * Shared::half_bytes());
    handovers = shared_pointer<Arrivals>(kept(start + Shared::exchange_bytes() - Shared::handover_bytes()));
  }

  /// Of S^T, channels [16 step, 16 step + 16); of R^T, as many tokens; of its halves, 8 tokens.
  __device__ __forceinline__ uint4* state_at(int step) const {
    return reinterpret_cast<uint4*>(own) + step * P::kTerms * kWarpSize;
  }
  __device__ __forceinline__ uint4* residuals_at(int step) const {
    return reinterpret_cast<uint4*>(own + ChainShared<P>::state_bytes()) + step * P::kTerms * kWarpSize;
  }
  __device__ __forceinline__ float4* half_at(int state_warp, int tile) const {
    unsigned char* halves = own + ChainShared<P>::state_bytes() + ChainShared<P>::residual_bytes();
    return reinterpret_cast<float4*>(halves) + ((round * 2 + state_warp) * kTiles + tile) * kWarpSize;
  }

  __device__ __forceinline__ void arrive(Handover handover) const { arrive_at(handovers[handover]); }
  __device__ __forceinline__ void await(Handover handover) const { wait_for_arrivals(handovers[handover], round); }
};

/// A state warp's half of S^T as a left operand.
template <class P>
using StateFragments = Fragment<P>[P::kHalfSteps];

/// The state as an operand, for this warp and, in the exchange, for the reading warp.
template <class P>
__device__ __forceinline__ void put_state(const ChainPlace& place, const StateSums<P>& state, const Exchange<P>& exchange,
                                          StateFragments<P>& packed) {
  const int first = first_step<P>(place);
#pragma unroll
  for (int step = 0; step < P::kHalfSteps; ++step) {
    pack_fragment<P>(state[step * 2], state[step * 2 + 1], packed[step]);
    put_fragment<P>(packed[step], exchange.state_at(first + step));
  }
  exchange.arrive(kState);
}

/// V^T of this team's columns, for the 16s of tokens that `wanted(number)` names.
template <class P, class Wanted>
__device__ __forceinline__ void load_values(const ChainPlace& place, const unsigned char* stage, int pitch, const LaneRows<P>& lane_rows,
                                            const Wanted& wanted, TokenSums& x) {
  using Element = typename P::Element;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
    if (!wanted(pair)) continue;
    if constexpr (sizeof(Element) == 2) {
      unsigned raw[4];
      load_matrices_transposed(shared_address(stage) + lane_rows.values + pair * 16 * pitch, raw);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 tokens = unpack<Element>(raw[i]);
        x[pair * 2 + i % 2][i / 2 * 2] = tokens.x;
        x[pair * 2 + i % 2][i / 2 * 2 + 1] = tokens.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int n = pair * 2 + i / 4, e = i % 4;
        const auto* row = reinterpret_cast<const Element*>(stage + P::kImage.bytes() + token_of(n, e % 2) * pitch);
        x[n][e] = row[place.team * kColumns + e / 2 * 8 + lane / 4];
      }
    }
  }
}

/// Leaves this state warp's part of R^T for the other.
template <class P>
__device__ __forceinline__ void put_half(int which, const Exchange<P>& exchange, const TokenSums& sums) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float(&x)[4] = sums[n];
    *exchange.half_at(which, n) = make_float4(x[0], x[1], x[2], x[3]);
  }
  exchange.arrive(kHalves);
}

/// Adds the other's part.
template <class P>
__device__ __forceinline__ void add_half(int which, const Exchange<P>& exchange, TokenSums& sums) {
  exchange.await(kHalves);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float4 other = *exchange.half_at(which, n);
    sums[n][0] += other.x;
    sums[n][1] += other.y;
    sums[n][2] += other.z;
    sums[n][3] += other.w;
  }
}

/// Channels of tokens [16 half, 16 half + 16) of T^T (d k) as a right operand, for a step of a state warp: [half][term].
template <class P>
using KeyOperands = unsigned[kChunk / 16][P::kTerms][4];

template <class P>
__device__ __forceinline__ void load_keys(const unsigned char* stage, const LaneRows<P>& lane_rows, int step, KeyOperands<P>& b) {
  const unsigned keys = (shared_address(stage + P::kImage.accumulate()) + lane_rows.wide_transposed) ^ (step * 32);
#pragma unroll
  for (int half = 0; half < kChunk / 16; ++half) {
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) load_matrices_transposed(keys + half * 16 * P::kKeys * 2 + t * P::kImage.wide(), b[half][t]);
  }
}

/// S^T = S^T diag(D) + R^T (T^T d k); `ahead`: the first step's keys where they are fetched ahead. A chunk's products have sums of their own:
/// tensor cores cut off what does not fit a sum's digits, and a long memory would be short of it each time.
template <class P>
__device__ __forceinline__ void advance(const TokenFragments<P>& residuals, const unsigned char* stage, const LaneRows<P>& lane_rows, int first,
                                        KeyOperands<P>& ahead, StateSums<P>& state) {
  const auto* decays = reinterpret_cast<const float2*>(stage + P::kImage.decays()) + first * 8 + threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < P::kHalfSteps; ++step) {
    if (step > 0 || !P::kRegistersToSpare) load_keys<P>(stage, lane_rows, step, ahead);
    float sums[2][4] = {};
#pragma unroll
    for (int half = 0; half < kChunk / 16; ++half) {
      multiply_terms<P>(residuals[half], ahead[half], 0, sums[0]);
      multiply_terms<P>(residuals[half], ahead[half], 1, sums[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 d = decays[(step * 2 + half) * 4];
      float(&tile)[4] = state[step * 2 + half];
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[e] = fmaf(tile[e], e % 2 == 0 ? d.x : d.y, sums[half][e]);
    }
  }
}

/// A state warp's part of a chunk. R^T comes to the same in both state warps; the first leaves it for the reading warp. Of V, with the delta
/// update, each brings half of the tokens.
template <class P>
__device__ __forceinline__ void step_state(const Problem& p, const ChainPlace& place, const ChainShared<P>& shared, const unsigned char* stage,
                                           const LaneRows<P>& lane_rows, const Exchange<P>& exchange, const StateFragments<P>& packed_state,
                                           StateSums<P>& state) {
  const int which = place.role == Role::first_state ? 0 : 1, first = first_step<P>(place);
  const bool is_delta = p.update == Update::delta;
  TokenSums sums = {};
  KeyOperands<P> ahead;
  load_values<P>(place, stage, shared.value_pitch(), lane_rows, [&](int pair) { return !is_delta || pair == which; }, sums);
  if (is_delta) {
    const auto get = [&](int step, Fragment<P>& fragment) {
      if constexpr (P::kRegistersToSpare) {
        copy<P>(packed_state[step], fragment);
      } else {
        get_fragment<P>(exchange.state_at(first + step), fragment);
      }
    };
    multiply_state<P, P::kHalfSteps>(get, shared_address(stage) + P::kImage.predict() + lane_rows.wide, sums);
    put_half<P>(which, exchange, sums);
  }
  if constexpr (P::kRegistersToSpare) load_keys<P>(stage, lane_rows, 0, ahead);
  if (is_delta) add_half<P>(1 - which, exchange, sums);
  TokenFragments<P> residuals;
  pack_tokens<P>(sums, residuals);
  if (place.role == Role::first_state) {
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) put_fragment<P>(residuals[step], exchange.residuals_at(step));
    exchange.arrive(kResiduals);
  }
  advance<P>(residuals, stage, lane_rows, first, ahead, state);
}

// ---------------------------------------------------------------------------------------------------------------------- reading warp

/// Outputs of a chunk through shared memory to global memory, 16 columns a token.
template <class P>
__device__ __forceinline__ void store_outputs(const Params& params, const ChainPlace& place, const Tokens& tokens, const TokenSums& out,
                                              void* staging) {
  using Element = typename P::Element;
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
__device__ __forceinline__ void read_state(const unsigned char* stage, const LaneRows<P>& lane_rows, const Exchange<P>& exchange, TokenSums& out) {
  const auto get = [&](int step, Fragment<P>& fragment) { get_fragment<P>(exchange.state_at(step), fragment); };
  multiply_state<P, P::kSteps>(get, shared_address(stage) + P::kImage.read() + lane_rows.wide, out);
}

/// Takes what is not finite, and what comes after it, out of R^T as a left operand.
template <class P>
__device__ __forceinline__ void take_out_bad(TokenFragments<P>& residuals, FirstBad& bad) {
  TokenSums x = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < P::kTerms; ++t) {
        const float2 term = unpack<BFloat16>(residuals[n / 2][t][n % 2 * 2 + half]);
        x[n][half * 2] += term.x;
        x[n][half * 2 + 1] += term.y;
      }
    }
  }
  take_out_bad(x, bad);
  pack_tokens<P>(x, residuals);
}

/// The outputs, from S^T (b q)^T: adds R^T (A T)^T.
template <class P>
__device__ __forceinline__ void add_residuals(const unsigned char* stage, const LaneRows<P>& lane_rows, TokenFragments<P>& residuals,
                                            const TokenSums& from_state, TokenSums& out) {
  const unsigned rows = shared_address(stage) + P::kImage.attend() + lane_rows.square;
  copy(from_state, out);
  multiply_triangle<P>(residuals, rows, out);
  if (!__any_sync(kFullWarp, !all_finite(out))) return;
  FirstBad bad = {{kChunk, kChunk}};
  take_out_bad<P>(residuals, bad);
  copy(from_state, out);
  multiply_triangle<P>(residuals, rows, out);
  put_nan(bad, out);
}

// ------------------------------------------------------------------------------------------------------------------------------ chain

/// The ring of stages as one warp goes through it.
template <class P>
struct Ring {
  const ChainShared<P>& shared;
  const int stage_bytes;
  unsigned char* const first_stage;
  StageArrivals* const first_arrivals;
  unsigned char* stage = first_stage;
  StageArrivals* arrivals = first_arrivals;
  int slot = 0, round = 0;

  __device__ Ring(const ChainShared<P>& s, unsigned char* memory)
      : shared(s),
        stage_bytes(s.stage_bytes()),
        first_stage(shared_pointer<unsigned char>(kept(shared_address(memory)))),
        first_arrivals(shared_pointer<StageArrivals>(kept(shared_address(memory + s.stage_arrivals_offset())))) {}

  __device__ __forceinline__ void advance() {
    stage += stage_bytes;
    ++arrivals;
    if (++slot < shared.stages) return;
    slot = 0;
    round ^= 1;
    stage = first_stage;
    arrivals = first_arrivals;
  }

  /// The next stage, once it is full.
  __device__ __forceinline__ const unsigned char* next() const {
    wait_for_arrivals(arrivals->full, round);
    return stage;
  }
  /// This warp is done with it.
  __device__ __forceinline__ void let_go() {
    arrive_at(arrivals->empty);
    advance();
  }
};

/// Before any warp uses what others arrive at. All threads.
template <class P>
__device__ __forceinline__ void prepare_all_arrivals(const ChainPlace& place, const Ring<P>& ring, const Exchange<P>& exchange) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < ring.shared.stages; ++i) {
      prepare_arrivals(ring.first_arrivals[i].full, kWarpSize);
      prepare_arrivals(ring.first_arrivals[i].empty, kTeamWarps * kWarpSize * place.teams);
    }
  }
  if (place.role == Role::reading && threadIdx.x % kWarpSize == 0) {
    for (int handover = 0; handover < kHandovers; ++handover)
      prepare_arrivals(exchange.handovers[handover], (handover <= kState ? 2 : 1) * kWarpSize);
  }
  publish_arrivals();
  __syncthreads();
}

/// The loading warp.
template <class P>
__device__ __forceinline__ void run_loading(const Params& params, const ChainPlace& place, Ring<P> ring) {
  const Problem& p = params.problem;
  const std::int64_t all_heads = p.value_heads * P::kImage.bytes();
  const int begin = p.update == Update::delta ? 0 : P::kImage.read();
  const unsigned char* image = params.factors + place.first_chunk * all_heads + place.value_head * P::kImage.bytes() + begin;
  ChunkCursor cursor(Chunking::of(p), place.tokens, 0);
#pragma unroll 1
  for (int chunk = 0; chunk < place.chunks; ++chunk, image += all_heads) {
    Arrivals& full = ring.arrivals->full;
    if (chunk >= ring.shared.stages) wait_for_arrivals(ring.arrivals->empty, ring.round ^ 1);
    start_bulk_copy(ring.stage + begin, image, P::kImage.bytes() - begin, full);
    start_values<P>(params, place, cursor.next(), ring.shared.value_pitch(), ring.stage + P::kImage.bytes());
    arrive_with_copies(full);
    ring.advance();
  }
}

/// A reading warp.
template <class P>
__device__ __forceinline__ void run_reading(const Params& params, const ChainPlace& place, Ring<P> ring, Exchange<P> exchange) {
  const LaneRows<P> lane_rows(0, place.team, ring.shared.value_pitch());
  ChunkCursor cursor(Chunking::of(params.problem), place.tokens, 0);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    const unsigned char* stage = ring.next();
    TokenSums from_state = {}, out;
    exchange.await(kState);
    read_state<P>(stage, lane_rows, exchange, from_state);
    exchange.await(kResiduals);
    TokenFragments<P> residuals;
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) get_fragment<P>(exchange.residuals_at(step), residuals[step]);
    exchange.arrive(kRead);
    add_residuals<P>(stage, lane_rows, residuals, from_state, out);
    ring.let_go();
    exchange.round ^= 1;
    store_outputs<P>(params, place, cursor.next(), out, exchange.outputs);
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
__device__ __forceinline__ void run_state(const Params& params, const ChainPlace& place, Ring<P> ring, Exchange<P> exchange) {
  const Problem& p = params.problem;
  const LaneRows<P> lane_rows(first_step<P>(place), place.team, ring.shared.value_pitch());
  StateSums<P> state = {};
  StateFragments<P> packed;
  if (p.initial_state.present) load_state<P>(p, place, state);
  if (place.chunks > 0) put_state<P>(place, state, exchange, packed);
  IntermediateStates intermediate(params, place);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    step_state<P>(p, place, ring.shared, ring.next(), lane_rows, exchange, packed, state);
    ring.let_go();
    exchange.await(kRead);
    exchange.round ^= 1;
    if (left > 1) put_state<P>(place, state, exchange, packed);
    if (intermediate.is_next()) store_state<P>(p, place, p.intermediate_states, intermediate.next++, state);
  }
  if (p.final_state.present) store_state<P>(p, place, p.final_state, place.sequence, state);
}

/// One block's work. `memory`: shared.bytes() of shared memory.
template <class P>
__device__ __forceinline__ void run_chain(const Params& params, std::int64_t block, const ChainShared<P>& shared, unsigned char* memory) {
  const ChainPlace place = chain_place_of(params, block, shared.teams);
  const Exchange<P> exchange(memory + shared.stages * shared.stage_bytes(), place.team);
  const Ring<P> ring(shared, memory);
  prepare_all_arrivals(place, ring, exchange);
  if (place.role == Role::loading) {
    run_loading<P>(params, place, ring);
  } else if (place.role == Role::reading) {
    run_reading<P>(params, place, ring, exchange);
  } else {
    run_state<P>(params, place, ring, exchange);
  }
}

}  // namespace delta_attention::chunkwise
