#pragma once

// What v3_on_chip and v4_on_chip_compensated share: the chain kernel, the plan and the launch. (V3: PlainSum, V4: CompensatedSum.)
//
// Algorithm. The state of a (sequence, value head) stays in shared memory from the first token to the last. Its value columns are cut
// into slices, which never mix; its key rows are split over the R blocks of a group, so that every product S^T x is a sum over
// blocks. Blocks exchange such sums not for every token but for every micro-chunk of F (the delayed flush), which gives the same result
// up to rounding for any F (docs/math.md). Everything of a micro-chunk that needs no state has been prepared by then, for all
// micro-chunks at once, by a launch before (on_chip_prepare.cuh): what is left for the chain is
//     u = U - S0^T W        o = scale (S0^T Q + A u)        S = Diag(b_F) S0 + R u^T
// with one exchange of 2 F C floats.
//
// Data flow of one micro-chunk, by the threads that compute:
//     read_state      S0^T [W Q] over the block's rows
//     publish         to the group: its slot in global memory, then its arrival; wait for the group's
//     correct_tokens  sum the group's parts, u = U - S0^T W
//     advance         S <- Diag(b_F) S + R u^T
// Two warps more (four for slices of 8 columns) help meanwhile: start_tile fetches the next micro-chunk's factors, store_outputs writes
// what the one before has read.
//
// Flush. Ordered (the default): each block writes a slot of its own and all sum the slots in the order of ranks, the same bits on every
// run. Atomic: all add to one slot; less reading, but the order of additions is the hardware's. Arrivals are counted by an atomic
// counter that only grows. Slots are reused in turn (2 ordered, 3 atomic): whoever writes one again has seen everyone arrive at a
// later flush, so everyone has read it.
//
// No deadlock. Blocks take tickets; R tickets in a row are a group, and a group loops over (sequence, head, slice) items. The grid is at
// most what the GPU can hold at once, and a group waits for its own blocks only: those with lower tickets are running, and those
// with higher ones start as soon as groups before them end. More heads than fit only make the loop longer.
//
// Budget. 256 + 64 threads of at most 96 registers, two blocks a multiprocessor; for slices of 8 columns 256 + 128 of at most 168, one
// block. Shared memory for R row blocks of K/R rows and C columns: the state 4 K C / R bytes (twice that compensated), two tiles of
// 4 ((3 F + 1) K / R + F C), the sums. Workspace: 4 (3 K + V + F + K / F) bytes a token and value head.
//
// Wins and losses, with measured ratios: docs/performance.md. A chain of T / F exchanges through the L2 cache bounds the time of few long
// sequences; splitting columns alone (R = 1) has no exchange but leaves each block more rows to read.
//
// Source: the article's on-chip stage with delayed flush; the algebra of the micro-chunk is the WY form of DeltaNet
// (arXiv:2406.06484) and KDA (arXiv:2510.26692).

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "api/architectures.h"
#include "api/kernel.h"
#include "cuda/delta/on_chip_chain.cuh"
#include "cuda/device/copied_normalizers.cuh"
#include "cuda/device/runtime.h"
#include "cuda/device/workspace.h"

