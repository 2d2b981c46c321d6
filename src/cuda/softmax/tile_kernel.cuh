#pragma once

// What the tiled softmax kernels share: one loop over tiles of keys and values, with everything in which they differ as a policy.
//
//   kernel       loads      padding  buffers   what it shows
//   tiled        elements   0        1         keys and values are read once a block of rows, not once a row
//   vec_load     vectors    0        1         four channels an access, which all land in the same few banks
//   vec_padded   vectors    4        1         a padded row puts neighbouring keys into other banks
//   ping_pong    vectors    4        2         the next tile is fetched under this one
//   rowmax       vectors    4        1         how sums follow the maximum, and which exponential: settings
//   vec_fused    vectors    4        1         tiles of 8 to 64 keys: a setting
//
// Algorithm. A block holds 32 query rows in shared memory and goes through the keys that any of them can see, kKeys at a time
// (whole tiles that a causal mask or a window hides are never loaded). A warp has 8 of the rows. For a tile,
//     score_tile        lanes along keys: each multiplies its key with the warp's 8 rows, so a key read from shared memory serves 8 rows
//     merge_by_row_max  the tile's maximum a row, one rescaling of what the row has, weights exp(score - max)
//     add_values        lanes along channels: each adds its channels of every value, weighted
// Scores and weights change hands through shared memory, inside a warp. Sums of weights stay apart by lane until the end.
//
// Every kernel exists twice: for problems in which every row sees every key and scores are dot products times `scale`, and for all
// others (lengths, causal masks, windows, additive masks, softcap, packed sequences, pages). Arithmetic is f32; 16-bit operands are
// widened on their way to shared memory.
//
// Budget for 32 keys and 128 channels: 32 rows, 32 keys, 32 values and 32 x 32 weights, 53 KB (89 KB for 64 keys); up to 194 registers,
// 128 threads.
// Source: the flash-attention forward in plain CUDA; staging as in the softmax articles that this project follows.
// Measured: docs/performance.md.

#include <string>
#include <utility>

#include "api/architectures.h"
#include "api/softmax_kernel.h"
#include "cuda/device/runtime.h"
#include "cuda/softmax/tile_stages.cuh"

namespace delta_attention::tile {

constexpr std::int64_t kMostBlocks = 0x7fffffff;

template <class P>
__global__ void __launch_bounds__(P::kThreads, P::kBlocks) attend(const __grid_constant__ Params params) {
  extern __shared__ float4 dynamic_shared[];
  attend_rows<P>(params, blockIdx.x, reinterpret_cast<float*>(dynamic_shared));
}

/// A kernel's choice of everything but channels and plainness: kKeys<kDim> keys of a tile.
template <template <int> class Keys, Loads kLoads, int kPadding, int kBuffers, Merge kMerge = Merge::row_max, Exp kExp = Exp::exact>
struct Family {
  template <int kDim, bool kPlain>
  using Of = Policy<kDim, Keys<kDim>::value, kLoads, kPadding, kBuffers, kMerge, kExp, kPlain>;
};

template <int kKeys>
struct Always {
  template <int>
  using Keys = std::integral_constant<int, kKeys>;
};

/// Calls use(policy) with the family's member for the problem.
template <class Family, class Use>
void with_policy(const SoftmaxProblem& p, const Use& use) {
  const auto with_dim = [&](auto dim) {
    if (is_plain(p)) {
      use(typename Family::template Of<dim.value, true>());
    } else {
      use(typename Family::template Of<dim.value, false>());
    }
  };
  if (p.head_dim <= 32) return with_dim(std::integral_constant<int, 32>());
  if (p.head_dim <= 64) return with_dim(std::integral_constant<int, 64>());
  with_dim(std::integral_constant<int, 128>());
}

template <class Family>
std::string unsupported(const SoftmaxProblem& p, const DeviceProperties& device) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.head_dim > 128) return "head_dim is " + std::to_string(p.head_dim) + "; tiles are compiled for up to 128 channels";
  std::string reason;
  with_policy<Family>(p, [&](auto policy) {
    using P = decltype(policy);
    const std::size_t bytes = P::kBytes;
    if (bytes > device.shared_memory) {
      reason = "a block needs " + std::to_string(bytes) + " bytes of shared memory; " + device.name + " has " +
               std::to_string(device.shared_memory);
    } else if (WorkOrder(p, P::kRows).blocks() > kMostBlocks) {
      reason = "more blocks than a grid has";
    }
  });
  return reason;
}

template <class Family>
void launch(const SoftmaxLaunch& call) {
  const SoftmaxProblem& p = call.problem;
  with_policy<Family>(p, [&](auto policy) {
    using P = decltype(policy);
    constexpr auto kKernel = attend<P>;
    const Params params = {p, WorkOrder(p, P::kRows), reads_in_pieces(p.q, p.head_dim, 4), reads_in_pieces(p.k, p.head_dim, 4),
                           reads_in_pieces(p.v, p.head_dim, 4)};
    DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes));
    kKernel<<<static_cast<unsigned>(params.order.blocks()), P::kThreads, P::kBytes, static_cast<cudaStream_t>(call.stream)>>>(params);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
}

/// The descriptor of a kernel without settings.
template <class Family>
constexpr SoftmaxKernel kernel_of(const char* name, const char* summary) {
  return {name,
          summary,
          DeviceType::cuda,
          true,
          -1,
          no_settings,
          [](const SoftmaxProblem& p, const DeviceProperties& device, const Settings&) { return unsupported<Family>(p, device); },
          no_workspace,
          launch<Family>};
}

/// The descriptor of a kernel whose settings choose its family: Choice has settings() and with_family(settings, use).
template <class Choice>
constexpr SoftmaxKernel kernel_of_choice(const char* name, const char* summary, int priority) {
  return {name,
          summary,
          DeviceType::cuda,
          true,
          priority,
          Choice::settings,
          [](const SoftmaxProblem& p, const DeviceProperties& device, const Settings& chosen) {
            std::string reason;
            Choice::with_family(chosen, [&](auto family) { reason = unsupported<decltype(family)>(p, device); });
            return reason;
          },
          no_workspace,
          [](const SoftmaxLaunch& call) {
            Choice::with_family(call.settings, [&](auto family) { launch<decltype(family)>(call); });
          }};
}

}  // namespace delta_attention::tile
