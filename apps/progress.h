#pragma once

// A progress bar on stderr, drawn only on a terminal and only for work that takes longer than a second.

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace delta_attention::cli {

bool stderr_is_terminal();

class Progress {
 public:
  explicit Progress(std::string label);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// From 0 to 1. Safe to call from the working thread.
  void set(double fraction) { fraction_ = fraction; }

 private:
  void draw_until_stopped();

  std::string label_;
  std::atomic<double> fraction_{0.0};
  std::mutex mutex_;
  std::condition_variable stop_signal_;
  bool stopped_ = false;
  std::thread drawer_;
};

}  // namespace delta_attention::cli
