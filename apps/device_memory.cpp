#include "device_memory.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <limits>
#include <new>
#include <utility>

#include "delta_attention/error.h"
#include "errors.h"

#if defined(DELTA_ATTENTION_WITH_CUDA)
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>
#endif

namespace delta_attention::cli {
namespace {

constexpr std::align_val_t kAlignment{256};

std::size_t bytes_of(const ConstTensor& x, DType dtype) {
  std::size_t bytes = size_of(dtype);
  for (int axis = 0; axis < x.rank; ++axis) {
    if (__builtin_mul_overflow(bytes, static_cast<std::size_t>(x.shape[axis]), &bytes)) {
      throw OutOfMemory("a tensor of more than 2^64 bytes");
    }
  }
  return bytes;
}

OwnedTensor uninitialized(const ConstTensor& like, DType dtype, Device device) {
  OwnedTensor result;
  result.buffer = Buffer(bytes_of(like, dtype), device);
  result.view.data = result.buffer.data();
  result.view.dtype = dtype;
  result.view.device = device;
  result.view.rank = like.rank;
  result.view.shape = like.shape;
  std::int64_t stride = 1;
  for (int axis = like.rank - 1; axis >= 0; --axis) {
    result.view.strides[axis] = stride;
    stride *= like.shape[axis];
  }
  return result;
}

[[noreturn]] void throw_out_of_memory(std::size_t bytes, Device device) {
  throw OutOfMemory(
      fmt::format("{} refused {:.1f} MiB of memory", text_of(device), static_cast<double>(bytes) / (1 << 20)));
}

#if defined(DELTA_ATTENTION_WITH_CUDA)

void require_success(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw CudaError(fmt::format("{}: {}", what, cudaGetErrorString(status)));
}

int gpu_count(std::string& reason) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  reason = status == cudaSuccess ? "this machine has no CUDA device" : cudaGetErrorString(status);
  return 0;
}

void use_gpu(int index) {
  std::string reason;
  const int count = gpu_count(reason);
  if (count == 0) throw NoDevice("no CUDA device: " + reason);
  if (index >= count) {
    throw NoDevice(fmt::format("cuda:{} was asked for; this machine has {} CUDA device(s)", index, count));
  }
  require_success(cudaSetDevice(index), "cudaSetDevice");
}

void* allocate_cuda(std::size_t bytes, Device device) {
  use_gpu(device.index);
  void* data = nullptr;
  const cudaError_t status = cudaMalloc(&data, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    throw_out_of_memory(bytes, device);
  }
  require_success(status, "cudaMalloc");
  return data;
}

void free_cuda(void* data) { cudaFree(data); }
void copy_cuda(void* to, const void* from, std::size_t bytes) {
  require_success(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}
void zero_cuda(void* data, std::size_t bytes) { require_success(cudaMemset(data, 0, bytes), "cudaMemset"); }

struct Event {
  cudaEvent_t handle = nullptr;
  Event() { require_success(cudaEventCreate(&handle), "cudaEventCreate"); }
  ~Event() { cudaEventDestroy(handle); }
};

double time_cuda_ms(int index, const std::function<void()>& work) {
  use_gpu(index);
  const Event begin, end;
  require_success(cudaEventRecord(begin.handle), "cudaEventRecord");
  work();
  require_success(cudaEventRecord(end.handle), "cudaEventRecord");
  require_success(cudaEventSynchronize(end.handle), "the kernel");
  float ms = 0.0f;
  require_success(cudaEventElapsedTime(&ms, begin.handle, end.handle), "cudaEventElapsedTime");
  return ms;
}

void mark_profiled(bool begins) { begins ? cudaProfilerStart() : cudaProfilerStop(); }

#else

[[noreturn]] void no_cuda() {
  throw NoDevice("this build has no CUDA kernels (configure with -DDELTA_ATTENTION_CUDA=ON)");
}
void* allocate_cuda(std::size_t, Device) { no_cuda(); }
void free_cuda(void*) {}
void copy_cuda(void*, const void*, std::size_t) { no_cuda(); }
void zero_cuda(void*, std::size_t) { no_cuda(); }
double time_cuda_ms(int, const std::function<void()>&) { no_cuda(); }
void mark_profiled(bool) {}

#endif

}  // namespace

Device parse_device(const std::string& text) {
  if (text == "cpu") return cpu();
  if (text == "cuda") return delta_attention::cuda(0);
  const std::string prefix = "cuda:";
  const std::string digits = text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : "";
  const bool number =
      !digits.empty() && digits.size() <= 4 && digits.find_first_not_of("0123456789") == std::string::npos;
  if (!number) throw BadInput(fmt::format("device: expected cpu, cuda or cuda:N, got '{}'", text));
  return delta_attention::cuda(std::stoi(digits));
}

std::string text_of(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : fmt::format("cuda:{}", device.index);
}

#if defined(DELTA_ATTENTION_WITH_CUDA)

std::vector<GpuFacts> list_gpus(std::string& reason) {
  std::vector<GpuFacts> gpus;
  const int count = gpu_count(reason);
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties{};
    require_success(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    gpus.push_back(
        {properties.name, fmt::format("{}.{}", properties.major, properties.minor), properties.totalGlobalMem});
  }
  return gpus;
}

GpuSoftware gpu_software() {
  const auto text = [](int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); };
  int runtime = 0, served = 0;
  require_success(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  require_success(cudaDriverGetVersion(&served), "cudaDriverGetVersion");
  // The version of the kernel driver; the CUDA runtime only tells the CUDA version that the driver serves.
  std::ifstream file("/sys/module/nvidia/version");
  std::string driver;
  if (!(file >> driver)) driver = "serves CUDA " + text(served);
  return {driver, text(runtime)};
}

std::string cuda_architectures() { return DELTA_ATTENTION_CUDA_ARCHITECTURES; }

#else

GpuSoftware gpu_software() { return {}; }

std::vector<GpuFacts> list_gpus(std::string& reason) {
  reason = "this build has no CUDA kernels (configure with -DDELTA_ATTENTION_CUDA=ON)";
  return {};
}

std::string cuda_architectures() { return ""; }

#endif

Buffer::Buffer(std::size_t bytes, Device device) : bytes_(bytes), device_(device) {
  const std::size_t allocated = bytes > 0 ? bytes : 1;  // a tensor of no elements still has an address
  if (device.type == DeviceType::cuda) {
    data_ = allocate_cuda(allocated, device);
    return;
  }
  data_ = ::operator new(allocated, kAlignment, std::nothrow);
  if (data_ == nullptr) throw_out_of_memory(allocated, device);
}

Buffer::~Buffer() {
  if (device_.type == DeviceType::cuda) {
    free_cuda(data_);
  } else {
    ::operator delete(data_, kAlignment);
  }
}

Buffer::Buffer(Buffer&& other) noexcept { *this = std::move(other); }

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(device_, other.device_);
  return *this;
}

