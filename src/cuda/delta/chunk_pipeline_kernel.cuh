#pragma once

// The chunk pipeline: one launch, a chain of blocks a sequence, the state handed from block to block. v1_chunk_pipeline keeps the
// state in plain f32 sums, v2_chunk_pipeline_compensated in compensated ones; all else is this file.
//
// Algorithm. A block owns a run of tokens of one (sequence, value head) and a slice of 16 or 32 value columns. Columns of the
// state never mix, so slices are independent chains; along a chain, run r needs the state that run r-1 leaves. Inside a run,
// tokens go in micro-chunks of 8: what does not depend on the state is prepared first (cuda/device/micro_chunk.cuh), then the
// state steps over 8 tokens at once instead of one, with the same result up to rounding (docs/math.md).
//
// Data flow, in stages that are functions of their own:
//     prepare_run     load_run: q, k, v, beta and gates, global memory -> shared memory, as f32, normalised and activated
//                     prepare_micro_chunk: factors W, U, Q, A, R in place, one warp a micro-chunk
//     ---- wait until the run before has raised the chain's counter ----
//     step_run        load_state: global memory -> registers
//                     for each micro-chunk: correct (u = U - S^T W), read_out (o = S^T Q + A u), advance (S = Diag(b) S + R u^T)
//                     store_state: registers -> global memory
//     ---- raise the chain's counter ----
//     store_outputs   o: shared memory -> global memory
// All of prepare_run overlaps the wait, and store_outputs overlaps the successor's work.
//
// Order. A small kernel (plan_runs) first lists the runs so that every run stands after its predecessor, and blocks take
// entries by ticket, not by blockIdx: whoever waits, waits for a block that is already running. No deadlock whatever the
// hardware's order, and any number of blocks. cu_seqlens is read on the device: no host synchronisation, graphs replay with new
// lengths.
//
// Roles. 8 warps. While preparing, a warp takes every eighth micro-chunk and a lane K/32 channels. While stepping, a warp owns
// 4 columns (so 4 of the warps step slices of 16 columns, all 8 step slices of 32); 8 lanes share a column, each holding K/8
// rows of the state in registers, so a product S^T x is a sum in registers and 3 shuffle steps.
//
// Budget. Shared memory a token: 3 rows of K floats, one of the slice's columns, and small change: a run is the largest of 128,
// 64, 32, 16, 8 tokens that lets two blocks share an SM (one for K > 128): with 227 KB an SM, 128 tokens for K <= 64 with scalar
// gates in slices of 16, else 64. At most 128 registers a thread (K <= 128), of which the state takes K/8 (compensated: K/4).
//
// Source: stages and hand-off after the article's chunk pipeline; the algebra is the WY form of DeltaNet (arXiv:2406.06484) and
// of KDA (arXiv:2510.26692) on micro-chunks.

#include <algorithm>
#include <cstdint>
#include <cub/block/block_scan.cuh>
#include <string>
#include <vector>

#include "api/architectures.h"
#include "api/kernel.h"
#include "cuda/delta/chunk_pipeline_stages.cuh"
#include "cuda/device/copied_normalizers.cuh"
#include "cuda/device/runtime.h"
#include "cuda/device/signal.cuh"
#include "cuda/device/workspace.h"

namespace delta_attention::chunk_pipeline_stages {

/// One entry of the work list: a run of a sequence, and the place where its chain's state is handed on.
struct Run {
  int sequence;
  int index;    // first token = index * run_tokens
  int handoff;  // number of the sequence among those of more than one run
};

/// Sizes of a launch, decided on the host from shapes and settings alone.
struct Plan {
  int slice = 0;
  int run_tokens = 0;              // 0: what was asked for does not fit
  std::int64_t most_runs = 0;      // runs over all sequences, at most
  std::int64_t most_handoffs = 0;  // sequences of more than one run, at most
  std::int64_t slices = 0;
  std::int64_t handoff_floats = 0;  // of a chain

  std::int64_t chains_per_sequence(const Problem& p) const { return p.value_heads * slices; }
};

/// Where things lie in the workspace.
struct WorkspaceLayout {
  std::size_t control, progress, runs, states, normalizers, bytes;

