#pragma once

// Matrix products by cuBLASLt, loaded where the program runs.

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "delta_attention/tensor.h"

namespace delta_attention::qkv {

/// Row-major y[b] = x[b] w + bias, sums in f32.
struct Product {
  struct Matrix {
    const void* data;
    std::int64_t stride, batch_stride;  // from row to row, from batch row to batch row, in elements
  };
  DType dtype;
  std::int64_t batch, rows, columns, channels;
  Matrix x, w, y;              // y is written
  const void* bias = nullptr;  // [columns], aligned to 16 bytes
};

/// Why there is no cuBLASLt, in words; "" if there is one.
const std::string& cublas_lt_missing_reason();

/// Launches the product on the current device. Throws Unsupported if cuBLASLt has no algorithm for it.
void multiply(const Product& product, void* scratch, std::size_t scratch_bytes, cudaStream_t stream);

}  // namespace delta_attention::qkv