namespace delta_attention::on_chip {

template <class P>
__global__ void __launch_bounds__(P::kThreads + P::kHelpers, P::kBlocksPerMultiprocessor)
    on_chip(const __grid_constant__ Params params) {
  extern __shared__ float4 dynamic_shared[];
  const Shared<P> shared(reinterpret_cast<float*>(dynamic_shared), params.row_tile, params.buffers);
  const int ticket = take_ticket(params.ticket);
  const int number = ticket / params.row_blocks;
  Group group = {params.row_blocks, ticket % params.row_blocks, params.atomic, params.slots + number * params.slot_floats,
                 params.arrivals + number, 0, 0};
  for (std::int64_t item = number; item < params.items; item += params.groups) {
    const Block block = block_of(params, item, group.rank, P::kColumns);
    if (threadIdx.x < P::kThreads) {
      compute_item<P>(params, block, shared, group);
    } else {
      help_item<P>(params, block, shared, group);
    }
    __syncthreads();
  }
}

// ---------------------------------------------------------------------------------------------------------------- host

/// `columns`: the value columns that are compiled. The comparisons among layouts and loads exist for plain sums.
template <class Sum>
std::vector<Setting> settings() {
  std::vector<Setting> list = {{"flush", "tokens between exchanges, F", {1, 4, 8, 16}},
                               {"flush_kind", "0: slots summed in a fixed order, 1: atomic additions", {0, 1}},
                               {"row_blocks", "blocks that share a state's rows, R", {1, 2, 4, 8, 16}},
                               {"columns", "value columns of a block, C", {8, 16, 32, 128}},
                               {"threads", "of a block that compute", {256, 512}},
                               {"buffers", "tiles of prepared micro-chunks: 2 load under the one before, 1 after it", {1, 2}}};
  if constexpr (std::is_same_v<Sum, PlainSum>) {
    list.push_back({"layout", "shared state: 0 row-major, 1 striped, 2 row-major in 16-byte vectors", {0, 1, 2}});
    list.push_back({"loads", "tiles: 0 asynchronous copies, 1 through registers", {0, 1}});
    list.push_back({"lanes", "preparation: neighbouring lanes on 0 channels, 1 tokens", {0, 1}});
  }
  return list;
}

/// Atomic additions come in any order.
inline bool unrepeatable(const Settings& chosen) { return chosen.get("flush_kind", 0) == 1; }

/// What a launch has decided.
struct Plan {
  int flush = 0, row_blocks = 0, columns = 0, threads = 0, buffers = 0;
  bool atomic = false;
  Layout layout = Layout::vectors;
  Loads loads = Loads::async_copies;
  Lanes lanes = Lanes::channels;
  int row_tile = 0;  // rows of a block, in whole 16-byte pieces
  std::int64_t slices = 0, items = 0;
  int groups = 0;
  int exchange_floats = 0, tile_floats = 0, blocks_per_multiprocessor = 0, helpers = 0;
  std::size_t shared_bytes = 0, prepare_shared_bytes = 0;  // 0: there is no such kernel
  bool fits = false;                                       // in the device's shared memory

