#pragma once

// Loads and stores of single elements, converted to and from f32, whatever the storage.

#include <cstdint>

#include "delta_attention/tensor.h"
#include "problem/host_device.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include <Eigen/Core>
#endif

namespace delta_attention {

#if defined(__CUDACC__)
using Half = __half;
using BFloat16 = __nv_bfloat16;
#else
using Half = Eigen::half;
using BFloat16 = Eigen::bfloat16;
#endif

template <class Element>
DELTA_ATTENTION_HOST_DEVICE float to_float(Element value) {
  return static_cast<float>(value);
}

template <class Element>
DELTA_ATTENTION_HOST_DEVICE Element from_float(float value) {
  return static_cast<Element>(value);
}

DELTA_ATTENTION_HOST_DEVICE float load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::f16: return to_float(static_cast<const Half*>(data)[index]);
    case DType::bf16: return to_float(static_cast<const BFloat16*>(data)[index]);
    default: return static_cast<const float*>(data)[index];
  }
}

DELTA_ATTENTION_HOST_DEVICE void store_element(void* data, DType dtype, std::int64_t index, float value) {
  switch (dtype) {
    case DType::f16: static_cast<Half*>(data)[index] = from_float<Half>(value); break;
    case DType::bf16: static_cast<BFloat16*>(data)[index] = from_float<BFloat16>(value); break;
    default: static_cast<float*>(data)[index] = value; break;
  }
}

}  // namespace delta_attention
