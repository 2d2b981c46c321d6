#pragma once

// Memory for views whose strides reach beyond 2^31 elements: only what is touched takes space on a CPU.

#include <sys/mman.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "support/buffers.h"

namespace delta_attention::test {

class Sparse {
 public:
  /// Throws std::runtime_error where memory is short.
  Sparse(Device device, std::size_t bytes) : device_(device), bytes_(bytes) {
    if (device.type == DeviceType::cuda) {
      data_ = device_allocate(device, bytes);
      return;
    }
    data_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("mmap of " + std::to_string(bytes) + " bytes failed");
  }
  ~Sparse() {
    if (device_.type == DeviceType::cuda) {
      device_free(device_, data_);
    } else {
      munmap(data_, bytes_);
    }
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  char* data() const { return static_cast<char*>(data_); }

 private:
  Device device_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace delta_attention::test
