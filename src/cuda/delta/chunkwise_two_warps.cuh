#pragma once

// Teams of two warps for 32 value columns, where chains are many. Each warp has half of the channels of S^T in registers, for both bands of 16
// columns: the one that it finishes, and the other warp's. Of a chunk it makes, over its channels,
//     R^T = V^T - S^T (b k)^T      for the other warp, as that one does for it (V for the own band only; additive: R = V)
//     O^T = S^T (b q)^T            while that is on its way; of the other's band, to the other warp
//     S^T = S^T diag(D) + R^T (T^T d k)
//     O^T = O^T + R^T (A T)^T      for the own band, out
// Every warp loads its share of later chunks on the way: with one more warp to do that, some scheduler would have three, and registers for two
// thirds of this.

#include "cuda/delta/chunkwise_chain.cuh"

namespace delta_attention::chunkwise {

/// What the warps of a team of two let each other know, once a chunk each.
enum TwoHandover { kPartsOfR, kPartsOfO, kTwoHandovers };

template <class Element, int kKeys>
struct TwoWarps : ChainPolicy<Element, kKeys, 2, 2> {
  using Base = ChainPolicy<Element, kKeys, 2, 2>;
  static constexpr bool kExists = Base::kTerms == 1 && kKeys <= 128;  // there are registers for it
  static constexpr bool kHasLoader = false;
  static constexpr int kLeastStages = 2, kMostStates = 1;
  static constexpr int kHalfSteps = Base::kSteps / 2;  // of a warp
  static constexpr bool kFetchesAhead = true, kFetchesKeysAhead = true;
  static constexpr int kMostTeams = 4;
  static constexpr int kMostThreads = 256;  // what the compiler gives registers for

  static constexpr int band_bytes() { return kTiles * kWarpSize * 16; }
  /// Parts of R from each warp, of both bands; parts of O from each warp, of the other's band.
  static constexpr int outputs_offset(int /*states*/) { return (4 + 2) * band_bytes(); }
  static constexpr int handovers_offset(int states) { return outputs_offset(states) + 2 * StagedOutputs<Element>::kBytes; }
  static constexpr int team_bytes(int states) { return handovers_offset(states) + kTwoHandovers * static_cast<int>(sizeof(Arrivals)); }
};

/// One warp's view of what a team of two exchanges.
template <class P>
struct TwoExchange : TeamExchange<P> {
  int which;  // of the warps this is

  __device__ TwoExchange(const ChainShared<P>& shared, unsigned char* memory, const ChainPlace& place)
      : TeamExchange<P>(shared, memory, place.team, place.role), which(place.role) {}

  /// Before any warp uses them. One thread.
  __device__ __forceinline__ void prepare() const {
    for (int i = 0; i < kTwoHandovers; ++i) prepare_arrivals(this->handovers[i], 2 * kWarpSize);
  }

  /// Parts of R from warp `from`, of its own band or the other's; parts of O from it, of the other's.
  __device__ __forceinline__ float4* part_of_r(int from, bool own) const {
    return reinterpret_cast<float4*>(this->own + (from * 2 + (own ? 0 : 1)) * P::band_bytes());
  }
  __device__ __forceinline__ float4* part_of_o(int from) const { return reinterpret_cast<float4*>(this->own + (4 + from) * P::band_bytes()); }
};

/// What a warp loads of each chunk: its part of the image and of the block's values.
template <class P>
struct Loading {
  Ring<P> ring;
  ChunkCursor cursor;
  int left;  // chunks
  Images images;
  int start, bytes;  // in an image, this warp's part
  Values<P> values;

  __device__ Loading(const Params& params, const ChainPlace& place, const Ring<P>& r)
      : ring(r),
        cursor(Chunking::of(params.problem), place.tokens, 0),
        left(place.chunks),
        images(Images::of<P>(params, place)),
        values(params.problem, place, r.shared.value_pitch(), threadIdx.x / kWarpSize, 2 * place.teams) {
    const int warps = 2 * place.teams, all = P::kImage.bytes() - images.begin, part = (all / 16 + warps - 1) / warps * 16;
    start = threadIdx.x / kWarpSize * part;
    bytes = all - start < part ? all - start : part;
    start += images.begin;
  }

