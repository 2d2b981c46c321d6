#pragma once

// CUDA runtime calls with their errors turned into exceptions.

#include <cuda_runtime_api.h>

#include "delta_attention/error.h"

namespace delta_attention {

inline void cuda_check(cudaError_t status, const char* call) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // a sticky error would otherwise be blamed on the next call
  const std::string text = std::string(call) + ": " + cudaGetErrorName(status) + ": " + cudaGetErrorString(status);
  if (status == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw CudaError(text);
}

#define DELTA_ATTENTION_CUDA(call) ::delta_attention::cuda_check((call), #call)

}  // namespace delta_attention
