#include <algorithm>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "api/architectures.h"
#include "api/kernel.h"
#include "cuda/delta/chunkwise_chain.cuh"
#include "cuda/delta/chunkwise_prepare.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/runtime.h"

namespace delta_attention {

extern const Kernel chunkwise_kernel;

namespace chunkwise {
namespace {

// ---------------------------------------------------------------------------------------------------------------------------- launches

/// Where the work before this launch must have ended. (Launches overlap where the GPU can: cudaLaunchAttributeProgrammaticStream-
/// Serialization.)
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

constexpr int kWaitsFrom = 90;  // compute capability that code is made for

constexpr int kPlanThreads = 256;

/// Where chunks and intermediate states of packed sequences start. One block.
__global__ void __launch_bounds__(kPlanThreads) plan_sequences(const __grid_constant__ Params params, std::int64_t most_chunks,
                                                               std::int64_t* first_chunks, std::int64_t* first_states) {
  wait_for_launch_before();
  using Scan = cub::BlockScan<std::int64_t, kPlanThreads>;
  __shared__ typename Scan::TempStorage memory;
  const Problem& p = params.problem;
  const Chunking chunking = Chunking::of(p);
  std::int64_t chunks_before = 0, states_before = 0;
  for (std::int64_t base = 0; base <= p.sequences; base += kPlanThreads) {
    const std::int64_t n = base + threadIdx.x;
    const Sequence sequence = n < p.sequences ? p.sequence(n) : Sequence();
    std::int64_t chunks, states, all_chunks, all_states;
    Scan(memory).ExclusiveSum(chunking.chunks(sequence.length), chunks, all_chunks);
    __syncthreads();
    Scan(memory).ExclusiveSum(p.intermediate_count(sequence), states, all_states);
    __syncthreads();
    // Offsets that decrease somewhere can ask for more than the sizes computed from shapes, and must not become wild writes.
    if (n <= p.sequences) {
      first_chunks[n] = min(chunks_before + chunks, most_chunks);
      first_states[n] = states_before + states;
    }
    chunks_before += all_chunks;
    states_before += all_states;
  }
}

template <class P>
__global__ void __launch_bounds__(P::kThreads) prepare(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  let_next_launch_start();
  wait_for_launch_before();
  prepare_chunk(params, blockIdx.x, *reinterpret_cast<PrepareShared<P>*>(dynamic_shared));
}

template <class P>
__global__ void __launch_bounds__(kMostPairs * 2 * kWarpSize) chain(const __grid_constant__ Params params,
                                                                     const __grid_constant__ ChainShared<P> shared) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  wait_for_launch_before();
  run_chain<P>(params, blockIdx.x, shared, dynamic_shared);
}

// -------------------------------------------------------------------------------------------------------------------------------- plan

constexpr std::size_t kReserved = 1024;  // what CUDA keeps of each block's share of shared memory
constexpr int kMostStages = 4;

/// Sizes of a call, decided on the host from shapes, settings and the device.
struct Plan {
  int pairs = 0, stages = 0;
  std::int64_t most_chunks = 0;  // of all sequences together
  std::int64_t image_bytes = 0;
  int prepare_bytes = 0, chain_bytes = 0;  // of shared memory a block
  std::int64_t slices = 0;

  std::int64_t prepare_blocks(const Problem& p) const { return most_chunks * p.value_heads; }
  std::int64_t chain_blocks(const Problem& p) const { return p.sequences * p.value_heads * slices; }
};

/// Calls use(element, keys) with types for the problem's.
template <class Use>
void with_types(const Problem& p, const Use& use) {
  const auto with_keys = [&](auto element) {
    if (p.key_dim <= 64) return use(element, std::integral_constant<int, 64>());
    if (p.key_dim <= 128) return use(element, std::integral_constant<int, 128>());
    use(element, std::integral_constant<int, 256>());
  };
  if (p.dtype == DType::f32) return with_keys(float());
  if (p.dtype == DType::f16) return with_keys(Half());
  with_keys(BFloat16());
}

/// Pairs of warps a block: narrow slices make more blocks, wide ones read the factors less often. Narrow until blocks fill the GPU.
int choose_pairs(const Problem& p, const DeviceProperties& device) {
  const std::int64_t columns = ceil_div(p.value_dim, kColumns), chains = p.sequences * p.value_heads;
  int pairs = 1;
  while (pairs < kMostPairs && pairs < columns && chains * ceil_div(columns, pairs) > device.multiprocessors / 2) pairs *= 2;
  return pairs;
}

template <class P>
void plan_chain(const DeviceProperties& device, const Settings& settings, Plan& plan) {
  ChainShared<P> shared = {plan.pairs, 1};
  // As many stages as let two blocks share a multiprocessor, or else as fit.
  const auto most = static_cast<std::int64_t>(device.shared_memory);
  const std::int64_t half = (most + static_cast<std::int64_t>(kReserved)) / 2 - static_cast<std::int64_t>(kReserved);
  const auto stages_in = [&](std::int64_t bytes) {
    return static_cast<int>(std::min<std::int64_t>(kMostStages, (bytes - plan.pairs * shared.exchange_bytes()) / shared.stage_bytes()));
  };
  shared.stages = settings.get("stages", std::max(stages_in(half) >= 2 ? stages_in(half) : stages_in(most), 1));
  plan.stages = shared.stages;
  plan.chain_bytes = shared.bytes();
}

Plan make_plan(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  Plan plan;
  plan.pairs = settings.get("pairs", choose_pairs(p, device));
  plan.slices = ceil_div(p.value_dim, std::int64_t{plan.pairs} * kColumns);
  const Chunking chunking = Chunking::of(p);
  if (p.cu_seqlens.present) {
    const std::int64_t spans = p.tokens / chunking.span + p.sequences;
    plan.most_chunks = p.tokens / kChunk + spans;
  } else {
    plan.most_chunks = p.sequences * chunking.chunks(p.tokens);
  }
  with_types(p, [&](auto element, auto keys) {
    using Element = decltype(element);
    plan.prepare_bytes = sizeof(PrepareShared<PreparePolicy<Element, keys.value>>);
    plan.image_bytes = PreparePolicy<Element, keys.value>::kImage.bytes();
    plan_chain<ChainPolicy<Element, keys.value>>(device, settings, plan);
  });
  return plan;
}

/// Where things lie in the workspace.
struct WorkspaceLayout {
  std::size_t first_chunks, first_states, factors, bytes;

