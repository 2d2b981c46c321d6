#pragma once

// The host's sums over a device's memory: a call's scratch, and what a block may have of a multiprocessor.

#include <cstddef>

namespace delta_attention {

/// What CUDA keeps of each block's share of a multiprocessor's shared memory, bytes.
constexpr std::size_t kReservedSharedMemory = 1024;

/// Lays parts of a workspace one behind the other, each aligned to 256 bytes as the whole is.
class WorkspaceParts {
 public:
  /// Where a part of `size` bytes starts.
  std::size_t reserve(std::size_t size) {
    const std::size_t at = bytes_;
    bytes_ = (bytes_ + size + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }
  /// Of all parts so far.
  std::size_t bytes() const { return bytes_; }

 private:
  static constexpr std::size_t kAlignment = 256;
  std::size_t bytes_ = 0;
};

}  // namespace delta_attention
