#pragma once

// A query row in the registers of a warp: lane l has channels l, l + 32, ... Used by the kernels that take one row a warp and one key
// after the other.

#include <cstdint>
#include <type_traits>

#include "api/architectures.h"
#include "api/softmax_kernel.h"
#include "cuda/device/runtime.h"
#include "cuda/device/warp.cuh"
#include "cuda/softmax/scores.cuh"

namespace delta_attention::warp_row {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr std::int64_t kMostChannels = 512;
constexpr std::int64_t kMostBlocks = 0x7fffffff;

/// One row of one (sequence, head), and the keys that it sees.
struct Row {
  std::int64_t sequence, head, key_head, row;
  SequencePair pair;
  KeyRange seen;
  bool exists;
};

/// `number` counts rows of a sequence, then heads, then sequences.
__device__ __forceinline__ Row row_of(const SoftmaxProblem& p, std::int64_t number) {
  Row r;
  r.row = number % p.queries;
  r.head = number / p.queries % p.heads;
  r.key_head = p.key_head(r.head);
  r.sequence = number / p.queries / p.heads;
  r.exists = r.sequence < p.sequences;
  if (!r.exists) return r;
  r.pair = p.sequence(r.sequence);
  r.exists = r.row < r.pair.queries;
  if (r.exists) r.seen = p.visible(r.pair, r.row);
  return r;
}

/// The warp's row of the grid.
__device__ __forceinline__ Row own_row(const SoftmaxProblem& p) {
  return row_of(p, std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize);
}

inline std::int64_t blocks(const SoftmaxProblem& p) { return ceil_div(p.sequences * p.heads * p.queries, kWarps); }

template <int kPerLane>
__device__ __forceinline__ void load_channels(const InputOperand& x, std::int64_t start, std::int64_t size, float (&to)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int channel = threadIdx.x % kWarpSize + i * kWarpSize;
    to[i] = channel < size ? x.load(start + channel) : 0.0f;
  }
}

template <int kPerLane>
__device__ __forceinline__ void load_query(const SoftmaxProblem& p, const Row& r, float (&q)[kPerLane]) {
  load_channels(p.q, p.q.offset(r.pair.batch, r.pair.query_begin + r.row, r.head), p.head_dim, q);
}

/// The row's score for a key, in every lane.
template <int kPerLane>
__device__ __forceinline__ float score(const SoftmaxProblem& p, const Row& r, const float (&q)[kPerLane], std::int64_t key) {
  float k[kPerLane], dot = 0.0f;
  load_channels(p.k, p.key_offset(p.k, r.sequence, r.pair, key, r.key_head), p.head_dim, k);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) dot += q[i] * k[i];
  return score_of(p, p.scale * warp_sum(dot), r.pair.batch, r.head, r.row, key);
}

/// out = out * before + share * value of the key
template <int kPerLane>
__device__ __forceinline__ void add_value(const SoftmaxProblem& p, const Row& r, std::int64_t key, float before, float share,
                                          float (&out)[kPerLane]) {
  float v[kPerLane];
  load_channels(p.v, p.key_offset(p.v, r.sequence, r.pair, key, r.key_head), p.head_dim, v);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) out[i] = out[i] * before + share * v[i];
}

template <int kPerLane>
__device__ __forceinline__ void store_row(const SoftmaxProblem& p, const Row& r, const RunningSoftmax& s, const float (&out)[kPerLane]) {
  const std::int64_t row = r.pair.query_begin + r.row, start = p.out.offset(r.pair.batch, row, r.head);
  const int lane = threadIdx.x % kWarpSize;
  const float factor = normalizer(s);
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int channel = lane + i * kWarpSize;
    if (channel < p.head_dim) p.out.store(start + channel, factor * out[i]);
  }
  if (p.lse.present && lane == 0) p.lse.store(p.lse.offset(r.pair.batch, row, r.head), log_sum(s));
}

/// Calls use(channels of a lane) with the one for head_dim.
template <class Use>
void with_channels(const SoftmaxProblem& p, const Use& use) {
  if (p.head_dim <= 32) return use(std::integral_constant<int, 1>());
  if (p.head_dim <= 64) return use(std::integral_constant<int, 2>());
  if (p.head_dim <= 128) return use(std::integral_constant<int, 4>());
  use(std::integral_constant<int, static_cast<int>(kMostChannels) / kWarpSize>());
}

inline std::string unsupported(const SoftmaxProblem& p, const DeviceProperties& device, const Settings&) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.head_dim > kMostChannels) return "head_dim is " + std::to_string(p.head_dim) + "; at most " + std::to_string(kMostChannels);
  return blocks(p) > kMostBlocks ? "more blocks than a grid has" : "";
}

/// Launches the kernel that kernel_of(channels of a lane) returns, a warp a row.
template <class KernelOf>
void launch_rows(const SoftmaxLaunch& call, const KernelOf& kernel_of) {
  with_channels(call.problem, [&](auto per_lane) {
    const auto kernel = kernel_of(per_lane);
    kernel<<<static_cast<unsigned>(blocks(call.problem)), kThreads, 0, static_cast<cudaStream_t>(call.stream)>>>(call.problem);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
}

}  // namespace delta_attention::warp_row
