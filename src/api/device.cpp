#include "api/device.h"

#include <cstdint>
#include <new>

#if defined(DELTA_ATTENTION_WITH_CUDA)
#include "api/architectures.h"
#include "cuda/device/runtime.h"
#endif

namespace delta_attention {
namespace {

DeviceProperties cpu_properties() {
  DeviceProperties properties;
  properties.name = "the CPU";
  return properties;
}

constexpr std::size_t kWorkspaceAlignment = 256;

void* allocate_cpu(std::size_t bytes) {
  void* data = ::operator new (bytes, std::align_val_t{kWorkspaceAlignment}, std::nothrow);
  if (data == nullptr) throw OutOfMemory("workspace of " + std::to_string(bytes) + " bytes: the system refused it");
  return data;
}

void check_caller_workspace(std::size_t needed, const Execution& execution) {
  if (execution.workspace_bytes < needed) {
    throw InvalidArgument("workspace_bytes", std::to_string(needed) + " or more",
                          std::to_string(execution.workspace_bytes));
  }
  if (reinterpret_cast<std::uintptr_t>(execution.workspace) % kWorkspaceAlignment != 0) {
    throw InvalidArgument("workspace", "memory aligned to 256 bytes", "a pointer that is not");
  }
}

#if defined(DELTA_ATTENTION_WITH_CUDA)

DeviceProperties query_properties(int index) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value = 0;
    DELTA_ATTENTION_CUDA(cudaDeviceGetAttribute(&value, which, index));
    return value;
  };
  cudaDeviceProp full{};
  DELTA_ATTENTION_CUDA(cudaGetDeviceProperties(&full, index));
  DeviceProperties properties;
  properties.type = DeviceType::cuda;
  properties.name = full.name;
  properties.capability = 10 * full.major + full.minor;
  properties.code = code_for(built_architectures(), properties.capability);
  properties.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  properties.shared_memory = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  return properties;
}

/// Properties of all devices, at least one, read once; they are what a launch would otherwise ask the driver for.
const std::vector<DeviceProperties>& all_cuda_properties() {
  static const std::vector<DeviceProperties> all = [] {
    if (cuda_device_count() == 0) throw NoDevice(cuda_unavailable_reason());
    std::vector<DeviceProperties> list;
    for (int index = 0; index < cuda_device_count(); ++index) list.push_back(query_properties(index));
    return list;
  }();
  return all;
}

#endif

}  // namespace

std::string device_text(Device device) {
  return device.type == DeviceType::cpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

#if defined(DELTA_ATTENTION_WITH_CUDA)

int cuda_device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

std::string cuda_unavailable_reason() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return "";
  cudaGetLastError();
  if (status == cudaSuccess) return "this machine has no CUDA device";
  if (status == cudaErrorInsufficientDriver) {
    return "no CUDA device: there is no CUDA driver here, or one too old for this build";
  }
  return std::string("no CUDA device: ") + cudaGetErrorString(status);
}

void require_device_pointer(const char* operand, const void* data, Device device) {
  if (device.type == DeviceType::cpu) return;
  cudaPointerAttributes attributes{};
  DELTA_ATTENTION_CUDA(cudaPointerGetAttributes(&attributes, data));
  if (attributes.type == cudaMemoryTypeUnregistered) {
    throw InvalidArgument(operand, "memory of " + device_text(device), "a pointer that CUDA does not know");
  }
  if (attributes.type == cudaMemoryTypeDevice && attributes.device != device.index) {
    throw InvalidArgument(operand, "memory of " + device_text(device),
                          "memory of cuda:" + std::to_string(attributes.device));
  }
}

HostCopy::HostCopy(const void* data, std::size_t bytes, Device device) : data_(data) {
  if (device.type == DeviceType::cpu) return;
  bytes_.resize(bytes);
  DELTA_ATTENTION_CUDA(cudaMemcpy(bytes_.data(), data, bytes, cudaMemcpyDeviceToHost));
  data_ = bytes_.data();
}

DeviceGuard::DeviceGuard(Device device) {
  if (device.type == DeviceType::cpu) return;
  DELTA_ATTENTION_CUDA(cudaGetDevice(&previous_));
  if (previous_ == device.index) {
    previous_ = -1;
  } else {
    DELTA_ATTENTION_CUDA(cudaSetDevice(device.index));
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

#else

int cuda_device_count() { return 0; }
std::string cuda_unavailable_reason() {
  return "this build has no CUDA kernels (configure with -DDELTA_ATTENTION_CUDA=ON)";
}
void require_device_pointer(const char*, const void*, Device) {}
HostCopy::HostCopy(const void* data, std::size_t, Device) : data_(data) {}
DeviceGuard::DeviceGuard(Device) {}
DeviceGuard::~DeviceGuard() = default;

#endif

const DeviceProperties& device_properties(Device device) {
  static const DeviceProperties cpu = cpu_properties();
  if (device.type == DeviceType::cpu) return cpu;
#if defined(DELTA_ATTENTION_WITH_CUDA)
  const std::vector<DeviceProperties>& all = all_cuda_properties();
  if (device.index < 0 || device.index >= static_cast<int>(all.size())) {
    throw NoDevice(device_text(device) + " was asked for; this machine has " + std::to_string(all.size()) +
                   " CUDA device(s)");
  }
  return all[static_cast<std::size_t>(device.index)];
#else
  throw NoDevice(cuda_unavailable_reason());
#endif
}

Workspace::Workspace(std::size_t bytes, const Execution& execution, Device device)
    : stream_(execution.stream), device_(device) {
  if (bytes == 0) return;
  if (execution.workspace != nullptr) {
    check_caller_workspace(bytes, execution);
    data_ = execution.workspace;
    return;
  }
  owned_ = true;
  if (device.type == DeviceType::cpu) {
    data_ = allocate_cpu(bytes);
    return;
  }
#if defined(DELTA_ATTENTION_WITH_CUDA)
  DELTA_ATTENTION_CUDA(cudaMallocAsync(&data_, bytes, static_cast<cudaStream_t>(stream_)));
#endif
}

Workspace::~Workspace() {
  if (!owned_) return;
  if (device_.type == DeviceType::cpu) {
    ::operator delete (data_, std::align_val_t{kWorkspaceAlignment});
    return;
  }
#if defined(DELTA_ATTENTION_WITH_CUDA)
  cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_));
#endif
}

}  // namespace delta_attention
