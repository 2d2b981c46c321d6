#pragma once

// Keys in splits: what the blocks of one row leave in the workspace, and how a small launch merges it.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cuda/softmax/scores.cuh"

namespace delta_attention {

constexpr int kMergeWarps = 4;  // of a block; a warp merges one row of one head

/// In the workspace, f32, a split's numbers relative to the exponential of its maximum. One split writes outputs instead.
struct Partials {
  int splits = 1;
  float* stats = nullptr;  // [B,Nq,H,splits,2]: maximum, sum of weights
  float* sums = nullptr;   // [B,Nq,H,splits,D]: weighted sum of values

  static std::int64_t count(const SoftmaxProblem& p, int splits) { return splits > 1 ? p.batch * p.queries * p.heads * splits : 0; }
  static std::int64_t floats(const SoftmaxProblem& p, int splits) { return count(p, splits) * (p.head_dim + 2); }

  Partials() = default;
  Partials(const SoftmaxProblem& p, int splits, float* memory) : splits(splits), stats(memory), sums(memory + 2 * count(p, splits)) {}
};

/// The fewest splits of at least `least_keys` keys whose blocks leave few places idle, where one split makes `blocks` blocks and `places` run at
/// once: a last round that is nearly empty costs as much as a full one.
inline int splits_that_fill(std::int64_t places, std::int64_t blocks, std::int64_t keys, std::int64_t least_keys) {
  constexpr double kBusy = 0.9;
  const std::int64_t most = std::min(keys / least_keys, ceil_div(4 * places, blocks > 0 ? blocks : 1));
  std::int64_t best = 1;
  double best_busy = 0.0;
  for (std::int64_t splits = 1; splits <= most && best_busy < kBusy; ++splits) {
    const std::int64_t all = blocks * splits;
    const double busy = static_cast<double>(all) / static_cast<double>(ceil_div(all, places) * places);
    if (busy > best_busy) best = splits, best_busy = busy;
  }
  return static_cast<int>(best);
}

/// As many splits of at least `least_keys` keys as make `most_blocks` blocks where one split makes `blocks`.
inline int splits_for(std::int64_t most_blocks, std::int64_t blocks, std::int64_t keys, std::int64_t least_keys) {
  return static_cast<int>(std::max<std::int64_t>(1, std::min(most_blocks / std::max<std::int64_t>(blocks, 1), keys / least_keys)));
}

inline unsigned merge_blocks(const SoftmaxProblem& p) {
  return static_cast<unsigned>(ceil_div(p.batch * p.queries * p.heads, kMergeWarps));
}

/// The softmax of all parts: stats[part * stride].
__device__ __forceinline__ RunningSoftmax merged(const RunningSoftmax* stats, int parts, int stride) {
  RunningSoftmax all;
  for (int i = 0; i < parts; ++i) all.max = fmaxf(all.max, stats[i * stride].max);
  for (int i = 0; i < parts; ++i) all.sum += rescaling(stats[i * stride].max, all.max) * stats[i * stride].sum;
  return all;
}

/// Channel `channel` of a row and, with channel 0, its logarithm.
__device__ __forceinline__ void store_row(const SoftmaxProblem& p, std::int64_t batch, std::int64_t query, std::int64_t head, int channel,
                                          float sum, const RunningSoftmax& softmax) {
  p.out.store(p.out.offset(batch, query, head, channel), sum * normalizer(softmax));
  if (channel == 0 && p.lse.present) p.lse.store(p.lse.offset(batch, query, head), log_sum(softmax));
}

/// The same of one split.
__device__ __forceinline__ void store_split(const SoftmaxProblem& p, const Partials& partials, int split, std::int64_t batch,
                                            std::int64_t query, std::int64_t head, int channel, float sum,
                                            const RunningSoftmax& softmax) {
  if (partials.splits == 1) return store_row(p, batch, query, head, channel, sum, softmax);
  const std::int64_t place = ((batch * p.queries + query) * p.heads + head) * partials.splits + split;
  partials.sums[place * p.head_dim + channel] = sum;
  if (channel > 0) return;
  partials.stats[2 * place] = softmax.max;
  partials.stats[2 * place + 1] = softmax.sum;
}

/// A warp merges the splits of one row of one head.
__device__ __forceinline__ void merge_row(const SoftmaxProblem& p, const Partials& partials, std::int64_t index) {
  if (index >= p.batch * p.queries * p.heads) return;
  const int size = static_cast<int>(p.head_dim), splits = partials.splits;
  const auto* stats = reinterpret_cast<const RunningSoftmax*>(partials.stats) + index * splits;
  const float* sums = partials.sums + index * splits * size;
  const RunningSoftmax all = merged(stats, splits, 1);
  const std::int64_t batch = index / p.heads / p.queries, query = index / p.heads % p.queries, head = index % p.heads;
  for (int channel = threadIdx.x % kWarpSize; channel < size; channel += kWarpSize) {
    float sum = 0.0f;
    for (int i = 0; i < splits; ++i) sum += rescaling(stats[i].max, all.max) * sums[static_cast<std::int64_t>(i) * size + channel];
    store_row(p, batch, query, head, channel, sum, all);
  }
}

}  // namespace delta_attention