  FactorLayout factors() const { return {flush, row_blocks, row_tile, static_cast<int>(slices) * columns}; }
};

/// Calls `use` with the policy of the plan; false if it is not among those that are compiled: every F in slices of 32 columns, F = 16 in
/// narrower ones, and for comparison the layouts at F = 8 and C = 128, the other loads at F = 8 and C = 32.
template <class Sum, class Use>
bool with_policy(const Plan& plan, const Use& use) {
  const auto match = [&](auto policy) {
    using P = decltype(policy);
    const bool is = plan.flush == P::kFlush && plan.columns == P::kColumns && plan.threads == P::kThreads &&
                    plan.layout == P::kLayout && plan.loads == P::kLoads;
    if (is) use(policy);
    return is;
  };
  constexpr Layout kVectors = Layout::vectors;
  constexpr Loads kAsync = Loads::async_copies;
  if (match(Policy<Sum, 1, 32, 256, kVectors, kAsync>()) || match(Policy<Sum, 4, 32, 256, kVectors, kAsync>()) ||
      match(Policy<Sum, 8, 32, 256, kVectors, kAsync>()) || match(Policy<Sum, 16, 32, 256, kVectors, kAsync>()) ||
      match(Policy<Sum, 16, 8, 256, kVectors, kAsync>()) || match(Policy<Sum, 16, 16, 256, kVectors, kAsync>()) ||
      match(Policy<Sum, 16, 8, 512, kVectors, kAsync>()) || match(Policy<Sum, 16, 32, 512, kVectors, kAsync>())) {
    return true;
  }
  if constexpr (std::is_same_v<Sum, PlainSum>) {
    return match(Policy<Sum, 8, 128, 256, kVectors, kAsync>()) ||
           match(Policy<Sum, 8, 128, 256, Layout::row_major, kAsync>()) ||
           match(Policy<Sum, 8, 128, 256, Layout::striped, kAsync>()) ||
           match(Policy<Sum, 8, 32, 256, kVectors, Loads::registers>());
  }
  return false;
}

/// Calls `use` with F as a compile-time number.
template <class Use>
void with_flush(int flush, const Use& use) {
  switch (flush) {
    case 1: return use(std::integral_constant<int, 1>());
    case 4: return use(std::integral_constant<int, 4>());
    case 8: return use(std::integral_constant<int, 8>());
    default: return use(std::integral_constant<int, 16>());
  }
}

template <class Sum>
void set_row_blocks(const Problem& p, const DeviceProperties& device, int row_blocks, Plan& plan) {
  constexpr int kUnit = 8;
  plan.row_blocks = row_blocks;
  plan.row_tile = static_cast<int>(ceil_div(ceil_div(p.key_dim, row_blocks), kUnit) * kUnit);
  with_policy<Sum>(plan, [&](auto policy) {
    using P = decltype(policy);
    plan.shared_bytes = Shared<P>::count(plan.row_tile, plan.buffers) * sizeof(float);
    plan.exchange_floats = P::kExchange;
    plan.blocks_per_multiprocessor = P::kBlocksPerMultiprocessor;
    plan.helpers = P::kHelpers;
    plan.tile_floats = Shared<P>::tile_floats(plan.row_tile) + P::kFlush * P::kFlush;
    plan.prepare_shared_bytes = PreparedRows<P::kFlush>::floats(plan.factors().key_rows()) * sizeof(float);
  });
  constexpr std::size_t kStatic = 256;  // shared memory that is not dynamic, at most
  plan.fits = std::max(plan.shared_bytes, plan.prepare_shared_bytes) + kStatic <= device.shared_memory;
}

/// The narrowest slices whose blocks still run all at once: narrow ones repeat the reading of W, Q and R.
inline int default_columns(const Problem& p, const DeviceProperties& device, int flush) {
  const auto blocks = [&](int columns) { return p.sequences * p.value_heads * ceil_div(p.value_dim, columns); };
  if (flush != 16) return 32;
  return blocks(8) <= device.multiprocessors ? 8 : blocks(16) <= device.multiprocessors ? 16 : 32;
}

/// Settings over this: micro-chunks of 16, whole rows, or split as far as it takes to fit into shared memory.
template <class Sum>
Plan make_plan(const Problem& p, const DeviceProperties& device, const Settings& chosen) {
  Plan plan;
  plan.flush = chosen.get("flush", 16);
  plan.threads = chosen.get("threads", 256);
  plan.buffers = chosen.get("buffers", 2);
  plan.layout = static_cast<Layout>(chosen.get("layout", static_cast<int>(Layout::vectors)));
  plan.loads = static_cast<Loads>(chosen.get("loads", static_cast<int>(Loads::async_copies)));
  plan.lanes = static_cast<Lanes>(chosen.get("lanes", static_cast<int>(Lanes::channels)));
  plan.columns = chosen.get("columns", default_columns(p, device, plan.flush));
  plan.slices = ceil_div(p.value_dim, plan.columns);
  plan.items = p.sequences * p.value_heads * plan.slices;
  set_row_blocks<Sum>(p, device, chosen.get("row_blocks", 1), plan);
  while (!chosen.has("row_blocks") && !plan.fits && plan.row_blocks < 16) {
    set_row_blocks<Sum>(p, device, plan.row_blocks * 2, plan);
  }
  plan.atomic = chosen.get("flush_kind", 0) == 1 && plan.row_blocks > 1;
  if (!plan.fits || plan.shared_bytes == 0) return plan;

  const auto by_memory = static_cast<int>((device.shared_memory + kReservedSharedMemory) / (plan.shared_bytes + kReservedSharedMemory));
  const int resident = std::min(by_memory, plan.blocks_per_multiprocessor) * device.multiprocessors;
  plan.groups = static_cast<int>(std::min<std::int64_t>(plan.items, resident / plan.row_blocks));
  return plan;
}

/// Where things lie in the workspace.
struct WorkspaceLayout {
  std::size_t arrivals, slots, normalizers, factors, bytes;
  std::int64_t slot_floats;  // of a group

