#pragma once

// The initial normalisers [N,HV,K] in a copy of their own: every slice of a head reads them, and one of them writes the final ones,
// perhaps in the same memory.

#include <algorithm>
#include <cstdint>

#include "cuda/device/runtime.h"
#include "problem/problem.h"

namespace delta_attention {

inline std::int64_t copied_normalizers(const Problem& p) {
  return p.normalize && p.initial_normalizer.present ? p.sequences * p.value_heads * p.key_dim : 0;
}

inline std::size_t copied_normalizers_bytes(const Problem& p) {
  return static_cast<std::size_t>(copied_normalizers(p)) * sizeof(float);
}

namespace detail {

constexpr int kCopyThreads = 256;

static __global__ void __launch_bounds__(kCopyThreads) copy_normalizers(const __grid_constant__ Problem p, float* copy) {
  const std::int64_t all = p.sequences * p.value_heads * p.key_dim, step = std::int64_t{gridDim.x} * kCopyThreads;
  for (std::int64_t i = blockIdx.x * std::int64_t{kCopyThreads} + threadIdx.x; i < all; i += step) {
    const std::int64_t head = i / p.key_dim;
    const std::int64_t at = p.initial_normalizer.offset(head / p.value_heads, head % p.value_heads, i % p.key_dim);
    copy[i] = p.initial_normalizer.load(at);
  }
}

}  // namespace detail

/// Copies them on the stream and lets the problem read the copy; nothing to do where there are none.
inline void use_copied_normalizers(Problem& p, float* memory, cudaStream_t stream) {
  if (copied_normalizers(p) == 0) return;
  constexpr std::int64_t kMostBlocks = 1024;
  const std::int64_t blocks = std::min(ceil_div(copied_normalizers(p), detail::kCopyThreads), kMostBlocks);
  detail::copy_normalizers<<<static_cast<unsigned>(blocks), detail::kCopyThreads, 0, stream>>>(p, memory);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  InputOperand copy;
  copy.data = memory;
  copy.present = true;
  copy.strides[0] = p.value_heads * p.key_dim;
  copy.strides[1] = p.key_dim;
  copy.strides[2] = 1;
  p.initial_normalizer = copy;
}

}  // namespace delta_attention
