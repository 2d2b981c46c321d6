#pragma once

// Memory, copies, clocks and the list of devices. The only part of the program that knows the CUDA runtime.

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "delta_attention/tensor.h"

namespace delta_attention::cli {

/// "cpu", "cuda" or "cuda:1"; throws BadInput for anything else.
Device parse_device(const std::string& text);
std::string text_of(Device device);

struct GpuFacts {
  std::string name;
  std::string capability;  // "9.0"
  std::size_t memory = 0;  // bytes
};

/// The GPUs of this machine. `reason` says why there are none.
std::vector<GpuFacts> list_gpus(std::string& reason);

/// "none" without CUDA.
struct GpuSoftware {
  std::string driver = "none";
  std::string cuda = "none";  // version of the runtime that the program was built with
};
GpuSoftware gpu_software();

/// What this build was compiled for: "" without CUDA.
std::string cuda_architectures();

/// Owned memory on a device, aligned to 256 bytes. Throws OutOfMemory.
class Buffer {
 public:
  Buffer() = default;
  Buffer(std::size_t bytes, Device device);
  ~Buffer();
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;

  void* data() const { return data_; }
  std::size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
  Device device_;
};

/// Owned memory with its contiguous view.
struct OwnedTensor {
  Buffer buffer;
  Tensor view;
};

/// A contiguous tensor of zeros with the shape of `like`.
OwnedTensor zeros(const ConstTensor& like, DType dtype, Device device);

/// A contiguous tensor copied to `device`.
OwnedTensor copy_to(const ConstTensor& contiguous, Device device);

/// A contiguous tensor with the shape of `like`, filled with the elements of a contiguous CPU tensor over and over.
OwnedTensor repeated(const ConstTensor& block, const ConstTensor& like, Device device);

/// Runs `work` on the device and waits for it; milliseconds, by CUDA events on a GPU.
double time_ms(Device device, const std::function<void()>& work);

/// While one lives, profilers that wait for it (ncu --profile-from-start off) look at a GPU's work.
class ProfiledRange {
 public:
  explicit ProfiledRange(Device device);
  ~ProfiledRange();
  ProfiledRange(const ProfiledRange&) = delete;
  ProfiledRange& operator=(const ProfiledRange&) = delete;

 private:
  Device device_;
};

}  // namespace delta_attention::cli
