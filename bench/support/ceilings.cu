#include <benchmark/benchmark.h>

#include <algorithm>
#include <string>

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
__global__ void __launch_bounds__(kThreads) multiply_add(float factor, float summand, float* out) {
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

/// mma.sync.m16n8k16 (PTX ISA, "Warp-level Matrix Instructions"), bf16 with f32 sums: c += a b.
__device__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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
    for (int i = 0; i < kTiles; ++i) mma_m16n8k16(c[i], a, b);
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

double copied_bytes_per_second() {
  constexpr std::size_t kBytes = std::size_t{1} << 30;
  const DeviceMemory from(kBytes), to(kBytes);
  DELTA_ATTENTION_CUDA(cudaMemset(from.data(), 0, kBytes));
  const double seconds = fastest([&](const delta_attention::Execution& execution) {
    DELTA_ATTENTION_CUDA(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream_of(execution)));
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
    multiply_add<<<blocks, kThreads, 0, stream_of(execution)>>>(0.999f, 1e-3f, sums);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
  const double products = fastest([=](const delta_attention::Execution& execution) {
    multiply_tiles<<<blocks, kThreads, 0, stream_of(execution)>>>(0x3C003C00u, sums);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
  const double threads = static_cast<double>(blocks) * kThreads;
  Ceilings ceilings;
  ceilings.bytes = copied_bytes_per_second();
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
