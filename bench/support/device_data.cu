#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device/runtime.h"
#include "support/cuda_clock.h"
#include "support/device_data.h"

namespace bench {
namespace {

using delta_attention::DType;

constexpr int kThreads = 256, kWarp = 32;
constexpr std::int64_t kMostBlocks = 1 << 16;

__device__ std::uint64_t mixed(std::uint64_t x) {  // splitmix64
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

__device__ float uniform(RandomSource source, std::int64_t index) {
  const std::uint64_t bits = mixed(mixed(source.seed) ^ mixed(~source.stream) ^ mixed(static_cast<std::uint64_t>(index))) >> 41;
  return (static_cast<float>(bits) + 0.5f) * 0x1p-23f;
}

__device__ float normal(RandomSource source, std::int64_t index) {
  return sqrtf(-2.0f * logf(uniform(source, 2 * index))) * cospif(2.0f * uniform(source, 2 * index + 1));
}

__device__ float load(const void* data, DType dtype, std::int64_t at) {
  if (dtype == DType::f16) return __half2float(static_cast<const __half*>(data)[at]);
  if (dtype == DType::bf16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
  return static_cast<const float*>(data)[at];
}

__device__ void store(void* data, DType dtype, std::int64_t at, float value) {
  if (dtype == DType::f16) {
    static_cast<__half*>(data)[at] = __float2half(value);
  } else if (dtype == DType::bf16) {
    static_cast<__nv_bfloat16*>(data)[at] = __float2bfloat16(value);
  } else {
    static_cast<float*>(data)[at] = value;
  }
}

__device__ std::int64_t global_thread() { return static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ std::int64_t grid_threads() { return static_cast<std::int64_t>(gridDim.x) * blockDim.x; }

/// A warp a row.
__global__ void fill_normal_rows(void* data, DType dtype, std::int64_t rows, std::int64_t dim, bool unit_length, RandomSource source) {
  const int lane = threadIdx.x % kWarp;
  for (std::int64_t row = global_thread() / kWarp; row < rows; row += grid_threads() / kWarp) {
    float squares = 0.0f;
    for (std::int64_t i = lane; i < dim && unit_length; i += kWarp) {
      const float x = normal(source, row * dim + i);
      squares += x * x;
    }
    for (int distance = kWarp / 2; distance > 0; distance /= 2) squares += __shfl_xor_sync(~0u, squares, distance);
    const float factor = unit_length ? rsqrtf(squares) : 1.0f;
    for (std::int64_t i = lane; i < dim; i += kWarp) store(data, dtype, row * dim + i, factor * normal(source, row * dim + i));
  }
}

__global__ void fill_uniform_numbers(float* data, std::int64_t count, RandomSource source, float low, float high) {
  for (std::int64_t i = global_thread(); i < count; i += grid_threads()) data[i] = low + (high - low) * uniform(source, i);
}

__global__ void fill_decays(float* data, std::int64_t rows, std::int64_t heads, std::int64_t per_head, RandomSource source) {
  const RandomSource rates = {source.seed, source.stream + 1}, biases = {source.seed, source.stream + 2};
  for (std::int64_t i = global_thread(); i < rows * per_head; i += grid_threads()) {
    const std::int64_t head = i / per_head % heads;
    const float x = normal(source, i) + uniform(biases, head * per_head + i % per_head);
    data[i] = -expf(uniform(rates, head)) * (fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
  }
}

__global__ void gather(const void* data, DType dtype, const std::int64_t* begins, std::int64_t rows, std::int64_t dim, float* to) {
  for (std::int64_t i = global_thread(); i < rows * dim; i += grid_threads()) to[i] = load(data, dtype, begins[i / dim] + i % dim);
}

unsigned blocks_for(std::int64_t threads) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((threads + kThreads - 1) / kThreads, 1, kMostBlocks));
}

void finish() {
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());
}

}  // namespace

void fill_normal(void* data, DType dtype, std::int64_t rows, std::int64_t dim, bool unit_length, RandomSource source) {
  fill_normal_rows<<<blocks_for(rows * kWarp), kThreads>>>(data, dtype, rows, dim, unit_length, source);
  finish();
}

void fill_uniform(float* data, std::int64_t count, RandomSource source, float low, float high) {
  fill_uniform_numbers<<<blocks_for(count), kThreads>>>(data, count, source, low, high);
  finish();
}

void fill_strong_decays(float* data, std::int64_t rows, std::int64_t heads, std::int64_t per_head, RandomSource source) {
  fill_decays<<<blocks_for(rows * per_head), kThreads>>>(data, rows, heads, per_head, source);
  finish();
}

std::vector<float> read_rows(const void* data, DType dtype, const std::vector<std::int64_t>& begins, std::int64_t dim) {
  std::vector<float> rows(begins.size() * static_cast<std::size_t>(dim));
  const DeviceMemory where(begins.size() * sizeof(std::int64_t)), gathered(rows.size() * sizeof(float));
  DELTA_ATTENTION_CUDA(cudaMemcpy(where.data(), begins.data(), begins.size() * sizeof(std::int64_t), cudaMemcpyHostToDevice));
  gather<<<blocks_for(static_cast<std::int64_t>(rows.size())), kThreads>>>(
      data, dtype, static_cast<const std::int64_t*>(where.data()), static_cast<std::int64_t>(begins.size()), dim,
      static_cast<float*>(gathered.data()));
  finish();
  DELTA_ATTENTION_CUDA(cudaMemcpy(rows.data(), gathered.data(), rows.size() * sizeof(float), cudaMemcpyDeviceToHost));
  return rows;
}

}  // namespace bench
