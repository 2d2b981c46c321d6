#pragma once

// Barriers in shared memory (mbarrier): whoever fills memory or is done with it arrives, whoever needs that waits; nobody waits to arrive. And
// copies of many bytes that arrive there. From sm_90 on one thread starts such a copy, the copy engine moves it and counts its bytes; before,
// every lane of a warp copies 16-byte pieces.

#include <cuda_awbarrier_primitives.h>
#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"

#if defined(__CUDACC__)
#include <cuda/ptx>
#endif

namespace delta_attention {

/// Rounds of arrivals, one after another.
using Arrivals = __mbarrier_t;

/// A round takes `count` arrivals. Once, by one thread, which then publishes all that it has prepared; then a barrier of the block.
__device__ __forceinline__ void prepare_arrivals(Arrivals& arrivals, int count) { __mbarrier_init(&arrivals, static_cast<unsigned>(count)); }
__device__ __forceinline__ void publish_arrivals() {
#if __CUDA_ARCH__ >= 900
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
#endif
}

/// One arrival: what this thread has written and read before is done with.
__device__ __forceinline__ void arrive_at(Arrivals& arrivals) { static_cast<void>(__mbarrier_arrive(&arrivals)); }

/// One arrival, when all copies of 4 to 16 bytes that this thread has started are there; it has written nothing else.
__device__ __forceinline__ void arrive_when_copied(Arrivals& arrivals) {
#if defined(__CUDACC__)
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(&arrivals)) : "memory");
#else
  __pipeline_arrive_on(&arrivals);
  arrive_at(arrivals);
#endif
}

/// One arrival, once they are there.
__device__ __forceinline__ void arrive_with_copies(Arrivals& arrivals) {
  __pipeline_commit();
  __pipeline_wait_prior(0);
  arrive_at(arrivals);
}

/// Until a round's arrivals have come; `round` is 0 for the first one, 1 for the second, 0 for the third, and so on.
__device__ __forceinline__ void wait_for_arrivals(Arrivals& arrivals, int round) {
#if __CUDA_ARCH__ >= 900
  while (!cuda::ptx::mbarrier_try_wait_parity(&arrivals, static_cast<std::uint32_t>(round))) {
  }
#else
  while (!__mbarrier_test_wait_parity(&arrivals, round != 0)) {
  }
#endif
}

/// Starts copying `bytes`, a multiple of 16, before an arrival with copies. All lanes of a warp.
__device__ __forceinline__ void start_bulk_copy(void* to, const void* from, int bytes, Arrivals& arrivals) {
  const int lane = threadIdx.x % kWarpSize;
#if __CUDA_ARCH__ >= 900
  if (lane != 0) return;
  using namespace cuda::ptx;
  mbarrier_expect_tx(sem_relaxed, scope_cta, space_shared, &arrivals, static_cast<std::uint32_t>(bytes));
  cp_async_bulk(space_cluster, space_global, to, from, static_cast<std::uint32_t>(bytes), &arrivals);
#else
#pragma unroll 8
  for (int at = lane * 16; at < bytes; at += kWarpSize * 16) start_copy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, 16);
#endif
}

}  // namespace delta_attention
