#pragma once

// Teams of three warps for 16 value columns, where chains are few.
//     two state warps, each with half of the channels of S^T
//                        R^T = V^T - S^T (b k)^T, each one's part of it to the others (additive: R = V)
//                        S^T = S^T diag(D) + R^T (T^T d k)
//     a reading warp     O^T = S^T (b q)^T + R^T (A T)^T, out
// S, as the operand that it is for both products, and the parts of R go through shared memory. There are two places for the parts and, where there
// is room, for S, so that the state warps can be a chunk ahead. Sums are grouped as in teams of two warps, and come to the same bits.

#include "cuda/delta/chunkwise_chain.cuh"

namespace delta_attention::chunkwise {

/// What the warps of a team let each other know, once a chunk each.
enum Handover {
  kParts,  // both state warps: the state before the chunk and the parts of R^T are there
  kRead,   // the reading warp: it has read both
  kHandovers
};

template <class Element, int kKeys, bool kInSections_>
struct ThreeWarps : ChainPolicy<Element, kKeys, 3, 1, kInSections_> {
  using Base = ChainPolicy<Element, kKeys, 3, 1, kInSections_>;
  static constexpr int kWidth = Base::kTerms * kKeys;
  static constexpr bool kExists = kInSections_ ? kWidth >= 192 : kWidth <= 384;  // smaller images always fit twice, larger ones never do
  static constexpr bool kHasLoader = true;
  static constexpr int kLeastStages = 1, kMostStates = 2;
  static constexpr int kHalfSteps = Base::kSteps / 2;                  // of a state warp
  static constexpr bool kFetchesAhead = kWidth <= 384;                 // there are registers for operands of the next step,
  static constexpr bool kKeepsOperand = kFetchesAhead;                 // for the state as an operand,
  static constexpr bool kFetchesKeysAhead = false;                     // but for keys of the first step only
  static constexpr bool kIsSmall = Base::kTerms == 1 && kKeys <= 128;  // so that 128 registers do
  static constexpr int kMostTeams = kIsSmall ? 4 : 2;                  // a block, by registers
  static constexpr int kMostThreads = kIsSmall ? 512 : 256;            // what the compiler gives registers for

  static constexpr int state_bytes() { return Base::kSteps * Base::kTerms * kWarpSize * 16; }
  static constexpr int part_bytes() { return kTiles * kWarpSize * 16; }
  static constexpr int parts_offset(int states) { return states * state_bytes(); }
  static constexpr int outputs_offset(int states) { return parts_offset(states) + 4 * part_bytes(); }
  static constexpr int handovers_offset(int states) { return outputs_offset(states) + StagedOutputs<Element>::kBytes; }
  static constexpr int team_bytes(int states) { return handovers_offset(states) + kHandovers * static_cast<int>(sizeof(Arrivals)); }
};

enum Role { kFirstState, kSecondState, kReading };

/// The first channel, counted in 16s, of a state warp.
template <class P>
__device__ __forceinline__ int first_step(const ChainPlace& place) {
  return place.role == kFirstState ? 0 : P::kHalfSteps;
}

/// One warp's view of what a team of three exchanges.
template <class P>
struct Exchange : TeamExchange<P> {
  int states;  // places for S^T

  __device__ Exchange(const ChainShared<P>& shared, unsigned char* memory, int team)
      : TeamExchange<P>(shared, memory, team, 0), states(shared.states) {}

  /// Before any warp uses them. One thread.
  __device__ __forceinline__ void prepare() const {
    prepare_arrivals(this->handovers[kParts], 2 * kWarpSize);
    prepare_arrivals(this->handovers[kRead], kWarpSize);
  }

