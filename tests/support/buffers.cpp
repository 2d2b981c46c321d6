#include "support/buffers.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <stdexcept>

#if defined(DELTA_ATTENTION_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace delta_attention::test {
namespace {

constexpr std::align_val_t kAlignment{256};

#if defined(DELTA_ATTENTION_WITH_CUDA)

void require(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

/// Makes a device current while it lives.
class Current {
 public:
  explicit Current(Device device) {
    require(cudaGetDevice(&previous_), "cudaGetDevice");
    require(cudaSetDevice(device.index), "cudaSetDevice");
  }
  ~Current() { cudaSetDevice(previous_); }

 private:
  int previous_ = 0;
};

void* cuda_allocate(Device device, std::size_t bytes) {
  const Current current(device);
  void* data = nullptr;
  require(cudaMalloc(&data, bytes), "cudaMalloc");
  return data;
}
void cuda_free(void* data) { cudaFree(data); }
void cuda_copy(void* target, const void* source, std::size_t bytes) {
  require(cudaMemcpy(target, source, bytes, cudaMemcpyDefault), "cudaMemcpy");
  // From pageable memory, cudaMemcpy may return before the copy has arrived, and non-blocking streams would not wait for it.
  require(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
}
void cuda_wait(Device device) {
  const Current current(device);
  require(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

#else

[[noreturn]] void no_cuda() { throw std::runtime_error("these tests were built without CUDA"); }
void* cuda_allocate(Device, std::size_t) { no_cuda(); }
void cuda_free(void*) {}
void cuda_copy(void*, const void*, std::size_t) { no_cuda(); }
void cuda_wait(Device) { no_cuda(); }

#endif

bool on_cpu(Device device) { return device.type == DeviceType::cpu; }

}  // namespace

std::string cuda_skip_reason() {
#if defined(DELTA_ATTENTION_WITH_CUDA)
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return std::string("no CUDA device: ") + cudaGetErrorString(status);
  return count > 0 ? "" : "this machine has no CUDA device";
#else
  return "built without CUDA";
#endif
}

void* device_allocate(Device device, std::size_t bytes) {
  return on_cpu(device) ? ::operator new(bytes, kAlignment) : cuda_allocate(device, bytes);
}

void device_free(Device device, void* data) {
  if (on_cpu(device)) {
    ::operator delete(data, kAlignment);
  } else {
    cuda_free(data);
  }
}

void device_upload(Device device, void* target, const void* source, std::size_t bytes) {
  if (on_cpu(device)) {
    if (bytes > 0) std::memcpy(target, source, bytes);
  } else {
    cuda_copy(target, source, bytes);
  }
}

void device_download(Device device, void* target, const void* source, std::size_t bytes) {
  device_upload(device, target, source, bytes);
}

void device_synchronize(Device device) {
  if (!on_cpu(device)) cuda_wait(device);
}

GuardedBuffer::GuardedBuffer(Device device, std::size_t bytes, std::size_t offset, unsigned char guard)
    : device_(device),
      bytes_(bytes),
      offset_(offset),
      guard_(guard),
      image_(bytes + offset + 2 * kGuard, guard),
      memory_(static_cast<char*>(device_allocate(device, image_.size()))) {
  upload();
}

GuardedBuffer::~GuardedBuffer() { device_free(device_, memory_); }

void GuardedBuffer::upload() { device_upload(device_, memory_, image_.data(), image_.size()); }

bool GuardedBuffer::guards_intact() const {
  const std::vector<unsigned char> all = download_all();
  const auto intact = [&](unsigned char byte) { return byte == guard_; };
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(kGuard + offset_);
  return std::all_of(all.begin(), begin, intact) &&
         std::all_of(begin + static_cast<std::ptrdiff_t>(bytes_), all.end(), intact);
}

std::vector<unsigned char> GuardedBuffer::download_all() const {
  std::vector<unsigned char> all(image_.size());
  device_download(device_, all.data(), memory_, all.size());
  return all;
}

}  // namespace delta_attention::test
