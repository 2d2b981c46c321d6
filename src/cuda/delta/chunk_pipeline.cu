// v1_chunk_pipeline: one launch, a chain of blocks a sequence, the state handed from block to block.
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
// gates in slices of 16, else 64. At most 128 registers a thread (K <= 128), of which the state takes K/8.
//
// Wins against step_loop by its launches and by keeping the state on chip for a whole run. Loses where chains are few and
// long: blocks of one chain work one after another, so B * HV * V/16 chains must fill the GPU. Measured ratios:
// docs/performance.md.
//
// Source: stages and hand-off after the article's chunk pipeline; the algebra is the WY form of DeltaNet (arXiv:2406.06484) and
// of KDA (arXiv:2510.26692) on micro-chunks.

#include <algorithm>
#include <cstdint>
#include <cub/block/block_scan.cuh>

#include "api/architectures.h"
#include "api/kernel.h"
#include "cuda/delta/chunk_pipeline_stages.cuh"
#include "cuda/device/runtime.h"
#include "cuda/device/signal.cuh"

namespace delta_attention {

extern const Kernel chunk_pipeline_kernel;

namespace {

using namespace chunk_pipeline_stages;

constexpr int kLongestRun = 128;

/// One entry of the work list: a run of a sequence, and the place where its chain's state is handed on.
struct Run {
  int sequence;
  int index;    // first token = index * run_tokens
  int handoff;  // number of the sequence among those of more than one run
};

/// Sizes of a launch, decided on the host from shapes alone.
struct Plan {
  int key_tile = 0;
  int slice = 0;
  int run_tokens = 0;
  std::int64_t most_runs = 0;      // runs over all sequences, at most
  std::int64_t most_handoffs = 0;  // sequences of more than one run, at most
  std::int64_t slices = 0;

  std::int64_t chains_per_sequence(const Problem& p) const { return p.value_heads * slices; }
  /// Floats that pass between runs: a state slice and the normaliser.
  std::int64_t handoff_floats() const { return static_cast<std::int64_t>(key_tile) * slice + key_tile; }
};

/// Elements of the initial normalisers that are copied before they are used: every slice of a head reads them, and one of them writes
/// the final ones, perhaps in the same memory.
std::int64_t copied_normalizers(const Problem& p) {
  return p.normalize && p.initial_normalizer.present ? p.sequences * p.value_heads * p.key_dim : 0;
}

/// Where things lie in the workspace.
struct WorkspaceLayout {
  std::size_t control, progress, runs, states, normalizers, bytes;

