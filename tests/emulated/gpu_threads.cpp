#include "emulated/gpu_threads.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <thread>

namespace delta_attention::test {
namespace {

void run_at_once(const std::vector<BlockIndex>& indices, int threads, const std::function<void()>& body) {
  std::vector<std::unique_ptr<BlockThreads>> blocks;
  std::vector<std::thread> workers;
  for (BlockIndex index : indices) {
    BlockThreads* block = blocks.emplace_back(std::make_unique<BlockThreads>(threads)).get();
    for (int x = 0; x < threads; ++x) {
      workers.emplace_back([=, &body] {
        this_gpu_thread = {x, index, block};
        body();
      });
    }
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

thread_local GpuThread this_gpu_thread;

BlockThreads::BlockThreads(int threads) : all(threads) {
  for (int first = 0; first < threads; first += 32) {
    warps.push_back(std::make_unique<Warp>());
    for (Part& part : parts_) part.of_warps.push_back(std::make_unique<Barrier>(first + 32));
  }
}

Barrier& BlockThreads::part(int id, int threads) {
  Part& part = parts_.at(static_cast<std::size_t>(id - 1));
  int before = 0;  // relaxed: orders nothing
  if (!part.threads.compare_exchange_strong(before, threads, std::memory_order_relaxed) && before != threads) {
    throw std::logic_error("a barrier of another number of threads");
  }
  if (threads % 32 != 0) throw std::logic_error("a barrier of part of a warp");
  return *part.of_warps.at(static_cast<std::size_t>(threads / 32 - 1));
}

void run_block(int threads, const std::function<void()>& body, BlockIndex index) {
  run_at_once({index}, threads, body);
}

void run_blocks(int blocks, int threads, const std::function<void()>& body) {
  std::vector<BlockIndex> indices;
  for (int x = 0; x < blocks; ++x) indices.push_back({x, 0});
  run_at_once(indices, threads, body);
}

void run_blocks_in_turn(int threads, std::int64_t blocks, std::vector<float4>& memory, const std::function<void(std::int64_t)>& body) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  run_block(threads, [&] {
    for (std::int64_t block = 0; block < blocks; ++block) {
      if (threadIdx.x == 0) std::fill(memory.begin(), memory.end(), float4{kNan, kNan, kNan, kNan});
      __syncthreads();
      body(block);
      __syncthreads();
    }
  });
}

}  // namespace delta_attention::test
