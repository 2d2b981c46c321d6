// mla_cuda: multi-head latent attention for decoding, the up-projection of the keys absorbed into the query.
//
//   absorb_queries   t = W^T q_nope, a thread a latent channel of one head, all rows of q together so that W is read once; q_rope is
//                    copied behind it. f32, [B,Nq,H,L+R] in the workspace. Grid: (channels in pieces of 256, head).
//   decode_latents   All heads read one cache, whose rows are keys (L+R channels) and values (the first L). A block has 16 rows (heads, of
//                    one row of q or several), 256 threads and a split of the keys, in tiles of 16: the tile as f32 in shared memory;
//                    dot products with two rows and two keys a thread, four lanes a product; a score a thread for mask and exponential
//                    (online softmax); two value channels a thread, all rows. Grid: (tile of rows, split, sequence).
//   merge_splits     as for the kernel decode.
//
// Shared memory: queries and tile, 16 (L+R) floats each (72 KB at L = 512, R = 64, and a few for padding). Registers: 32 sums a thread.
//
// Plain f32 arithmetic: with 128 heads on one cache the work is that of a matrix product, and what bounds it is the arithmetic, not the
// reads, as it would be on tensor cores. Right first; the cache is still read from memory about once, since the blocks of the other heads
// find it in L2.
//
// After DeepSeek-V2 (2024), section 2.1.2, which absorbs W_UK into the query's projection.

#include <string>

#include "api/architectures.h"
#include "api/mla_kernel.h"
#include "cuda/device/runtime.h"
#include "cuda/softmax/mla_decode_kernel.cuh"

namespace delta_attention {
namespace mla {
namespace {

__global__ void __launch_bounds__(kThreads) absorb_queries(const __grid_constant__ Params params) {
  absorb_channel(params, blockIdx.y, static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

__global__ void __launch_bounds__(kThreads) decode_latents(const __grid_constant__ Params params) {
  extern __shared__ float4 dynamic_shared[];
  decode_block(params, blockIdx.x, reinterpret_cast<float*>(dynamic_shared));
}

__global__ void __launch_bounds__(kMergeWarps* kWarpSize) merge_splits(const __grid_constant__ Params params) {
  merge_row(params.problem.attention, params.partials, static_cast<std::int64_t>(blockIdx.x) * kMergeWarps + threadIdx.x / kWarpSize);
}

std::int64_t blocks_of_a_split(const SoftmaxProblem& a) { return ceil_div(a.queries * a.heads, kRows) * a.batch; }

/// Two blocks fit a multiprocessor; four, so that the last ones to end are short.
int splits_of(const MlaProblem& p, const DeviceProperties& device) {
  constexpr std::int64_t kLeastKeys = 64;
  return splits_for(std::int64_t{4} * device.multiprocessors, blocks_of_a_split(p.attention), p.attention.keys, kLeastKeys);
}

std::size_t shared_bytes(const MlaProblem& p) { return static_cast<std::size_t>(shared_floats(p)) * sizeof(float); }

std::int64_t query_floats(const MlaProblem& p) { return p.rows() * p.attention.heads * p.channels(); }

std::string unsupported(const MlaProblem& p, const DeviceProperties& device) {
  const SoftmaxProblem& a = p.attention;
  if (a.has_f64) return "f64 operands run on the CPU only";
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (a.head_dim > kMostLatent) return "L = " + std::to_string(a.head_dim) + "; at most " + std::to_string(kMostLatent);
  if (p.rope_dim > kMostLatent) return "R = " + std::to_string(p.rope_dim) + "; at most " + std::to_string(kMostLatent);
  if (shared_bytes(p) > device.shared_memory) {
    return std::to_string(shared_bytes(p)) + " bytes of shared memory a block; the device has " + std::to_string(device.shared_memory);
  }
  if (a.keys > 1 << 30) return "more than 2^30 keys";
  if (a.heads > 65535 || blocks_of_a_split(a) > 0x7fffff || p.rows() * a.heads > 0x7fffffff) return "more blocks than a grid has";
  return "";
}

/// Sums and statistics first: pairs stay aligned.
std::size_t workspace(const MlaProblem& p, const DeviceProperties& device) {
  return static_cast<std::size_t>(Partials::floats(p.attention, splits_of(p, device)) + query_floats(p)) * sizeof(float);
}

void launch(const MlaLaunch& call) {
  const MlaProblem& p = call.problem;
  const int splits = splits_of(p, call.device);
  Params params;
  params.problem = p;
  auto* memory = static_cast<float*>(call.workspace);
  params.partials = Partials(p.attention, splits, memory);
  params.queries = memory + Partials::floats(p.attention, splits);

  const auto stream = static_cast<cudaStream_t>(call.stream);
  const dim3 channels(static_cast<unsigned>(ceil_div(p.channels(), kThreads)), static_cast<unsigned>(p.attention.heads));
  absorb_queries<<<channels, kThreads, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(
      cudaFuncSetAttribute(decode_latents, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes(p))));
  decode_latents<<<static_cast<unsigned>(blocks_of_a_split(p.attention) * splits), kThreads, shared_bytes(p), stream>>>(params);
  if (splits > 1) merge_splits<<<merge_blocks(p.attention), kMergeWarps * kWarpSize, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

}  // namespace
}  // namespace mla

extern const MlaKernel mla_cuda_kernel;
const MlaKernel mla_cuda_kernel = {"mla_cuda", DeviceType::cuda, mla::unsupported, mla::workspace, mla::launch};

}  // namespace delta_attention
