#pragma once

// A GPU block as host threads: the names that the device code of the kernels uses, each meaning what CUDA means by it. To be
// included before the code that it plays the GPU for. Lanes of a warp are threads that meet at shuffles and __syncwarp only, so
// nothing is in step by accident, and ThreadSanitizer sees every pair of accesses that no barrier orders.

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__  // names one memory for the whole program: only for blocks that run one after another

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace delta_attention::test {

/// A meeting point of a fixed number of threads. (POSIX's own: ThreadSanitizer knows what it orders, and it is fast.) Two take turns: on
/// a single one, a thread that wakes late would count as ordered after all that others do until the next meeting, races included.
class Barrier {
 public:
  explicit Barrier(int threads) : threads_(static_cast<std::uint64_t>(threads)) {
    for (pthread_barrier_t& turn : turns_) pthread_barrier_init(&turn, nullptr, static_cast<unsigned>(threads));
  }
  ~Barrier() {
    for (pthread_barrier_t& turn : turns_) pthread_barrier_destroy(&turn);
  }
  Barrier(const Barrier&) = delete;
  Barrier& operator=(const Barrier&) = delete;

  void arrive_and_wait() {
    // Relaxed: orders nothing.
    const std::uint64_t meeting = arrivals_.fetch_add(1, std::memory_order_relaxed) / threads_;
    pthread_barrier_wait(&turns_[meeting % 2]);
  }

 private:
  std::uint64_t threads_;
  std::atomic<std::uint64_t> arrivals_{0};
  pthread_barrier_t turns_[2];
};

/// What the threads of one block share beside memory.
struct BlockThreads {
  /// What lanes show one another. Two boards take turns: whoever writes to one again has since met the others at the other, and
  /// they have read the first by then. So an exchange is one meeting.
  struct Board {
    std::array<float, 32> lanes;
    std::array<std::array<unsigned, 6>, 32> registers;  // fragments of matrices
  };
  struct Warp {
    Barrier barrier{32};
    Board boards[2];
  };
  Barrier all;
  std::vector<std::unique_ptr<Warp>> warps;

  explicit BlockThreads(int threads);
  /// The barrier of parts of the block with this id, where that many threads meet: the same number every time.
  Barrier& part(int id, int threads);

 private:
  struct Part {
    std::atomic<int> threads{0};
    // For one warp, for two, ...: made before any thread runs, so that making them orders nothing.
    std::vector<std::unique_ptr<Barrier>> of_warps;
  };
  std::array<Part, 15> parts_;
};

struct BlockIndex {
  int x = 0, y = 0;
};

struct GpuThread {
  int x = 0;         // threadIdx.x
  BlockIndex index;  // blockIdx
  BlockThreads* block = nullptr;
  const char* shared_memory = nullptr;  // where addresses of shared memory start, for code that computes with them
  int exchanges = 0;                    // of this lane with its warp
};
extern thread_local GpuThread this_gpu_thread;

/// Runs `body` on every thread of one block of `threads` threads.
void run_block(int threads, const std::function<void()>& body, BlockIndex index = {});

/// The same for blocks x = 0 .. blocks - 1 at once.
void run_blocks(int blocks, int threads, const std::function<void()>& body);

/// Runs `body` of blocks 0 .. blocks - 1 one after another on the same threads; each finds NaN in `memory`.
void run_blocks_in_turn(int threads, std::int64_t blocks, std::vector<float4>& memory, const std::function<void(std::int64_t)>& body);

}  // namespace delta_attention::test

struct ThreadIndex {
  struct {
    operator int() const { return delta_attention::test::this_gpu_thread.x; }
  } x;
};
inline constexpr ThreadIndex threadIdx;
struct IndexOfBlock {
  struct {
    operator int() const { return delta_attention::test::this_gpu_thread.index.x; }
  } x;
  struct {
    operator int() const { return delta_attention::test::this_gpu_thread.index.y; }
  } y;
};
inline constexpr IndexOfBlock blockIdx;
struct BlockExtent {
  int x;
};
inline constexpr BlockExtent blockDim = {256};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

inline void __syncthreads() { delta_attention::test::this_gpu_thread.block->all.arrive_and_wait(); }
inline delta_attention::test::BlockThreads::Warp& this_warp() {
  const delta_attention::test::GpuThread& thread = delta_attention::test::this_gpu_thread;
  return *thread.block->warps[static_cast<std::size_t>(thread.x / 32)];
}
inline void __syncwarp() { this_warp().barrier.arrive_and_wait(); }
/// Writes to this lane's place with put(board, lane), meets the other lanes, and returns what all have written.
template <class Put>
const delta_attention::test::BlockThreads::Board& exchange(const Put& put) {
  auto& board = this_warp().boards[delta_attention::test::this_gpu_thread.exchanges++ % 2];
  put(board, static_cast<std::size_t>(threadIdx.x % 32));
  __syncwarp();
  return board;
}
inline float __shfl_sync(unsigned, float value, int lane) {
  return exchange([&](auto& board, std::size_t own) { board.lanes[own] = value; }).lanes[static_cast<std::size_t>(lane)];
}
inline unsigned __shfl_sync(unsigned, unsigned value, int lane) {
  return exchange([&](auto& board, std::size_t own) { board.registers[own][0] = value; }).registers[static_cast<std::size_t>(lane)][0];
}
inline float __shfl_xor_sync(unsigned mask, float value, int bits) {
  return __shfl_sync(mask, value, (threadIdx.x % 32) ^ bits);
}

inline bool __any_sync(unsigned, bool condition) {
  const auto& board = exchange([&](auto& written, std::size_t own) { written.lanes[own] = condition ? 1.0f : 0.0f; });
  bool any = false;
  for (const float lane : board.lanes) any = any || lane != 0.0f;
  return any;
}

/// combine(...combine(combine(0, lane 0's value), lane 1's)...)
template <class Combine>
unsigned reduce_lanes(unsigned value, const Combine& combine) {
  const auto& board = exchange([&](auto& written, std::size_t own) { written.registers[own][0] = value; });
  unsigned result = 0;
  for (const auto& lane : board.registers) result = combine(result, lane[0]);
  return result;
}
inline unsigned __reduce_or_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return a | b; });
}
inline unsigned __reduce_max_sync(unsigned, unsigned value) {
  return reduce_lanes(value, [](unsigned a, unsigned b) { return std::max(a, b); });
}
inline int __reduce_add_sync(unsigned, int value) {
  return static_cast<int>(reduce_lanes(static_cast<unsigned>(value), [](unsigned a, unsigned b) { return a + b; }));
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

using std::isfinite;
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }

template <class T>
T __ldcg(const T* at) {
  return *at;
}
template <class T>
void __stcg(T* at, T value) {
  *at = value;
}
inline unsigned atomicOr(unsigned* to, unsigned bits) { return __atomic_fetch_or(to, bits, __ATOMIC_RELAXED); }
inline int atomicAdd(int* to, int x) { return __atomic_fetch_add(to, x, __ATOMIC_RELAXED); }
inline float atomicAdd(float* to, float x) {
  float old, sum;
  __atomic_load(to, &old, __ATOMIC_RELAXED);
  do {
    sum = old + x;
  } while (!__atomic_compare_exchange(to, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
