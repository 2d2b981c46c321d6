// decode: few rows of q over many keys, as a model has them that writes one token after another.
//
// Such a call moves every key and value once and computes little with them, so the time is that of the reads. What follows from it:
//
//   one read for all     A block serves all query heads of its key head and all rows of q, up to 16 together: grouped heads cost no reads.
//   enough readers       Sequences and key heads are few: a sequence's keys are split, a block a split. Each writes its maximum, sum of
//                        weights and weighted values (f32) to the workspace, and a small launch merges them. The host knows the longest
//                        possible sequence only; a block cuts what its sequence really has, so that all blocks of one have the same work.
//                        A split without keys writes a sum of nothing, which weighs nothing.
//   enough in flight     A thread copies its own pieces of 16 bytes several tiles ahead into shared memory (cp.async), and nobody else
//                        reads them: waiting needs no barrier. 64 KB a block, two or three blocks a multiprocessor.
//   one pass             Online softmax in f32, a state for each group of lanes; groups, warps and splits are merged at the end.
//
// A group of 8, 16 or 32 lanes holds a key, eight channels a lane; a thread has four keys of a tile. Dot products of up to four rows with
// four keys are summed over the group by halving (spread_sum), after which each lane owns one score: scale, cap, mask and exponential are
// computed once a pair. Weights go through shared memory to the lanes that add the values up.
//
// Grid: (key head, split, sequence) in one axis, 128 threads. Shared memory: the stages (64 KB; the groups' sums take their place at the
// end), q in f32, weights. Registers: the sums, eight a row.
//
// Pages: a key's place is looked up key by key, so pages may have any size; a look serves key and value. Rows that are not aligned to 16
// bytes are read element by element.
//
// Wins where rows are few and keys many. Loses once the arithmetic of many rows takes longer than the reads: it has no tensor cores, hence
// the limit; and where keys are few, to kernels of one launch. Figures: docs/performance.md.
//
// After FlashDecoding (Dao, Haziza, Massa, Sizov 2023), with paged keys as in PagedAttention (Kwon et al. 2023).

#include <algorithm>
#include <string>

#include "api/architectures.h"
#include "api/softmax_kernel.h"
#include "cuda/device/runtime.h"
#include "cuda/softmax/decode_kernel.cuh"

namespace delta_attention {
namespace decode {
namespace {

template <class P>
__global__ void __launch_bounds__(P::kThreads, P::kRows > 4 ? 2 : 3) decode_rows(const __grid_constant__ Params params) {
  extern __shared__ float4 dynamic_shared[];
  decode_block<P>(params, blockIdx.x, dynamic_shared);
}

__global__ void __launch_bounds__(kMergeWarps* kWarpSize) merge_splits(const __grid_constant__ Params params) {
  merge_row(params.problem, params.partials, static_cast<std::int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / kWarpSize);
}

/// Rows of a block: of packed sequences, whose lengths are in device memory, on average. A block takes more in several passes.
std::int64_t rows_of(const SoftmaxProblem& p) {
  const std::int64_t queries = p.cu_seqlens_q.present ? ceil_div(p.queries, std::max<std::int64_t>(p.sequences, 1)) : p.queries;
  return queries * (p.heads / p.key_heads);
}

std::vector<Setting> settings() {
  return {{"blocks", "blocks a multiprocessor that the splits aim at", {2, 3, 4, 6, 8, 12, 16}}};
}

/// Splits that keep every multiprocessor busy, or as many as the setting asks for; of no fewer keys than a few tiles.
int splits_of(const SoftmaxProblem& p, const DeviceProperties& device, const Settings& settings) {
  constexpr std::int64_t kLeastKeys = 128;
  constexpr std::int64_t kBlockBytes = 72 << 10;  // of shared memory, about
  const std::int64_t blocks = p.sequences * p.key_heads;
  if (settings.has("blocks")) return splits_for(std::int64_t{settings.get("blocks", 1)} * device.multiprocessors, blocks, p.keys, kLeastKeys);
  const std::int64_t together = std::max<std::int64_t>(static_cast<std::int64_t>(device.shared_memory) / kBlockBytes, 1);
  return splits_that_fill(together * device.multiprocessors, blocks, p.keys, kLeastKeys);
}

std::string unsupported(const SoftmaxProblem& p, const DeviceProperties& device, const Settings&) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.head_dim > kMostSize) return "D = " + std::to_string(p.head_dim) + "; at most " + std::to_string(kMostSize);
  if (rows_of(p) > kMostRows) {
    return std::to_string(rows_of(p)) + " rows of q a key head (Nq H / Hkv); at most " + std::to_string(kMostRows);
  }
  if (p.keys > kMostKeys) return "more than 2^30 keys";
  if (p.sequences * p.key_heads > 0x7fffffff || p.batch * p.queries * p.heads > 0x7fffffff) return "more than 2^31 blocks";
  return "";
}

std::size_t workspace(const SoftmaxProblem& p, const DeviceProperties& device, const Settings& settings) {
  return static_cast<std::size_t>(Partials::floats(p, splits_of(p, device, settings))) * sizeof(float);
}

template <class P>
void launch_rows(const Params& params, cudaStream_t stream) {
  const SoftmaxProblem& p = params.problem;
  DELTA_ATTENTION_CUDA(
      cudaFuncSetAttribute(decode_rows<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(P::kBytes)));
  const auto blocks = static_cast<unsigned>(p.sequences * p.key_heads * params.partials.splits);
  decode_rows<P><<<blocks, P::kThreads, P::kBytes, stream>>>(params);
}

template <class Element, int kLanes>
void launch_lanes(const Params& params, cudaStream_t stream) {
  const std::int64_t rows = rows_of(params.problem);
  if (rows <= 1) return launch_rows<Policy<Element, kLanes, 1>>(params, stream);
  if (rows <= 4) return launch_rows<Policy<Element, kLanes, 4>>(params, stream);
  launch_rows<Policy<Element, kLanes, 16>>(params, stream);
}

template <class Element>
void launch_element(const Params& params, cudaStream_t stream) {
  const std::int64_t size = params.problem.head_dim;
  if (size <= 64) return launch_lanes<Element, 8>(params, stream);
  if (size <= 128) return launch_lanes<Element, 16>(params, stream);
  launch_lanes<Element, 32>(params, stream);
}

void launch(const SoftmaxLaunch& call) {
  const SoftmaxProblem& p = call.problem;
  Params params;
  params.problem = p;
  params.in_pieces = reads_in_pieces(p.k, p.head_dim, 8) && reads_in_pieces(p.v, p.head_dim, 8);
  params.partials = Partials(p, splits_of(p, call.device, call.settings), static_cast<float*>(call.workspace));

  const auto stream = static_cast<cudaStream_t>(call.stream);
  switch (p.dtype) {
    case DType::f16: launch_element<Half>(params, stream); break;
    case DType::bf16: launch_element<BFloat16>(params, stream); break;
    default: launch_element<float>(params, stream); break;
  }
  if (params.partials.splits > 1) merge_splits<<<merge_blocks(p), kMergeWarps * kWarpSize, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

}  // namespace
}  // namespace decode

extern const SoftmaxKernel decode_kernel;
const SoftmaxKernel decode_kernel = {
    "decode",
    "few rows over many keys: the keys in splits, read once for all heads that share them",
    DeviceType::cuda,
    true,
    50,
    decode::settings,
    decode::unsupported,
    decode::workspace,
    decode::launch,
};

}  // namespace delta_attention