  /// Of S^T before the chunk, channels [16 step, 16 step + 16).
  __device__ __forceinline__ uint4* state_at(int step) const {
    return reinterpret_cast<uint4*>(this->own + (states == 2 ? this->round : 0) * P::state_bytes()) + step * P::kTerms * kWarpSize;
  }
  /// A state warp's part of R^T.
  __device__ __forceinline__ float4* part_of_r(int state_warp) const {
    return reinterpret_cast<float4*>(this->own + P::parts_offset(states) + (this->round * 2 + state_warp) * P::part_bytes());
  }
};

/// A state warp's half of S^T as a left operand.
template <class P>
using StateFragments = Fragment<P>[P::kHalfSteps];

/// The state as an operand, for this warp and, in the exchange, for the reading warp.
template <class P>
__device__ __forceinline__ void put_state(const ChainPlace& place, const StateSums<P::kHalfSteps>& state, const Exchange<P>& exchange,
                                          StateFragments<P>& packed) {
  const int first = first_step<P>(place);
#pragma unroll
  for (int step = 0; step < P::kHalfSteps; ++step) {
    pack_fragment<P>(state[step * 2], state[step * 2 + 1], packed[step]);
    put_fragment<P>(packed[step], exchange.state_at(first + step));
  }
}

/// A state warp's part of a chunk. R^T comes to the same in both. V, with the delta update, comes with one: of even bands with the first.
template <class P>
__device__ __forceinline__ void step_state(const Problem& p, const ChainPlace& place, Ring<P>& ring, const LaneRows<P>& lane_rows,
                                           const Exchange<P>& exchange, const StateFragments<P>& packed_state,
                                           StateSums<P::kHalfSteps> (&state)[1]) {
  const int which = place.role == kFirstState ? 0 : 1, first = first_step<P>(place);
  const bool is_delta = p.update == Update::delta;
  const bool brings_values = (place.first_column / kBand + place.team) % 2 == which;
  const unsigned char* stage = ring.next();
  BandSums<P> r = {};
  KeyOperands<P> keys[2];
#pragma unroll
  for (int half = 0; half < kChunk / 16; ++half) {
    if (!is_delta || brings_values) load_values<P>(stage, ring.shared.value_pitch(), place.team * P::kColumns, lane_rows, half, r[0]);
  }
  ring.await_empty();
  exchange.await_round_before(kRead);  // of the places that are written next, what the chunk before the last one left
  if (is_delta) {
    const auto get = [&](int step, BandFragments<P>& fragments) {
      if constexpr (P::kKeepsOperand) {
        copy<P>(packed_state[step], fragments[0]);
      } else {
        get_fragment<P>(exchange.state_at(first + step), fragments[0]);
      }
    };
    multiply_state<P, P::kHalfSteps>(get, shared_address(stage) + P::kPredict + lane_rows.wide, r);
    put_sums(r[0], exchange.part_of_r(which));
  }
  exchange.arrive(kParts);
  stage = ring.next_section(stage);
  if constexpr (P::kFetchesAhead) load_keys<P>(stage, lane_rows, 0, keys[0]);
  exchange.await(kParts);
  if (is_delta) add_sums(exchange.part_of_r(1 - which), r[0]);
  TokenFragments<P> residuals[1];
  pack_tokens<P>(r[0], residuals[0]);
  chunkwise::advance<P, P::kHalfSteps>(residuals, stage, lane_rows, first, keys, state);
}

/// A reading warp.
template <class P>
__device__ __forceinline__ void run_reading(const Params& params, const ChainPlace& place, Ring<P> ring, Exchange<P> exchange) {
  const bool is_delta = params.problem.update == Update::delta;
  const LaneRows<P> lane_rows(0, place.team * P::kColumns, ring.shared.value_pitch());
  ChunkCursor cursor(Chunking::of(params.problem), place.tokens, 0);
  Outputs<typename P::Element> outputs(params.problem, place, place.first_column + place.team * P::kColumns, exchange.outputs);
  const auto first_half = [&](int step, BandFragments<P>& fragments) { get_fragment<P>(exchange.state_at(step), fragments[0]); };
  const auto second_half = [&](int step, BandFragments<P>& fragments) {
    get_fragment<P>(exchange.state_at(P::kHalfSteps + step), fragments[0]);
  };
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    const unsigned char* stage = ring.next();
    BandSums<P> from_state = {}, more = {};
    TokenSums r = {}, out;
    const auto get_values = [&] {
#pragma unroll
      for (int half = 0; half < kChunk / 16; ++half) {
        load_values<P>(stage, ring.shared.value_pitch(), place.team * P::kColumns, lane_rows, half, r);
      }
    };
    ring.await_empty();
    if (P::kInSections && !is_delta) get_values();
    ring.pass_section();
    stage = ring.next_section(stage);
    exchange.await_round_before(kRead);
    exchange.await(kParts);
    const unsigned rows = shared_address(stage) + P::kRead + lane_rows.wide;
    multiply_state<P, P::kHalfSteps>(first_half, rows, from_state);
    multiply_state<P, P::kHalfSteps>(second_half, rows ^ P::kHalfSteps * 32, more);
    add(more[0], from_state[0]);
    if (is_delta) {
      add_sums(exchange.part_of_r(0), r);
      add_sums(exchange.part_of_r(1), r);
    } else if (!P::kInSections) {
      get_values();
    }
    exchange.arrive(kRead);
    TokenFragments<P> residuals;
    pack_tokens<P>(r, residuals);
    add_residuals<P>(shared_address(stage) + P::kAttend + lane_rows.square, residuals, from_state[0], out);
    ring.let_go();
    exchange.round ^= 1;
    outputs.store(params, cursor.next().rows, out);
  }
}