  WorkspaceLayout(const Problem& p, const Plan& plan) {
    const auto chains = static_cast<std::size_t>(plan.most_handoffs * plan.chains_per_sequence(p));
    std::size_t end = 0;
    const auto reserve = [&end](std::size_t size) {
      const std::size_t at = end;
      end = (end + size + 255) / 256 * 256;
      return at;
    };
    control = reserve(2 * sizeof(int));
    progress = reserve(chains * sizeof(int));
    runs = reserve(static_cast<std::size_t>(plan.most_runs) * sizeof(Run));
    states = reserve(chains * static_cast<std::size_t>(plan.handoff_floats()) * sizeof(float));
    normalizers = reserve(static_cast<std::size_t>(copied_normalizers(p)) * sizeof(float));
    bytes = end;
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
  float* normalizers;  // [N,HV,K], the copy
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
__global__ void __launch_bounds__(kPlanThreads) plan_runs(const __grid_constant__ Params params) {
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

__global__ void __launch_bounds__(kThreads) copy_normalizers(const __grid_constant__ Params params) {
  const Problem& p = params.problem;
  const std::int64_t all = p.sequences * p.value_heads * p.key_dim, step = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t i = blockIdx.x * std::int64_t{kThreads} + threadIdx.x; i < all; i += step) {
    const std::int64_t head = i / p.key_dim;
    const std::int64_t at = p.initial_normalizer.offset(head / p.value_heads, head % p.value_heads, i % p.key_dim);
    params.normalizers[i] = p.initial_normalizer.load(at);
  }
}

// -------------------------------------------------------------------------------------------------------------- kernel

__device__ Block block_of(const Params& params, const Run& run, std::int64_t chain, int slice_columns) {
  const Problem& p = params.problem;
  const Sequence sequence = p.sequence(run.sequence);
  const std::int64_t start = static_cast<std::int64_t>(run.index) * params.run_tokens;
  const std::int64_t left = sequence.length - start;
  const std::int64_t first_column = chain % params.slices * slice_columns;
  Block block;
  block.sequence = run.sequence;
  block.batch = sequence.batch;
  block.first_token = sequence.begin + start;
  block.tokens = static_cast<int>(left < params.run_tokens ? left : params.run_tokens);
  block.value_head = chain / params.slices;
  block.first_column = first_column;
  block.columns =
      static_cast<int>(p.value_dim - first_column < slice_columns ? p.value_dim - first_column : slice_columns);
  block.first_run = run.index == 0;
  block.last_run = left <= params.run_tokens;
  return block;
}

template <class P>
__global__ void __launch_bounds__(kThreads, P::kBlocksPerMultiprocessor)
    chunk_pipeline(const __grid_constant__ Params params) {
  extern __shared__ float4 dynamic_shared[];
  const SharedRun<P> shared(reinterpret_cast<float*>(dynamic_shared), params.run_tokens);
  const Problem& p = params.problem;
  const std::int64_t chains_per_sequence = p.value_heads * params.slices;
  const std::int64_t ticket = take_ticket(params.ticket);
  if (ticket / chains_per_sequence >= *params.run_count) return;

  const Run run = params.runs[ticket / chains_per_sequence];
  const std::int64_t chain_in_sequence = ticket % chains_per_sequence;
  const std::int64_t chain = run.handoff * chains_per_sequence + chain_in_sequence;
  const Block block = block_of(params, run, chain_in_sequence, P::kSlice);
  float* handoff = params.states + chain * params.handoff_floats;

  prepare_run(p, params.access, block, shared);
  if (!block.first_run) wait_for(params.progress + chain, run.index);
  step_run(p, block, shared, handoff);
  if (block.last_run) {
    __syncthreads();
  } else {
    raise(params.progress + chain, run.index + 1);
  }
  store_outputs(p, block, shared);
}

// ---------------------------------------------------------------------------------------------------------------- host

int key_tile_of(std::int64_t key_dim) { return key_dim <= 64 ? 64 : key_dim <= 128 ? 128 : 256; }

/// Calls `use` with the policy of the plan. K tiles of 256 come in slices of 16 only: wider ones would run out of registers.
template <Update kUpdate, Gate kGate, class Use>
auto with_tiles(const Plan& plan, const Use& use) {
  const bool wide = plan.slice == 32;
  switch (plan.key_tile) {
    case 64:
      return wide ? use(Policy<kUpdate, kGate, PlainSum, 64, 32>()) : use(Policy<kUpdate, kGate, PlainSum, 64, 16>());
    case 128:
      return wide ? use(Policy<kUpdate, kGate, PlainSum, 128, 32>()) : use(Policy<kUpdate, kGate, PlainSum, 128, 16>());
    default: return use(Policy<kUpdate, kGate, PlainSum, 256, 16>());
  }
}

template <class Use>
auto with_policy(const Problem& p, const Plan& plan, const Use& use) {
  const bool delta = p.update == Update::delta;
  if (p.gate == Gate::channel) {
    return delta ? with_tiles<Update::delta, Gate::channel>(plan, use)
                 : with_tiles<Update::additive, Gate::channel>(plan, use);
  }
  return delta ? with_tiles<Update::delta, Gate::scalar>(plan, use)
               : with_tiles<Update::additive, Gate::scalar>(plan, use);
}

/// The longest run whose shared memory leaves room for the policy's blocks on a multiprocessor; 0 if not even one micro-chunk fits.
template <class P>
int run_tokens(const DeviceProperties& device) {
  constexpr std::size_t kReserved = 1024;  // what CUDA keeps of each block's share
  const std::size_t limit = (device.shared_memory + kReserved) / P::kBlocksPerMultiprocessor - kReserved;
  int tokens = kLongestRun;
  while (tokens >= kMicroChunk && SharedRun<P>::bytes(tokens) > limit) tokens /= 2;
  return tokens >= kMicroChunk ? tokens : 0;
}

Plan make_plan(const Problem& p, const DeviceProperties& device) {
  Plan plan;
  plan.key_tile = key_tile_of(p.key_dim);
  // Wide slices repeat less of the preparation; narrow ones make more chains. Narrow until chains fill the GPU twice.
  const std::int64_t wide_chains = p.sequences * p.value_heads * ceil_div(p.value_dim, 32);
  const bool wide = plan.key_tile <= 128 && p.value_dim > 16 && wide_chains >= 2 * device.multiprocessors;
  plan.slice = wide ? 32 : 16;
  plan.slices = ceil_div(p.value_dim, plan.slice);
  plan.run_tokens = with_policy(p, plan, [&](auto policy) { return run_tokens<decltype(policy)>(device); });
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

std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings&) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.key_dim > 256) return "K = " + std::to_string(p.key_dim) + "; this kernel holds at most 256 rows of state";
  const Plan plan = make_plan(p, device);
  if (plan.run_tokens == 0) {
    return "K = " + std::to_string(p.key_dim) + " needs more shared memory a block than the " +
           std::to_string(device.shared_memory) + " bytes of " + device.name;
  }
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  if (plan.most_runs > kMostBlocks / plan.chains_per_sequence(p)) return "more than 2^31 blocks";
  return "";
}

std::size_t workspace(const Problem& p, const DeviceProperties& device, const Settings&) {
  return WorkspaceLayout(p, make_plan(p, device)).bytes;
}

template <class P>
void launch_with(const Params& params, std::int64_t blocks, cudaStream_t stream) {
  const std::size_t bytes = SharedRun<P>::bytes(params.run_tokens);
  DELTA_ATTENTION_CUDA(
      cudaFuncSetAttribute(chunk_pipeline<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  chunk_pipeline<P><<<static_cast<unsigned>(blocks), kThreads, bytes, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

/// Copies the initial normalisers and lets the problem read the copy.
void use_copied_normalizers(Params& params, cudaStream_t stream) {
  constexpr std::int64_t kMostBlocks = 1024;
  Problem& p = params.problem;
  const auto blocks = static_cast<unsigned>(std::min(ceil_div(copied_normalizers(p), kThreads), kMostBlocks));
  copy_normalizers<<<blocks, kThreads, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  InputOperand copy;
  copy.data = params.normalizers;
  copy.present = true;
  copy.strides[0] = p.value_heads * p.key_dim;
  copy.strides[1] = p.key_dim;
  copy.strides[2] = 1;
  p.initial_normalizer = copy;
}

void launch(const Launch& call) {
  const Problem& p = call.problem;
  const Plan plan = make_plan(p, call.device);
  const WorkspaceLayout layout(p, plan);
  auto* memory = static_cast<char*>(call.workspace);
  const int per_lane = plan.key_tile / kWarpSize;

  Params params;
  params.problem = p;
  params.run_tokens = plan.run_tokens;
  params.slices = static_cast<int>(plan.slices);
  params.access = {reads_in_pieces(p.q, p.key_dim, per_lane), reads_in_pieces(p.k, p.key_dim, per_lane),
                   p.gate == Gate::channel && reads_in_pieces(p.log_decay, p.key_dim, per_lane)};
  params.chains = plan.most_handoffs * plan.chains_per_sequence(p);
  params.most_runs = plan.most_runs;
  params.most_handoffs = plan.most_handoffs;
  params.longest_sequence_runs = std::max<std::int64_t>(ceil_div(p.tokens, plan.run_tokens), 1);
  params.ticket = reinterpret_cast<int*>(memory + layout.control);
  params.run_count = params.ticket + 1;
  params.progress = reinterpret_cast<int*>(memory + layout.progress);
  params.runs = reinterpret_cast<Run*>(memory + layout.runs);
  params.states = reinterpret_cast<float*>(memory + layout.states);
  params.handoff_floats = plan.handoff_floats();
  params.normalizers = reinterpret_cast<float*>(memory + layout.normalizers);

  const auto stream = static_cast<cudaStream_t>(call.stream);
  plan_runs<<<1, kPlanThreads, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  if (copied_normalizers(p) > 0) use_copied_normalizers(params, stream);
  const std::int64_t blocks = plan.most_runs * plan.chains_per_sequence(p);
  with_policy(p, plan, [&](auto policy) { launch_with<decltype(policy)>(params, blocks, stream); });
}

}  // namespace

const Kernel chunk_pipeline_kernel = {
    "v1_chunk_pipeline",
    "one launch: blocks own runs of tokens and hand the state on, f32 micro-chunks (V1)",
    DeviceType::cuda,
    true,
    10,
    no_settings,
    unsupported,
    workspace,
    launch,
};

}  // namespace delta_attention
