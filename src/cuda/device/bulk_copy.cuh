#pragma once

// Copies of many bytes from global to shared memory, started by one warp and waited for at a barrier in shared memory. From sm_90 on one
// thread starts the whole copy, the copy engine moves it and counts its bytes; before, every lane copies its 16-byte pieces and waits for them
// like for any other of its asynchronous copies.

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"

#if defined(__CUDACC__)
#include <cuda/ptx>
#endif

namespace delta_attention {

/// Where a copy's arrival is waited for.
using CopyArrival = std::uint64_t;

/// Once, by one thread; then a barrier of the block.
__device__ __forceinline__ void prepare_arrivals(CopyArrival* arrivals, int count) {
#if __CUDA_ARCH__ >= 900
  for (int i = 0; i < count; ++i) cuda::ptx::mbarrier_init(&arrivals[i], 1);
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
#endif
}

/// Starts copying `bytes`, a multiple of 16. All lanes of a warp; the bytes are there for whoever has waited for the arrival and met this warp
/// after it has waited for its own copies (__pipeline_commit, __pipeline_wait_prior).
__device__ __forceinline__ void start_bulk_copy(void* to, const void* from, int bytes, CopyArrival& arrival) {
  const int lane = threadIdx.x % kWarpSize;
#if __CUDA_ARCH__ >= 900
  if (lane != 0) return;
  using namespace cuda::ptx;
  mbarrier_arrive_expect_tx(sem_release, scope_cta, space_shared, &arrival, static_cast<std::uint32_t>(bytes));
  cp_async_bulk(space_cluster, space_global, to, from, static_cast<std::uint32_t>(bytes), &arrival);
#else
#pragma unroll 8
  for (int at = lane * 16; at < bytes; at += kWarpSize * 16) start_copy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, 16);
#endif
}

/// Waits for the arrival's next copy; `round` is 0 for the first one, 1 for the second, 0 for the third, and so on.
__device__ __forceinline__ void wait_for_arrival(CopyArrival& arrival, int round) {
#if __CUDA_ARCH__ >= 900
  while (!cuda::ptx::mbarrier_try_wait_parity(&arrival, static_cast<std::uint32_t>(round))) {
  }
#endif
}

}  // namespace delta_attention