OwnedTensor zeros(const ConstTensor& like, DType dtype, Device device) {
  OwnedTensor result = uninitialized(like, dtype, device);
  if (device.type == DeviceType::cuda) {
    zero_cuda(result.buffer.data(), result.buffer.bytes());
  } else {
    std::memset(result.buffer.data(), 0, result.buffer.bytes());
  }
  return result;
}

OwnedTensor copy_to(const ConstTensor& contiguous, Device device) {
  OwnedTensor result = uninitialized(contiguous, contiguous.dtype, device);
  if (result.buffer.bytes() == 0) return result;
  if (device.type == DeviceType::cpu && contiguous.device.type == DeviceType::cpu) {
    std::memcpy(result.buffer.data(), contiguous.data, result.buffer.bytes());
  } else {
    copy_cuda(result.buffer.data(), contiguous.data, result.buffer.bytes());
  }
  return result;
}

OwnedTensor repeated(const ConstTensor& block, const ConstTensor& like, Device device) {
  OwnedTensor result = uninitialized(like, block.dtype, device);
  auto* begin = static_cast<char*>(result.buffer.data());
  const std::size_t bytes = result.buffer.bytes();
  // What is filled already is the source of the next copy, so that their number is the logarithm of the size.
  const void* source = block.data;
  for (std::size_t done = 0, next = bytes_of(block, block.dtype); done < bytes; next = done, source = begin) {
    next = std::min(next, bytes - done);
    if (device.type == DeviceType::cpu) {
      std::memcpy(begin + done, source, next);
    } else {
      copy_cuda(begin + done, source, next);
    }
    done += next;
  }
  return result;
}

double time_ms(Device device, const std::function<void()>& work) {
  if (device.type == DeviceType::cuda) return time_cuda_ms(device.index, work);
  const auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

ProfiledRange::ProfiledRange(Device device) : device_(device) {
  if (device_.type == DeviceType::cuda) mark_profiled(true);
}

ProfiledRange::~ProfiledRange() {
  if (device_.type == DeviceType::cuda) mark_profiled(false);
}

}  // namespace delta_attention::cli
