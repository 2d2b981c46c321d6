#pragma once

// A GPU block as host threads: the names that the device code of the chunk pipeline uses, each meaning what CUDA means by it. To be
// included before the code that it plays the GPU for. Lanes of a warp are threads that meet at shuffles and __syncwarp only, so
// nothing is in step by accident, and ThreadSanitizer sees every pair of accesses that no barrier orders.

#include <pthread.h>

#include <functional>

#define __device__
#define __forceinline__ inline

namespace delta_attention::test {

/// A meeting point of a fixed number of threads. (POSIX's own: ThreadSanitizer knows what it orders, and it is fast.)
class Barrier {
 public:
  explicit Barrier(int threads) { pthread_barrier_init(&barrier_, nullptr, static_cast<unsigned>(threads)); }
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;
  void arrive_and_wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};

struct GpuThread {
  int x = 0;  // threadIdx.x
  Barrier* block = nullptr;
  Barrier* warp = nullptr;
  float* lanes = nullptr;  // 32 numbers that the lanes of the warp show one another
};
extern thread_local GpuThread this_gpu_thread;

/// Runs `body` on every thread of one block of `threads` threads.
void run_block(int threads, const std::function<void()>& body);

}  // namespace delta_attention::test

struct ThreadIndex {
  struct {
    operator int() const { return delta_attention::test::this_gpu_thread.x; }
  } x;
};
inline constexpr ThreadIndex threadIdx;
struct BlockExtent {
  int x;
};
inline constexpr BlockExtent blockDim = {256};

struct alignas(16) float4 {
  float x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { delta_attention::test::this_gpu_thread.block->arrive_and_wait(); }
inline void __syncwarp() { delta_attention::test::this_gpu_thread.warp->arrive_and_wait(); }
inline float __shfl_sync(unsigned, float value, int lane) {
  float* lanes = delta_attention::test::this_gpu_thread.lanes;
  lanes[threadIdx.x % 32] = value;
  __syncwarp();
  const float other = lanes[lane];
  __syncwarp();
  return other;
}
inline float __shfl_xor_sync(unsigned mask, float value, int bits) {
  return __shfl_sync(mask, value, (threadIdx.x % 32) ^ bits);
}
inline float __ldcg(const float* at) { return *at; }
inline void __stcg(float* at, float value) { *at = value; }
