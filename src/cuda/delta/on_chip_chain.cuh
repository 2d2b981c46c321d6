#pragma once

// The chain of one item (on_chip_kernel.cuh tells its story): the stages of on_chip_stages.cuh one after another, as the two parts of a
// block play them, and where they meet.

#include <cstdint>

#include "cuda/delta/on_chip_stages.cuh"

namespace delta_attention::on_chip {

struct Params {
  Problem problem;
  FactorLayout layout;
  const float* factors;
  int row_blocks, row_tile;
  int slices;
  int buffers;
  bool atomic;
  int groups;
  std::int64_t items;  // (sequence, value head, slice)
  int* ticket;
  unsigned long long* arrivals;  // [groups]
  float* slots;
  std::int64_t slot_floats;  // of a group
};

__device__ __forceinline__ Block block_of(const Params& params, std::int64_t item, int rank, int slice_columns) {
  const Problem& p = params.problem;
  const std::int64_t head = item / params.slices, rows_left = p.key_dim - std::int64_t{rank} * params.row_tile;
  Block block;
  block.sequence = head / p.value_heads;
  block.value_head = head % p.value_heads;
  const Sequence sequence = p.sequence(block.sequence);
  block.batch = sequence.batch;
  block.first_token = sequence.begin;
  block.tokens = sequence.length;
  block.rank = rank;
  block.first_row = std::int64_t{rank} * params.row_tile;
  block.first_column = item % params.slices * slice_columns;
  const std::int64_t columns_left = p.value_dim - block.first_column;
  block.rows = static_cast<int>(rows_left < 0 ? 0 : rows_left < params.row_tile ? rows_left : params.row_tile);
  block.columns = static_cast<int>(columns_left < slice_columns ? columns_left : slice_columns);
  const std::int64_t place = first_micro_chunk(p, sequence, block.sequence, params.layout.flush);
  block.factors = params.factors + (place * p.value_heads + block.value_head) * params.layout.floats();
  return block;
}

/// The whole block. Its two parts come here from different places of the code, where __syncthreads must not stand.
template <class P>
__device__ __forceinline__ void meet() {
  sync_part(3, P::kThreads + P::kHelpers);
}

/// The helpers' part of an item: tiles come in one micro-chunk ahead, outputs go out one behind.
template <class P>
__device__ __forceinline__ void help_item(const Params& params, const Block& block, const Shared<P>& shared,
                                          const Group& group) {
  const FactorLayout& layout = params.layout;
  const int helper = threadIdx.x - P::kThreads;
  const std::int64_t chunks = ceil_div(block.tokens, P::kFlush), step = params.problem.value_heads * layout.floats();
  const bool ahead = params.buffers == 2;
  const float* factors = block.factors;
  Staged<P> staged;
  const auto start = [&](int side, int third) {
    start_tile<P>(layout, block, helper, factors, shared.tile(side), shared.products(third), staged);
    factors += step;
  };
  const auto finish = [&](int side, int third) {
    finish_tile<P>(layout, block, helper, shared.tile(side), shared.products(third), staged);
  };
  if (chunks > 0) {
    start(0, 0);
    finish(0, 0);
  }
  int side = 0, third = 0;  // of the micro-chunk: modulo 2 and 3
  for (std::int64_t c = 0; c <= chunks; ++c) {
    meet<P>();  // tile c is here; everything of c - 1 is computed
    const int other = 1 - side, next = third == 2 ? 0 : third + 1, before = third == 0 ? 2 : third - 1;
    const bool more = c + 1 < chunks;
    if (more && ahead) start(other, next);
    if (c > 0) {
      store_outputs<P>(params.problem, block, group, (c - 1) * P::kFlush, helper, shared, shared.products(before),
                       shared.sums(other), shared.u(other));
    }
    if (more && !ahead) {
      meet<P>();  // c is computed, its tile free
      start(other, next);
    }
    if (more) finish(other, next);
    side = other;
    third = next;
  }
}

/// The computing threads' part of an item.
template <class P>
__device__ __forceinline__ void compute_item(const Params& params, const Block& block, const Shared<P>& shared,
                                             Group& group) {
  const Problem& p = params.problem;
  const std::int64_t chunks = ceil_div(block.tokens, P::kFlush);
  const bool ahead = params.buffers == 2;
  load_state<P>(p, block, shared);
  int side = 0;
  for (std::int64_t c = 0; c < chunks; ++c) {
    const Tile tile = shared.tile(side);
    meet<P>();  // the tile is here
    read_state<P>(shared, tile);
    if (p.normalize) read_normalizer<P>(shared, tile);
    sync_part(1, P::kThreads);
    if (group.blocks > 1) {
      publish<P>(p, group, shared);
      sync_part(1, P::kThreads);
      if (threadIdx.x == 0) {
        count_arrival(group.arrivals);
        spin_until(group.arrivals, (group.flushes + 1) * group.blocks);
      }
      sync_part(1, P::kThreads);
    }
    correct_tokens<P>(p, group, block.tokens - c * P::kFlush, shared, tile, shared.sums(side), shared.u(side));
    if (group.atomic) clear_next_place<P>(group);
    sync_part(1, P::kThreads);
    advance<P>(p, shared, tile, shared.u(side));
    sync_part(1, P::kThreads);  // for racecheck: it does not see that meet(), which follows, ends these reads
    if (c + 1 < chunks && !ahead) meet<P>();  // the tile is free
    group.count_flush();
    side = 1 - side;
  }
  meet<P>();  // the last outputs can go
  store_state<P>(p, block, shared);
}

}  // namespace delta_attention::on_chip