  WorkspaceLayout(const Problem& p, const Plan& plan) {
    const auto chains = static_cast<std::size_t>(plan.most_handoffs * plan.chains_per_sequence(p));
    WorkspaceParts parts;
    control = parts.reserve(2 * sizeof(int));
    progress = parts.reserve(chains * sizeof(int));
    runs = parts.reserve(static_cast<std::size_t>(plan.most_runs) * sizeof(Run));
    states = parts.reserve(chains * static_cast<std::size_t>(plan.handoff_floats) * sizeof(float));
    normalizers = parts.reserve(copied_normalizers_bytes(p));
    bytes = parts.bytes();
  }
};

struct Params {
  Problem problem;
  RowAccess access;
  int run_tokens;
  int slices;
  std::int64_t chains;     // counters in `progress`
  std::int64_t most_runs;  // entries in `runs`
  std::int64_t most_handoffs;
  std::int64_t longest_sequence_runs;
  int* ticket;
  int* run_count;
  int* progress;
  Run* runs;
  float* states;
  std::int64_t handoff_floats;
};

// ---------------------------------------------------------------------------------------------------------- work list

constexpr int kPlanThreads = 1024;

/// Walks over the sequences and calls visit(sequence, runs, handoff). Sequences beyond the workspace's capacity have no runs: only
/// cu_seqlens that decrease somewhere can ask for more than the sizes computed from shapes, and must not become wild writes.
template <class Visit>
__device__ void for_each_sequence(const Params& params, Visit visit) {
  int handoff = 0;
  for (std::int64_t n = 0; n < params.problem.sequences; ++n) {
    std::int64_t runs = ceil_div(params.problem.sequence(n).length, params.run_tokens);
    if (runs == 0) runs = 1;  // a sequence of no tokens still passes its state through
    if (runs > 1 && handoff >= params.most_handoffs) runs = 0;
    visit(n, runs, handoff);
    handoff += runs > 1;
  }
}

/// Lists all first runs, then all second runs, and so on, so that chains advance side by side. One block; a thread takes every
/// kPlanThreads-th run index.
static __global__ void __launch_bounds__(kPlanThreads, 1) plan_runs(const __grid_constant__ Params params) {
  using Scan = cub::BlockScan<int, kPlanThreads>;
  __shared__ typename Scan::TempStorage scan_memory;
  for (std::int64_t i = threadIdx.x; i < params.chains; i += kPlanThreads) params.progress[i] = 0;

  std::int64_t listed = 0;
  for (std::int64_t base = 0; base < params.longest_sequence_runs; base += kPlanThreads) {
    const std::int64_t index = base + threadIdx.x;
    int count = 0, before = 0, total = 0;
    for_each_sequence(params, [&](std::int64_t, std::int64_t runs, int) { count += runs > index; });
    Scan(scan_memory).ExclusiveSum(count, before, total);
    std::int64_t at = listed + before;
    if (count > 0) {
      for_each_sequence(params, [&](std::int64_t n, std::int64_t runs, int handoff) {
        if (runs <= index) return;
        if (at < params.most_runs) params.runs[at] = {static_cast<int>(n), static_cast<int>(index), handoff};
        ++at;
      });
    }
    listed += total;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    *params.ticket = 0;
    *params.run_count = static_cast<int>(listed < params.most_runs ? listed : params.most_runs);
  }
}

// -------------------------------------------------------------------------------------------------------------- kernel

/// What a block is about.
struct Place {
  Block block;
  int index;       // of the run in its chain
  float* handoff;  // the chain's slot
  int* progress;   // and counter
};

template <class P>
__device__ __forceinline__ Place place_of(const Params& params, std::int64_t ticket) {
  const std::int64_t chains_per_sequence = params.problem.value_heads * params.slices;
  const Run run = params.runs[ticket / chains_per_sequence];
  const std::int64_t chain_in_sequence = ticket % chains_per_sequence;
  const std::int64_t chain = run.handoff * chains_per_sequence + chain_in_sequence;
  return {block_of<P>(params.problem, run.sequence, run.index, params.run_tokens, chain_in_sequence, params.slices),
          run.index, params.states + chain * params.handoff_floats, params.progress + chain};
}

template <class P>
__global__ void __launch_bounds__(kThreads, P::kBlocksPerMultiprocessor)
    chunk_pipeline(const __grid_constant__ Params params) {
  extern __shared__ float4 dynamic_shared[];
  __shared__ Place place;  // rather than in 20 registers that the state can use
  const SharedRun<P> shared(reinterpret_cast<float*>(dynamic_shared), params.run_tokens);
  const Problem& p = params.problem;
  const std::int64_t ticket = take_ticket(params.ticket);
  if (ticket / (p.value_heads * params.slices) >= *params.run_count) return;
  if (threadIdx.x == 0) place = place_of<P>(params, ticket);
  __syncthreads();

  prepare_run(p, params.access, place.block, shared);
  if (!place.block.first_run) wait_for(place.progress, place.index);
  step_run(p, place.block, shared, place.handoff);
  if (place.block.last_run) {
    __syncthreads();
  } else {
    raise(place.progress, place.index + 1);
  }
  store_outputs(p, place.block, shared);
}

// ---------------------------------------------------------------------------------------------------------------- host

constexpr int kLongestRun = 128;

inline std::vector<Setting> settings() {
  return {{"run_tokens", "tokens that a block owns", {8, 16, 32, 64, 128}},
          {"slice", "value columns that a block owns", {16, 32}}};
}

/// Tokens a run: what was asked for if it fits a block's shared memory at all, else the most that leaves room for the policy's blocks on
/// a multiprocessor.
template <class P>
int run_tokens(const DeviceProperties& device, const Settings& settings) {
  constexpr std::size_t kOwn = 256;  // the place and the ticket
  static_assert(sizeof(Place) + sizeof(int) <= kOwn, "a block's own variables");
  if (const int asked = settings.get("run_tokens", 0)) {
    return SharedRun<P>::bytes(asked) + kOwn <= device.shared_memory ? asked : 0;
  }
  const std::size_t share = (device.shared_memory + kReservedSharedMemory) / P::kBlocksPerMultiprocessor;
  return SharedRun<P>::longest(kLongestRun, share - std::min(share, kReservedSharedMemory + kOwn));
}

template <class Sum>
Plan make_plan(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  Plan plan;
  // Wide slices repeat less of the preparation; narrow ones make more chains. Narrow until chains fill the GPU twice.
  const std::int64_t wide_chains = p.sequences * p.value_heads * ceil_div(p.value_dim, 32);
  const bool wide = p.key_dim <= 128 && p.value_dim > 16 && wide_chains >= 2 * device.multiprocessors;
  plan.slice = settings.get("slice", wide ? 32 : 16);
  plan.slices = ceil_div(p.value_dim, plan.slice);
  with_policy<Sum, 32>(p, plan.slice, [&](auto policy) {
    using P = decltype(policy);
    plan.run_tokens = run_tokens<P>(device, settings);
    plan.handoff_floats = P::kHandoffFloats;
  });
  if (plan.run_tokens == 0) return plan;
  if (p.cu_seqlens.present) {
    plan.most_runs = p.tokens / plan.run_tokens + p.sequences;
    plan.most_handoffs = std::min(p.sequences, p.tokens / (plan.run_tokens + 1));
  } else {
    const std::int64_t runs = std::max<std::int64_t>(ceil_div(p.tokens, plan.run_tokens), 1);
    plan.most_runs = p.sequences * runs;
    plan.most_handoffs = runs > 1 ? p.sequences : 0;
  }
  return plan;
}

template <class Sum>
std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  if (p.has_f64) return needs_f32(p);
  if (p.intermediate_states.present) return lacks_intermediate_states(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  const std::string keys = "K = " + std::to_string(p.key_dim);
  if (p.key_dim > kMostKeys) return keys + "; this kernel holds at most 256 rows of state";
  const Plan plan = make_plan<Sum>(p, device, settings);
  if (plan.slice == 32 && p.key_dim > 128) return keys + " runs with slice=16 only";
  if (plan.run_tokens == 0) {
    const int asked = settings.get("run_tokens", 0);
    return keys + (asked != 0 ? " with run_tokens=" + std::to_string(asked) : "") +
           " needs more shared memory a block than the " + std::to_string(device.shared_memory) + " bytes of " +
           device.name;
  }
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  if (plan.most_runs > kMostBlocks / plan.chains_per_sequence(p)) return "more than 2^31 blocks";
  return "";
}

template <class Sum>
std::size_t workspace(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  return WorkspaceLayout(p, make_plan<Sum>(p, device, settings)).bytes;
}

template <class P>
void launch_with(Params params, std::int64_t blocks, cudaStream_t stream) {
  params.access = row_access_of<P>(params.problem);
  const std::size_t bytes = SharedRun<P>::bytes(params.run_tokens);
  DELTA_ATTENTION_CUDA(
      cudaFuncSetAttribute(chunk_pipeline<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  chunk_pipeline<P><<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

template <class Sum>
void launch(const Launch& call) {
  const Problem& p = call.problem;
  const Plan plan = make_plan<Sum>(p, call.device, call.settings);
  const WorkspaceLayout layout(p, plan);
  auto* memory = static_cast<char*>(call.workspace);

  Params params;
  params.problem = p;
  params.run_tokens = plan.run_tokens;
  params.slices = static_cast<int>(plan.slices);
  params.chains = plan.most_handoffs * plan.chains_per_sequence(p);
  params.most_runs = plan.most_runs;
  params.most_handoffs = plan.most_handoffs;
  params.longest_sequence_runs = std::max<std::int64_t>(ceil_div(p.tokens, plan.run_tokens), 1);
  params.ticket = reinterpret_cast<int*>(memory + layout.control);
  params.run_count = params.ticket + 1;
  params.progress = reinterpret_cast<int*>(memory + layout.progress);
  params.runs = reinterpret_cast<Run*>(memory + layout.runs);
  params.states = reinterpret_cast<float*>(memory + layout.states);
  params.handoff_floats = plan.handoff_floats;

  const auto stream = static_cast<cudaStream_t>(call.stream);
  plan_runs<<<1, kPlanThreads, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  use_copied_normalizers(params.problem, reinterpret_cast<float*>(memory + layout.normalizers), stream);
  const std::int64_t blocks = plan.most_runs * plan.chains_per_sequence(p);
  with_policy<Sum, 32>(p, plan.slice, [&](auto policy) { launch_with<decltype(policy)>(params, blocks, stream); });
}

}  // namespace delta_attention::chunk_pipeline_stages
