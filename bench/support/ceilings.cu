#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "cuda/device/mma.cuh"
#include "cuda/device/runtime.h"
#include "support/ceilings.h"
#include "support/cuda_clock.h"

namespace bench {
namespace {

constexpr int kThreads = 256, kWarp = 32;
constexpr int kChains = 16;   // independent multiply-adds of a thread, or products of a warp: more than the latency needs
constexpr int kRounds = 4096;

/// kRounds x kChains multiply-adds a thread. The sum is stored, so that they are really done; factors come from the caller, so that they
/// cannot be done beforehand.
__global__ void __launch_bounds__(kThreads) multiply_floats(float factor, float summand, float* out) {
  float x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = static_cast<float>(threadIdx.x + i);
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kChains; ++i) x[i] = fmaf(x[i], factor, summand);
  }
  float sum = 0.0f;
  for (int i = 0; i < kChains; ++i) sum += x[i];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

constexpr double kMmaFlops = 2.0 * 16 * 8 * 16;
constexpr int kTiles = 8;  // independent sums of a warp

__global__ void __launch_bounds__(kThreads) multiply_tiles(unsigned bits, float* out) {
  const unsigned a[4] = {bits, bits + 1, bits + 2, bits + 3}, b[2] = {bits + 4, bits + threadIdx.x};
  float c[kTiles][4];
  for (int i = 0; i < kTiles; ++i) {
    for (float& x : c[i]) x = static_cast<float>(i);  // equal tiles would be computed once
  }
  for (int round = 0; round < kRounds; ++round) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) delta_attention::multiply_add<delta_attention::BFloat16>(a, b[0], b[1], c[i]);
  }
  float sum = 0.0f;
  for (int i = 0; i < kTiles; ++i) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

/// The fastest of a few replays, in seconds.
double fastest(const CudaCall::Launch& launch) {
  CudaCall call({}, 0, launch);
  call.time_cold(1);  // loads the kernel, which must not happen while a graph is captured
  const std::vector<double> seconds = call.time_graph(8);
  return *std::min_element(seconds.begin(), seconds.end());
}

cudaStream_t stream_of(const delta_attention::Execution& execution) { return static_cast<cudaStream_t>(execution.stream); }

/// Every multiprocessor copies: a copy of the driver's may run on a copy engine, which is slower.
__global__ void __launch_bounds__(kThreads) copy(const uint4* from, uint4* to, std::int64_t count) {
  const std::int64_t threads = std::int64_t{gridDim.x} * kThreads;
#pragma unroll 4
  for (std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += threads) to[i] = from[i];
}

double copied_bytes_per_second(int blocks) {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const DeviceMemory from(kBytes), to(kBytes);
  DELTA_ATTENTION_CUDA(cudaMemset(from.data(), 0, kBytes));
  const double seconds = fastest([&](const delta_attention::Execution& execution) {
    copy<<<blocks, kThreads, 0, stream_of(execution)>>>(static_cast<const uint4*>(from.data()), static_cast<uint4*>(to.data()),
                                                        kBytes / sizeof(uint4));
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
  return 2.0 * kBytes / seconds;
}

Ceilings measure() {
  int processors = 0;
  DELTA_ATTENTION_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  const int blocks = 8 * processors;
  const DeviceMemory out(sizeof(float) * kThreads * static_cast<std::size_t>(blocks));
  auto* const sums = static_cast<float*>(out.data());
  const double multiply_adds = fastest([=](const delta_attention::Execution& execution) {
    multiply_floats<<<blocks, kThreads, 0, stream_of(execution)>>>(0.999f, 1e-3f, sums);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
  const double products = fastest([=](const delta_attention::Execution& execution) {
    multiply_tiles<<<blocks, kThreads, 0, stream_of(execution)>>>(0x3C003C00u, sums);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
  const double threads = static_cast<double>(blocks) * kThreads;
  Ceilings ceilings;
  ceilings.bytes = copied_bytes_per_second(blocks);
  ceilings.f32_flops = 2.0 * threads * kRounds * kChains / multiply_adds;
  ceilings.bf16_mma_flops = kMmaFlops * threads / kWarp * kRounds * kTiles / products;
  return ceilings;
}

std::string whole(double value) { return std::to_string(static_cast<long long>(value)); }

}  // namespace

const Ceilings& measured_ceilings() {
  static const Ceilings ceilings = [] {
    const Ceilings measured = measure();
    benchmark::AddCustomContext("measured_copy_bytes_per_second", whole(measured.bytes));
    benchmark::AddCustomContext("measured_f32_flops_per_second", whole(measured.f32_flops));
    benchmark::AddCustomContext("measured_bf16_mma_flops_per_second", whole(measured.bf16_mma_flops));
    return measured;
  }();
  return ceilings;
}

}  // namespace bench