/// A state warp.
template <class P>
__device__ __forceinline__ void run_state(const Params& params, const ChainPlace& place, Ring<P> ring, Exchange<P> exchange) {
  const Problem& p = params.problem;
  const int first = first_step<P>(place);
  const LaneRows<P> lane_rows(first, place.team * P::kColumns, ring.shared.value_pitch());
  const std::int64_t columns[1] = {place.first_column + place.team * P::kColumns};
  StateSums<P::kHalfSteps> state[1] = {};
  StateFragments<P> packed;
  if (p.initial_state.present) load_state<P, P::kHalfSteps>(p, place, first, columns, state);
  if (place.chunks > 0) put_state<P>(place, state[0], exchange, packed);
  IntermediateStates intermediate(p, place);
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    step_state<P>(p, place, ring, lane_rows, exchange, packed, state);
    ring.pass_section();
    ring.let_go();
    if (exchange.states == 1) exchange.await(kRead);
    exchange.round ^= 1;
    if (left > 1) put_state<P>(place, state[0], exchange, packed);
    if (intermediate.is_next()) store_state<P, P::kHalfSteps>(p, place, first, columns, p.intermediate_states, intermediate.next++, state);
  }
  if (p.final_state.present) store_state<P, P::kHalfSteps>(p, place, first, columns, p.final_state, place.sequence, state);
}

/// One block's work. `memory`: shared.bytes() of shared memory.
template <class P, std::enable_if_t<P::kTeamWarps == 3, int> = 0>
__device__ __forceinline__ void run_chain(const Params& params, std::int64_t block, const ChainShared<P>& shared, unsigned char* memory) {
  const ChainPlace place = chain_place_of<P>(params, block, shared.teams);
  const Exchange<P> exchange(shared, memory, place.team);
  const Ring<P> ring(shared, memory);
  if (threadIdx.x == 0) ring.prepare();
  if (place.role == kReading && threadIdx.x % kWarpSize == 0) exchange.prepare();
  publish_arrivals();
  __syncthreads();
  switch (place.role) {
    case kFirstState:
    case kSecondState: return run_state<P>(params, place, ring, exchange);
    case kReading: return run_reading<P>(params, place, ring, exchange);
    default: return run_loading<P>(params, place, ring);
  }
}

}  // namespace delta_attention::chunkwise
