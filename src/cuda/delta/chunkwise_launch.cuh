#pragma once

// How launches of v5_chunkwise follow one another: where the GPU and its code can, a launch starts before the one before it has ended, and
// waits inside (programmatic dependent launch).

#include <atomic>
#include <cstdint>

#include "api/kernel.h"
#include "cuda/device/runtime.h"

namespace delta_attention::chunkwise {

constexpr int kOverlapsFrom = 90;  // compute capability that code is made for

/// Until everything before this launch has ended and can be read.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ __forceinline__ void let_next_launch_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Lets blocks of a kernel have so much dynamic shared memory, and keeps all of a multiprocessor's for such blocks, so that those of the next
/// launch find room beside them. The driver is asked once for every size that is larger than those before.
template <auto kKernel>
void allow_shared_memory(int bytes, int device) {
  constexpr int kDevices = 64;
  static std::atomic<int> allowed[kDevices] = {};
  const bool remembered = device >= 0 && device < kDevices;
  if (remembered && bytes <= allowed[device].load(std::memory_order_relaxed)) return;
  DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
  if (remembered) allowed[device].store(bytes, std::memory_order_relaxed);
}

template <auto kKernel, class... Arguments>
void start(std::int64_t blocks, int threads, int shared_bytes, const Launch& call, const Arguments&... arguments) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(call.stream);
  config.attrs = &overlap;
  config.numAttrs = call.device.code >= kOverlapsFrom ? 1 : 0;
  allow_shared_memory<kKernel>(shared_bytes, call.problem.device.index);
  DELTA_ATTENTION_CUDA(cudaLaunchKernelEx(&config, kKernel, arguments...));
}

}  // namespace delta_attention::chunkwise
