#pragma once

// In which order blocks take (row block, head, sequence): so that heads whose keys and values fit into a cache together are worked on
// together, and so that rows which see many keys of a causal problem start before those that see few.

#include <cstdint>

#include "problem/softmax_problem.h"

namespace delta_attention {

struct WorkOrder {
  std::int64_t row_blocks;  // of a sequence
  std::int64_t heads;       // of all sequences
  std::int64_t group;       // heads that are worked on together

  WorkOrder(const SoftmaxProblem& p, int rows_of_block) : row_blocks(ceil_div(p.queries, rows_of_block)), heads(p.sequences * p.heads) {
    constexpr std::int64_t kCacheBytes = 16 << 20;  // a part of the L2 cache of large GPUs
    const std::int64_t bytes = 2 * p.keys * p.head_dim * static_cast<std::int64_t>(size_of(p.dtype)) * p.key_heads / p.heads;
    const std::int64_t fit = bytes > 0 ? kCacheBytes / bytes : heads;
    group = fit < 1 ? 1 : fit > heads ? heads : fit;
  }

  std::int64_t blocks() const { return row_blocks * heads; }

  struct Work {
    std::int64_t head;  // of all sequences
    std::int64_t row_block;
  };
  /// The last row block of every head of the group, then the one before, ...
  DELTA_ATTENTION_HOST_DEVICE Work at(std::int64_t block) const {
    const std::int64_t first = block / (group * row_blocks) * group, in_group = block % (group * row_blocks);
    const std::int64_t together = heads - first < group ? heads - first : group;
    return {first + in_group % together, row_blocks - 1 - in_group / together};
  }
};

}  // namespace delta_attention
