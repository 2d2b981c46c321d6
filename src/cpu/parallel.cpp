#include "cpu/parallel.h"

#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace delta_attention::cpu_kernels {

void run_tasks(std::int64_t count, int threads, const std::function<void(int, TaskQueue&)>& worker) {
  TaskQueue queue(count);
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto guarded = [&](int index) {
    try {
      worker(index, queue);
    } catch (...) {
      queue.close();
      const std::lock_guard<std::mutex> lock(failure_mutex);
      if (!failure) failure = std::current_exception();
    }
  };

  std::vector<std::thread> helpers;
  helpers.reserve(threads > 1 ? static_cast<std::size_t>(threads - 1) : 0);
  try {
    for (int i = 1; i < threads; ++i) helpers.emplace_back(guarded, i);
  } catch (const std::exception&) {
    // No more threads (or no memory for them) to be had: those that run, and this one, do the work.
  }
  guarded(0);
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace delta_attention::cpu_kernels
