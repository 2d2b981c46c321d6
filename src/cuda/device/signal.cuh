#pragma once

// Signals between blocks of one launch: a ticket that orders them and counters that one raises and another waits for.

#include <cuda/atomic>

namespace delta_attention {

/// The next ticket, the same in every thread of the block. A block's ticket, not its blockIdx, says which work it takes: whoever
/// holds a lower ticket is already running, so waiting for it cannot deadlock, whatever order the hardware starts blocks in.
__device__ __forceinline__ int take_ticket(int* counter) {
  __shared__ int ticket;
  if (threadIdx.x == 0) ticket = atomicAdd(counter, 1);
  __syncthreads();
  return ticket;
}

/// Waits until `counter` reaches `value`. What the raising block wrote before is then visible to every thread of this block.
__device__ __forceinline__ void wait_for(int* counter, int value) {
  if (threadIdx.x == 0) {
    const cuda::atomic_ref<int, cuda::thread_scope_device> signal(*counter);
    while (signal.load(cuda::memory_order_relaxed) < value) {
    }
    cuda::atomic_thread_fence(cuda::memory_order_acquire, cuda::thread_scope_device);
  }
  __syncthreads();
}

/// Raises `counter` to `value` once every thread of the block has come here; publishes what they wrote.
__device__ __forceinline__ void raise(int* counter, int value) {
  __syncthreads();
  if (threadIdx.x == 0) {
    cuda::atomic_ref<int, cuda::thread_scope_device>(*counter).store(value, cuda::memory_order_release);
  }
}

/// Counts this block as arrived, in one thread; publishes what it and the threads that it has met at a barrier wrote.
__device__ __forceinline__ void count_arrival(unsigned long long* counter) {
  cuda::atomic_ref<unsigned long long, cuda::thread_scope_device>(*counter).fetch_add(1, cuda::memory_order_release);
}

/// Waits, in one thread, until `counter` reaches `value`. Threads that then meet this one at a barrier see what the arrived blocks
/// wrote.
__device__ __forceinline__ void spin_until(unsigned long long* counter, unsigned long long value) {
  const cuda::atomic_ref<unsigned long long, cuda::thread_scope_device> signal(*counter);
  while (signal.load(cuda::memory_order_acquire) < value) {
  }
}

}  // namespace delta_attention
