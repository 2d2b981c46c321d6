#include "emulated/gpu_threads.h"

#include <array>
#include <memory>
#include <thread>
#include <vector>

namespace delta_attention::test {

thread_local GpuThread this_gpu_thread;

void run_block(int threads, const std::function<void()>& body) {
  constexpr int kLanes = 32;
  Barrier block(threads);
  std::vector<std::unique_ptr<Barrier>> warps;
  std::vector<std::array<float, kLanes>> lanes(static_cast<std::size_t>(threads / kLanes));
  for (int warp = 0; warp < threads / kLanes; ++warp) warps.push_back(std::make_unique<Barrier>(kLanes));
  std::vector<std::thread> workers;
  for (int x = 0; x < threads; ++x) {
    workers.emplace_back([&, x] {
      const auto warp = static_cast<std::size_t>(x / kLanes);
      this_gpu_thread = {x, &block, warps[warp].get(), lanes[warp].data()};
      body();
    });
  }
  for (std::thread& worker : workers) worker.join();
}

}  // namespace delta_attention::test
