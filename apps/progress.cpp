#include "progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace delta_attention::cli {
namespace {

constexpr int kBarWidth = 30;
constexpr std::chrono::milliseconds kPatience{1000};
constexpr std::chrono::milliseconds kInterval{200};
constexpr const char* kClearLine = "\r\033[K";

}  // namespace

bool stderr_is_terminal() { return isatty(STDERR_FILENO) == 1; }

Progress::Progress(std::string label) : label_(std::move(label)) {
  if (stderr_is_terminal()) drawer_ = std::thread([this] { draw_until_stopped(); });
}

Progress::~Progress() {
  if (!drawer_.joinable()) return;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  stop_signal_.notify_all();
  drawer_.join();
}

void Progress::draw_until_stopped() {
  const auto begin = std::chrono::steady_clock::now();
  std::unique_lock<std::mutex> lock(mutex_);
  if (stop_signal_.wait_for(lock, kPatience, [this] { return stopped_; })) return;
  do {
    const double fraction = fraction_;
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const int filled = std::clamp(static_cast<int>(fraction * kBarWidth), 0, kBarWidth);
    fmt::print(stderr, "{}{} [{:<{}}] {:3.0f} %  {:.0f} s", kClearLine, label_, std::string(filled, '#'), kBarWidth,
               100.0 * fraction, seconds);
    std::fflush(stderr);
  } while (!stop_signal_.wait_for(lock, kInterval, [this] { return stopped_; }));
  std::fputs(kClearLine, stderr);
}

}  // namespace delta_attention::cli
