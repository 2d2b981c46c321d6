#pragma once

// The devices of this machine, asked for only when CUDA tensors come: a CPU call never touches the CUDA driver.

#include <cstddef>
#include <string>
#include <vector>

#include "api/kernel.h"

namespace delta_attention {

/// "cpu" or "cuda:1".
std::string device_text(Device device);

/// Properties of a device, cached. Throws NoDevice when it is not there.
const DeviceProperties& device_properties(Device device);

/// CUDA devices that this build can use; 0 without a driver or without CUDA in the build.
int cuda_device_count();

/// Why there is no CUDA device, in words; "" if there is one.
std::string cuda_unavailable_reason();

/// Throws InvalidArgument if `data` is not memory of that device.
void require_device_pointer(const char* operand, const void* data, Device device);

/// Bytes of any device made readable by the CPU: a copy for CUDA, the very memory for the CPU.
class HostCopy {
 public:
  HostCopy(const void* data, std::size_t bytes, Device device);
  const void* data() const { return data_; }

 private:
  std::vector<std::byte> bytes_;
  const void* data_;
};

/// Scratch memory for one call: the caller's, or stream-ordered memory of the device that lives as long as this object.
class Workspace {
 public:
  Workspace(std::size_t bytes, const Execution& execution, Device device);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  void* stream_ = nullptr;
  bool owned_ = false;
  Device device_;
};

/// Makes a CUDA device current for the duration of a call and restores the caller's after. Nothing for the CPU.
class DeviceGuard {
 public:
  explicit DeviceGuard(Device device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace delta_attention
