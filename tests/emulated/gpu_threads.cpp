#include "emulated/gpu_threads.h"

#include <algorithm>
#include <limits>
#include <thread>

namespace delta_attention::test {
namespace {

void run_at_once(const std::vector<BlockIndex>& indices, int threads, const std::vector<int>& threads_of_parts,
                 const std::function<void()>& body) {
  std::vector<std::unique_ptr<BlockThreads>> blocks;
  std::vector<std::thread> workers;
  for (BlockIndex index : indices) {
    BlockThreads* block = blocks.emplace_back(std::make_unique<BlockThreads>(threads, threads_of_parts)).get();
    for (int x = 0; x < threads; ++x) {
      workers.emplace_back([=, &body] {
        this_gpu_thread = {x, index, block};
        body();
        for (std::thread& arrival : arrivals_of_this_thread) arrival.join();
        arrivals_of_this_thread.clear();
      });
    }
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace

thread_local GpuThread this_gpu_thread;
thread_local std::vector<std::thread> arrivals_of_this_thread;

BlockThreads::BlockThreads(int threads, const std::vector<int>& threads_of_parts) : all(threads) {
  for (int first = 0; first < threads; first += 32) warps.push_back(std::make_unique<Warp>());
  for (int part : threads_of_parts) parts.push_back(std::make_unique<Barrier>(part));
}

void run_block(int threads, const std::function<void()>& body, BlockIndex index) {
  run_at_once({index}, threads, {}, body);
}

void run_blocks(int blocks, int threads, const std::vector<int>& threads_of_parts, const std::function<void()>& body) {
  std::vector<BlockIndex> indices;
  for (int x = 0; x < blocks; ++x) indices.push_back({x, 0});
  run_at_once(indices, threads, threads_of_parts, body);
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
