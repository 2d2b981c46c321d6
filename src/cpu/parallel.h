#pragma once

// Threads for one call: started, joined and gone when it returns.

#include <atomic>
#include <cstdint>
#include <functional>

namespace delta_attention::cpu_kernels {

/// Hands out 0, 1, ... count - 1, each once, to whoever asks.
class TaskQueue {
 public:
  explicit TaskQueue(std::int64_t count) : count_(count) {}

  /// Fetches the next task; false when none is left.
  bool take(std::int64_t& task) {
    task = next_.fetch_add(1, std::memory_order_relaxed);
    return task < count_;
  }
  void close() { next_.store(count_, std::memory_order_relaxed); }

 private:
  std::atomic<std::int64_t> next_{0};
  const std::int64_t count_;
};

/// Runs worker(0, queue) ... worker(threads - 1, queue), each on a thread of its own, the first on the calling one; if
/// the system refuses to start a thread, the later workers do not run. The first exception of any worker stops the
/// others after their current task and is thrown here.
void run_tasks(std::int64_t count, int threads, const std::function<void(int, TaskQueue&)>& worker);

}  // namespace delta_attention::cpu_kernels
