// chunked_baseline: parallel inside a chunk of tokens, serial between chunks, every step a launch of its own. The second baseline
// ("pseudo-flash"): the chunk form of the recurrence as a framework runs it, one operation after the other.
//
// Algorithm. The stages of the chunk pipeline (chunk_pipeline_stages.cuh), with launches where the pipeline has waits: sequences go in
// chunks of 64 tokens, and three launches take chunk c of every sequence side by side:
//     prepare_chunk   prepare_run: what needs no state, all micro-chunks of the chunk at once -> global memory
//     step_chunk      step_run: the state over the chunk's micro-chunks, one after the other
//     store_chunk     store_outputs: read-outs -> out
// pass_states, before the first chunk and after the last, converts between the caller's states and the f32 states of the workspace.
//
// Data flow. Between launches everything lies in global memory: the state (K x 16 floats a chain), and the chunk's factors, which are
// written by one launch and read by the next as they lie in shared memory. The host never waits: packed sequences have their lengths on
// the device, so there are launches for one sequence of all T tokens, and blocks of a sequence that has ended return at once.
//
// Roles. A block takes a chain, 16 value columns of one (sequence, value head): 8 warps, each preparing one micro-chunk of 8 tokens,
// then 4 of them stepping 4 columns each. Budget: as a run of the chunk pipeline; a chunk is the largest of 64, 32, 16, 8 tokens that
// fits a block's shared memory. The workspace holds 1024 chains at most; more of them take turns.
//
// Wins against step_loop by a launch count that is 21 times smaller. Loses to the pipeline by what it exists to show: launches that
// wait for the slowest block of the one before, and factors that travel through L2 twice. Measured ratios: docs/performance.md.
//
// Source: the article's "pseudo-flash" baseline.

#include <algorithm>
#include <cstdint>

#include "api/architectures.h"
#include "api/kernel.h"
#include "cuda/delta/chunk_pipeline_stages.cuh"
#include "cuda/device/runtime.h"

namespace delta_attention {

extern const Kernel chunked_baseline_kernel;

namespace {

using namespace chunk_pipeline_stages;

constexpr int kSlice = 16;
constexpr int kLongestChunk = kWarps * kMicroChunk;
constexpr std::int64_t kMostChainsAtOnce = 1024;

struct Params {
  Problem problem;
  RowAccess access;
  int chunk_tokens;
  std::int64_t slices;
  std::int64_t first_chain;  // of this launch; chains count slices, then value heads, then sequences
  float* states;             // of the launch's chains
  float* factors;
  std::int64_t factor_floats;  // of a chain, whole float4s
};

/// One block's share of chunk `chunk`.
template <class P>
struct Place {
  Block block;
  bool inside;  // the sequence has tokens in this chunk
  float* state;
  float* factors;

