#pragma once

// Memory on the CPU or a CUDA device with guard bytes around it and, where a view leaves gaps, between its elements. Guards are
// NaN in every floating format (or a huge number), so that a kernel which reads them shows it in its output, and they are compared
// afterwards, so that a kernel which writes them is caught.

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "delta_attention/tensor.h"

namespace delta_attention::test {

/// Allocation, copies and waiting on either device. CUDA failures throw std::runtime_error.
void* device_allocate(Device device, std::size_t bytes);
void device_free(Device device, void* data);
void device_upload(Device device, void* target, const void* source, std::size_t bytes);
void device_download(Device device, void* target, const void* source, std::size_t bytes);
void device_synchronize(Device device);

/// Why CUDA tests cannot run here; "" if they can.
std::string cuda_skip_reason();

constexpr unsigned char kNanByte = 0xFF;   // f32, f16 and bf16 made of it are NaN
constexpr unsigned char kHugeByte = 0x71;  // f32 and bf16 made of it are about 1e30

class GuardedBuffer {
 public:
  /// `bytes` of memory filled with the guard byte, `offset` bytes past a 256-byte boundary.
  GuardedBuffer(Device device, std::size_t bytes, std::size_t offset = 0, unsigned char guard = kNanByte);
  ~GuardedBuffer();
  GuardedBuffer(const GuardedBuffer&) = delete;
  GuardedBuffer& operator=(const GuardedBuffer&) = delete;

  void* data() const { return memory_ + kGuard + offset_; }

  /// Host image of the `bytes` in the middle: what upload() sends.
  unsigned char* image() { return image_.data() + kGuard + offset_; }
  const unsigned char* image() const { return image_.data() + kGuard + offset_; }
  std::size_t bytes() const { return bytes_; }

  /// Sends the image, guards included.
  void upload();
  /// What the device holds now, guards included, as an image of the same form.
  std::vector<unsigned char> download_all() const;
  static const unsigned char* middle(const std::vector<unsigned char>& all, const GuardedBuffer& of) {
    return all.data() + kGuard + of.offset_;
  }
  /// The device holds exactly the image that was uploaded.
  bool unchanged() const { return download_all() == image_; }
  /// The bytes before and after the middle still hold the guard.
  bool guards_intact() const;
  unsigned char guard() const { return guard_; }

 private:
  static constexpr std::size_t kGuard = 512;
  Device device_;
  std::size_t bytes_, offset_;
  unsigned char guard_;
  std::vector<unsigned char> image_;
  char* memory_ = nullptr;
};

}  // namespace delta_attention::test