  /// Starts to load the next chunk, if there is one, once all are done with what its stage held.
  __device__ __forceinline__ void start_next(const Params& params) {
    ring.await_empty();
    if (left <= 0) return;
    --left;
    Arrivals& full = ring.arrivals->full;
    start_bulk_copy(ring.stage + start, images.next + start, bytes, full);
    values.load(params, cursor.next().rows, ring.stage, full);
    images.next += images.stride;
    ring.advance();
  }
};

/// A warp of a team.
template <class P>
__device__ __forceinline__ void run_warp(const Params& params, const ChainPlace& place, Ring<P> ring, TwoExchange<P> exchange) {
  const Problem& p = params.problem;
  const int which = exchange.which, first = which * P::kHalfSteps, own_column = place.team * P::kColumns + which * kBand;
  const bool is_delta = p.update == Update::delta;
  Loading<P> loading(params, place, ring);
  for (int stage = 1; stage < ring.shared.stages; ++stage) loading.start_next(params);
  const LaneRows<P> lane_rows(first, own_column, ring.shared.value_pitch());
  const std::int64_t column = place.first_column + own_column, columns[2] = {column, column + (which == 0 ? kBand : -kBand)};
  StateSums<P::kHalfSteps> state[2] = {};
  if (p.initial_state.present) load_state<P, P::kHalfSteps>(p, place, first, columns, state);
  IntermediateStates intermediate(p, place);
  ChunkCursor cursor(Chunking::of(p), place.tokens, 0);
  Outputs<typename P::Element> outputs(p, place, column, exchange.outputs);
  const auto get = [&](int step, BandFragments<P>& fragments) {
#pragma unroll
    for (int band = 0; band < 2; ++band) pack_fragment<P>(state[band][step * 2], state[band][step * 2 + 1], fragments[band]);
  };
#pragma unroll 1
  for (int left = place.chunks; left > 0; --left) {
    const unsigned char* stage = ring.next();
    const unsigned image = shared_address(stage), attend_rows = image + P::kAttend + lane_rows.square;
    BandSums<P> r = {}, out = {};
#pragma unroll
    for (int half = 0; half < kChunk / 16; ++half) load_values<P>(stage, ring.shared.value_pitch(), own_column, lane_rows, half, r[0]);
    if (is_delta) multiply_state<P, P::kHalfSteps>(get, image + P::kPredict + lane_rows.wide, r);
    put_sums(r[0], exchange.part_of_r(which, true));
    put_sums(r[1], exchange.part_of_r(which, false));
    exchange.arrive(kPartsOfR);
    multiply_state<P, P::kHalfSteps>(get, image + P::kRead + lane_rows.wide, out);
    loading.start_next(params);  // all are past the chunk before, or nearly
    KeyOperands<P> keys[2];
    load_keys<P>(stage, lane_rows, 0, keys[0]);
    exchange.await(kPartsOfR);
    add_sums(exchange.part_of_r(1 - which, false), r[0]);
    add_sums(exchange.part_of_r(1 - which, true), r[1]);
    put_sums(out[1], exchange.part_of_o(which));
    exchange.arrive(kPartsOfO);
    TokenFragments<P> residuals[2];
    pack_tokens<P>(r[0], residuals[0]);
    pack_tokens<P>(r[1], residuals[1]);
    chunkwise::advance<P, P::kHalfSteps>(residuals, stage, lane_rows, first, keys, state);
    exchange.await(kPartsOfO);
    add_sums(exchange.part_of_o(1 - which), out[0]);
    TokenSums sums;
    add_residuals<P>(attend_rows, residuals[0], out[0], sums);
    ring.let_go();
    exchange.round ^= 1;
    outputs.store(params, cursor.next().rows, sums);
    if (intermediate.is_next()) {
      store_state<P, P::kHalfSteps>(p, place, first, columns, p.intermediate_states, intermediate.next++, state);
    }
  }
  if (p.final_state.present) store_state<P, P::kHalfSteps>(p, place, first, columns, p.final_state, place.sequence, state);
}

/// One block's work. `memory`: shared.bytes() of shared memory.
template <class P, std::enable_if_t<P::kTeamWarps == 2, int> = 0>
__device__ __forceinline__ void run_chain(const Params& params, std::int64_t block, const ChainShared<P>& shared, unsigned char* memory) {
  const ChainPlace place = chain_place_of<P>(params, block, shared.teams);
  const TwoExchange<P> exchange(shared, memory, place);
  const Ring<P> ring(shared, memory);
  if (threadIdx.x == 0) ring.prepare();
  if (place.role == 0 && threadIdx.x % kWarpSize == 0) exchange.prepare();
  publish_arrivals();
  __syncthreads();
  run_warp<P>(params, place, ring, exchange);
}

}  // namespace delta_attention::chunkwise