  __device__ Place(const Params& params, std::int64_t chunk) {
    const Problem& p = params.problem;
    const std::int64_t chain = params.first_chain + blockIdx.x, chains_per_sequence = p.value_heads * params.slices;
    const std::int64_t sequence = chain / chains_per_sequence;
    block = block_of<P>(p, sequence, chunk, params.chunk_tokens, chain % chains_per_sequence, params.slices);
    block.first_run = block.last_run = false;  // the state comes from the launch before and goes to the next
    inside = chunk * params.chunk_tokens < p.sequence(sequence).length;
    state = params.states + std::int64_t{blockIdx.x} * P::kHandoffFloats;
    factors = params.factors + blockIdx.x * params.factor_floats;
  }
};

__device__ void copy(const float* from, float* to, std::int64_t floats) {
  for (std::int64_t i = threadIdx.x; i < floats / 4; i += kThreads) {
    reinterpret_cast<float4*>(to)[i] = reinterpret_cast<const float4*>(from)[i];
  }
}

/// The caller's initial state -> the workspace (`first`), or the workspace -> the caller's final state: a run of no tokens.
template <class P>
__global__ void __launch_bounds__(kThreads) pass_states(const __grid_constant__ Params params, bool first) {
  Place<P> at(params, 0);
  at.block.tokens = 0;
  at.block.first_run = first;
  at.block.last_run = !first;
  step_run(params.problem, at.block, SharedRun<P>(at.factors, params.chunk_tokens), at.state);
}

template <class P>
__global__ void __launch_bounds__(kThreads, P::kBlocksPerMultiprocessor)
    prepare_chunk(const __grid_constant__ Params params, std::int64_t chunk) {
  extern __shared__ float4 dynamic_shared[];
  auto* memory = reinterpret_cast<float*>(dynamic_shared);
  const Place<P> at(params, chunk);
  if (!at.inside) return;
  prepare_run(params.problem, params.access, at.block, SharedRun<P>(memory, params.chunk_tokens));
  copy(memory, at.factors, params.factor_floats);
}

template <class P>
__global__ void __launch_bounds__(kThreads, P::kBlocksPerMultiprocessor)
    step_chunk(const __grid_constant__ Params params, std::int64_t chunk) {
  extern __shared__ float4 dynamic_shared[];
  auto* memory = reinterpret_cast<float*>(dynamic_shared);
  const Place<P> at(params, chunk);
  if (!at.inside) return;
  const SharedRun<P> run(memory, params.chunk_tokens), stored(at.factors, params.chunk_tokens);
  copy(at.factors, memory, params.factor_floats);
  __syncthreads();
  step_run(params.problem, at.block, run, at.state);
  __syncthreads();
  copy(run.u, stored.u, params.chunk_tokens * P::kColumnStride);
  copy(run.denominator, stored.denominator, params.chunk_tokens);
}

template <class P>
__global__ void __launch_bounds__(kThreads) store_chunk(const __grid_constant__ Params params, std::int64_t chunk) {
  const Place<P> at(params, chunk);
  if (!at.inside) return;
  store_outputs(params.problem, at.block, SharedRun<P>(at.factors, params.chunk_tokens));
}

// ---------------------------------------------------------------------------------------------------------------- host

/// Sizes of a call, from shapes alone.
struct Plan {
  int chunk_tokens = 0;  // 0: no micro-chunk fits
  std::int64_t slices = 0;
  std::int64_t chains = 0;                           // of the problem
  std::int64_t chains_at_once = 0;                   // whole heads, whose slices share a normaliser
  std::int64_t factor_floats = 0, state_floats = 0;  // of a chain
};

Plan make_plan(const Problem& p, const DeviceProperties& device) {
  Plan plan;
  plan.slices = ceil_div(p.value_dim, kSlice);
  plan.chains = p.sequences * p.value_heads * plan.slices;
  plan.chains_at_once = std::min(plan.chains, std::max<std::int64_t>(kMostChainsAtOnce / plan.slices, 1) * plan.slices);
  with_policy<PlainSum, kSlice>(p, kSlice, [&](auto policy) {
    using P = decltype(policy);
    plan.chunk_tokens = SharedRun<P>::longest(kLongestChunk, device.shared_memory);
    plan.factor_floats =
        ceil_div(static_cast<std::int64_t>(SharedRun<P>::bytes(plan.chunk_tokens)), sizeof(float4)) * 4;
    plan.state_floats = P::kHandoffFloats;
  });
  return plan;
}

std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings&) {
  if (p.has_f64) return needs_f32(p);
  if (p.intermediate_states.present) return lacks_intermediate_states(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  const std::string keys = "K = " + std::to_string(p.key_dim);
  if (p.key_dim > kMostKeys)
    return keys + "; this kernel holds at most " + std::to_string(kMostKeys) + " rows of state";
  const Plan plan = make_plan(p, device);
  if (plan.chunk_tokens == 0) {
    return keys + " needs more shared memory a block than the " + std::to_string(device.shared_memory) + " bytes of " +
           device.name;
  }
  return "";
}

std::size_t workspace(const Problem& p, const DeviceProperties& device, const Settings&) {
  const Plan plan = make_plan(p, device);
  return static_cast<std::size_t>(plan.chains_at_once * (plan.state_floats + plan.factor_floats)) * sizeof(float);
}

template <class P>
void launch_chunks(const Params& params, unsigned blocks, cudaStream_t stream) {
  const auto shared = static_cast<std::size_t>(params.factor_floats) * sizeof(float);
  for (const auto kernel : {prepare_chunk<P>, step_chunk<P>}) {
    DELTA_ATTENTION_CUDA(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)));
  }
  const std::int64_t chunks = ceil_div(params.problem.tokens, params.chunk_tokens);
  pass_states<P><<<blocks, kThreads, 0, stream>>>(params, true);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    prepare_chunk<P><<<blocks, kThreads, shared, stream>>>(params, chunk);
    step_chunk<P><<<blocks, kThreads, shared, stream>>>(params, chunk);
    store_chunk<P><<<blocks, kThreads, 0, stream>>>(params, chunk);
  }
  pass_states<P><<<blocks, kThreads, 0, stream>>>(params, false);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

void launch(const Launch& call) {
  const Problem& p = call.problem;
  const Plan plan = make_plan(p, call.device);
  Params params;
  params.problem = p;
  params.chunk_tokens = plan.chunk_tokens;
  params.slices = plan.slices;
  params.factor_floats = plan.factor_floats;
  params.factors = static_cast<float*>(call.workspace);
  params.states = params.factors + plan.chains_at_once * plan.factor_floats;
  with_policy<PlainSum, kSlice>(p, kSlice, [&](auto policy) {
    using P = decltype(policy);
    params.access = row_access_of<P>(p);
    for (params.first_chain = 0; params.first_chain < plan.chains; params.first_chain += plan.chains_at_once) {
      const std::int64_t blocks = std::min(plan.chains_at_once, plan.chains - params.first_chain);
      launch_chunks<P>(params, static_cast<unsigned>(blocks), static_cast<cudaStream_t>(call.stream));
    }
  });
}

}  // namespace

const Kernel chunked_baseline_kernel = {
    "chunked_baseline",
    "chunks of 64 tokens, three launches each, state in global memory: the second baseline",
    DeviceType::cuda,
    true,
    -1,
    no_settings,
    unsupported,
    workspace,
    launch,
};

}  // namespace delta_attention