  WorkspaceLayout(const Problem& p, const Plan& plan) {
    WorkspaceParts parts;
    parts.reserve(sizeof(int));  // the ticket
    const auto groups = static_cast<std::size_t>(plan.groups);
    const auto chunks = static_cast<std::size_t>(most_micro_chunks(p, plan.flush) * p.value_heads);
    slot_floats = plan.row_blocks == 1 ? 0 : std::int64_t{plan.atomic ? 3 : 2 * plan.row_blocks} * plan.exchange_floats;
    arrivals = parts.reserve(groups * sizeof(unsigned long long));
    slots = parts.reserve(groups * static_cast<std::size_t>(slot_floats) * sizeof(float));
    normalizers = parts.reserve(copied_normalizers_bytes(p));
    factors = parts.reserve(chunks * static_cast<std::size_t>(plan.factors().floats()) * sizeof(float));
    bytes = parts.bytes();
  }
};

template <class Sum>
std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings& chosen) {
  if (p.has_f64) return needs_f32(p);
  if (p.intermediate_states.present) return lacks_intermediate_states(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  const Plan plan = make_plan<Sum>(p, device, chosen);
  if (plan.shared_bytes == 0) return "this combination of flush, columns, threads, layout and loads is not compiled";
  if (!plan.fits) {
    return std::to_string(plan.row_tile) + " rows of " + std::to_string(plan.columns) + " columns a block need " +
           std::to_string(std::max(plan.shared_bytes, plan.prepare_shared_bytes)) + " bytes of shared memory; " +
           device.name + " has " + std::to_string(device.shared_memory);
  }
  if (plan.groups == 0 && plan.items > 0) {
    return std::to_string(plan.row_blocks) + " row blocks do not fit on " + device.name + " at once";
  }
  if (plan.loads == Loads::registers && plan.tile_floats > (kMostStaged - 3) * 4 * plan.helpers) {
    return "a tile of " + std::to_string(plan.tile_floats) + " numbers does not fit in registers";
  }
  constexpr std::int64_t kMostBlocks = 0x7fffffff, kMostHeads = 0xffff;
  if (most_micro_chunks(p, plan.flush) > kMostBlocks || p.value_heads > kMostHeads) return "more blocks than a grid has";
  return "";
}

template <class Sum>
std::size_t workspace(const Problem& p, const DeviceProperties& device, const Settings& chosen) {
  return WorkspaceLayout(p, make_plan<Sum>(p, device, chosen)).bytes;
}

inline void launch_prepare(const Problem& p, const Plan& plan, bool decays, float* factors, cudaStream_t stream) {
  const std::int64_t chunks = most_micro_chunks(p, plan.flush);
  if (chunks == 0) return;
  const PrepareParams params = {p, plan.factors(), plan.lanes, decays, factors};
  const dim3 grid(static_cast<unsigned>(chunks), static_cast<unsigned>(p.value_heads));
  with_flush(plan.flush, [&](auto flush) {
    constexpr auto kKernel = prepare_micro_chunks<decltype(flush)::value>;
    DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(plan.prepare_shared_bytes)));
    kKernel<<<grid, kPrepareThreads, plan.prepare_shared_bytes, stream>>>(params);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
}

inline Params make_params(const Problem& p, const Plan& plan, const WorkspaceLayout& layout, char* memory) {
  Params params;
  params.problem = p;
  params.layout = plan.factors();
  params.factors = reinterpret_cast<const float*>(memory + layout.factors);
  params.row_blocks = plan.row_blocks;
  params.row_tile = plan.row_tile;
  params.slices = static_cast<int>(plan.slices);
  params.buffers = plan.buffers;
  params.atomic = plan.atomic;
  params.groups = plan.groups;
  params.items = plan.items;
  params.ticket = reinterpret_cast<int*>(memory);
  params.arrivals = reinterpret_cast<unsigned long long*>(memory + layout.arrivals);
  params.slots = reinterpret_cast<float*>(memory + layout.slots);
  params.slot_floats = layout.slot_floats;
  return params;
}

/// `decays` = false drops the gate, for the diagnostic kernel.
template <class Sum>
void launch(const Launch& call, bool decays) {
  const Plan plan = make_plan<Sum>(call.problem, call.device, call.settings);
  const WorkspaceLayout layout(call.problem, plan);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  auto* memory = static_cast<char*>(call.workspace);
  Params params = make_params(call.problem, plan, layout, memory);
  // Counters start from zero, and so do atomic additions.
  DELTA_ATTENTION_CUDA(cudaMemsetAsync(memory, 0, plan.atomic ? layout.normalizers : layout.slots, stream));
  use_copied_normalizers(params.problem, reinterpret_cast<float*>(memory + layout.normalizers), stream);
  launch_prepare(call.problem, plan, decays, reinterpret_cast<float*>(memory + layout.factors), stream);
  with_policy<Sum>(plan, [&](auto policy) {
    constexpr auto kKernel = on_chip<decltype(policy)>;
    DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                              static_cast<int>(plan.shared_bytes)));
    const auto blocks = static_cast<unsigned>(plan.groups * plan.row_blocks);
    kKernel<<<blocks, plan.threads + plan.helpers, plan.shared_bytes, stream>>>(params);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
}

}  // namespace delta_attention::on_chip