  WorkspaceLayout(const Problem& p, const Plan& plan) {
    const std::size_t firsts = p.cu_seqlens.present ? (static_cast<std::size_t>(p.sequences) + 1) * sizeof(std::int64_t) : 0;
    const auto rounded = [](std::size_t size) { return (size + 255) / 256 * 256; };
    first_chunks = 0;
    first_states = rounded(firsts);
    factors = first_states + rounded(firsts);
    bytes = factors + static_cast<std::size_t>(plan.prepare_blocks(p) * plan.image_bytes);
  }
};

// -------------------------------------------------------------------------------------------------------------------------- descriptor

std::vector<Setting> settings() {
  return {{"pairs", "pairs of warps a block, 16 value columns each", {1, 2, 4}},
          {"stages", "chunks in shared memory at once", {1, 2, 3, 4}}};
}

std::string needs_more_shared_memory(const char* what, int bytes, const DeviceProperties& device) {
  return std::string(what) + " needs " + std::to_string(bytes) + " bytes of shared memory a block; " + device.name + " has " +
         std::to_string(device.shared_memory);
}

std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.normalize) return "no normaliser";
  if (p.key_dim > 256) return "K = " + std::to_string(p.key_dim) + "; compiled for at most 256";
  const Plan plan = make_plan(p, device, settings);
  const auto most = static_cast<std::int64_t>(device.shared_memory);
  if (plan.prepare_bytes > most) return needs_more_shared_memory("the preparation", plan.prepare_bytes, device);
  if (plan.chain_bytes > most) return needs_more_shared_memory("the chain", plan.chain_bytes, device);
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  if (plan.prepare_blocks(p) > kMostBlocks || plan.chain_blocks(p) > kMostBlocks) return "more than 2^31 blocks";
  return "";
}

std::size_t workspace(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  return WorkspaceLayout(p, make_plan(p, device, settings)).bytes;
}

/// Launches a kernel. Where the code that runs knows how to wait for the launch before it, it may start before that has ended.
template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), std::int64_t blocks, int threads, int shared_bytes, const Launch& call, const Arguments&... arguments) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = static_cast<cudaStream_t>(call.stream);
  config.attrs = &overlap;
  config.numAttrs = code_for(built_architectures(), call.device.capability) >= kWaitsFrom ? 1 : 0;
  if (shared_bytes > 0) {
    DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  DELTA_ATTENTION_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
}

Params params_of(const Launch& call, const WorkspaceLayout& layout) {
  const Problem& p = call.problem;
  auto* memory = static_cast<unsigned char*>(call.workspace);
  const int piece = 16 / static_cast<int>(size_of(p.dtype));
  Params params;
  params.problem = p;
  params.factors = memory + layout.factors;
  if (p.cu_seqlens.present) {
    params.first_chunks = reinterpret_cast<const std::int64_t*>(memory + layout.first_chunks);
    params.first_states = reinterpret_cast<const std::int64_t*>(memory + layout.first_states);
  }
  params.chunks = Chunking::of(p).chunks(p.tokens);
  params.pairs_in_q = reads_in_pieces(p.q, p.key_dim, 2);
  params.pairs_in_k = reads_in_pieces(p.k, p.key_dim, 2);
  params.pairs_in_gate = p.gate == Gate::channel && reads_in_pieces(p.log_decay, p.key_dim, 2);
  params.pieces_in_v = starts_pieces(p.v, piece);
  params.pieces_in_out = starts_pieces(p.out, piece);
  return params;
}

void launch(const Launch& call) {
  const Problem& p = call.problem;
  const Plan plan = make_plan(p, call.device, call.settings);
  const WorkspaceLayout layout(p, plan);
  const Params params = params_of(call, layout);
  if (p.cu_seqlens.present) {
    start(plan_sequences, 1, kPlanThreads, 0, call, params, plan.most_chunks, const_cast<std::int64_t*>(params.first_chunks),
          const_cast<std::int64_t*>(params.first_states));
  }
  with_types(p, [&](auto element, auto keys) {
    using ForPrepare = PreparePolicy<decltype(element), keys.value>;
    using ForChain = ChainPolicy<decltype(element), keys.value>;
    if (plan.most_chunks > 0) start(prepare<ForPrepare>, plan.prepare_blocks(p), ForPrepare::kThreads, plan.prepare_bytes, call, params);
    start(chain<ForChain>, plan.chain_blocks(p), plan.pairs * 2 * kWarpSize, plan.chain_bytes, call, params,
          ChainShared<ForChain>{plan.pairs, plan.stages});
  });
}

}  // namespace
}  // namespace chunkwise

const Kernel chunkwise_kernel = {
    "v5_chunkwise", "tensor cores, chunks of 32 tokens: factors of all chunks at once, then the states (V5)", DeviceType::cuda, true, 20,
    chunkwise::settings, chunkwise::unsupported, chunkwise::workspace, chunkwise::launch, nullptr, true,
};

}  // namespace delta_attention
