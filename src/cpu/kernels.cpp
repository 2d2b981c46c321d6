// The two CPU kernels as the rest of the library sees them: cut the problem into slices of heads, and walk each slice
// chunk by chunk with a hot routine. Their stories are in sequential.cpp and chunkwise.cpp, which are compiled once per
// instruction set.
//
// A task is the columns [column, column + count) of one head of one sequence. Columns of V never meet, so a head may be
// cut when there are fewer heads than threads; what belongs to K is then computed once per cut. No task reads what
// another writes, so neither their number nor their order shows in the result.

#if defined(DELTA_ATTENTION_CPU_X86)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <new>
#include <vector>

#include "api/kernel.h"
#include "cpu/head_buffers.h"
#include "cpu/instruction_set.h"
#include "cpu/parallel.h"
#include "delta_attention/error.h"

namespace delta_attention {
namespace {

using cpu_kernels::ChunkRoutine;
using cpu_kernels::ChunkRoutines;
using cpu_kernels::HeadBuffers;
using cpu_kernels::HeadSlice;
using cpu_kernels::Index;
using cpu_kernels::kAlignment;
using cpu_kernels::kChunkTokens;
using cpu_kernels::TaskQueue;

constexpr Index kMostColumns = 256;   // of a slice: keeps its state in the second-level cache
constexpr double kThreadWorth = 1e6;  // multiplications that pay for starting a thread

/// How the problem is cut into tasks.
struct Plan {
  Index columns = 0;  // per slice
  Index slices = 0;   // per head
  Index tasks = 0;
  int threads = 1;
};

int useful_threads(const Problem& p, int threads) {
  const double tokens = static_cast<double>(p.cu_seqlens.present ? p.tokens : p.batch * p.tokens);
  const double state =
      static_cast<double>(p.value_heads) * static_cast<double>(p.key_dim) * static_cast<double>(p.value_dim);
  const double work = (3.0 * tokens + static_cast<double>(p.sequences)) * state;
  return static_cast<int>(std::clamp(work / kThreadWorth, 1.0, static_cast<double>(threads)));
}

Plan plan_whole_heads(const Problem& p, int threads) {
  const Index heads = p.sequences * p.value_heads;
  return {p.value_dim, 1, heads, static_cast<int>(std::min<Index>(useful_threads(p, threads), heads))};
}

Plan plan_slices(const Problem& p, int threads) {
  const Index heads = p.sequences * p.value_heads;
  const int useful = useful_threads(p, threads);
  const Index wanted = std::max(ceil_div(useful, heads), ceil_div(p.value_dim, kMostColumns));
  Plan plan;
  plan.columns = std::min(p.value_dim, ceil_div(ceil_div(p.value_dim, wanted), kAlignment) * kAlignment);
  plan.slices = ceil_div(p.value_dim, plan.columns);
  plan.tasks = heads * plan.slices;
  plan.threads = static_cast<int>(std::min<Index>(useful, plan.tasks));
  return plan;
}

#if defined(DELTA_ATTENTION_CPU_X86)
/// While one lives, this thread rounds results below the smallest normal f32 (1.2e-38) to zero, and reads such numbers
/// as zero. Strong decays pass through that range on their way to zero, and x86 takes a hundred cycles for each such
/// operation.
class FlushSubnormals {
 public:
  FlushSubnormals() : previous_(_mm_getcsr()) { _mm_setcsr(previous_ | kFlushToZero | kSubnormalsAreZero); }
  ~FlushSubnormals() { _mm_setcsr(previous_); }
  FlushSubnormals(const FlushSubnormals&) = delete;
  FlushSubnormals& operator=(const FlushSubnormals&) = delete;

 private:
  static constexpr unsigned kFlushToZero = 0x8000, kSubnormalsAreZero = 0x0040;
  unsigned previous_;
};
#else
struct FlushSubnormals {
  FlushSubnormals() {}
};
#endif

/// The initial normalisers in f32. Every slice of a head reads them, and one of them writes the final ones, perhaps in
/// place.
std::vector<float> load_normalizers(const Problem& p) {
  std::vector<float> all;
  const InputOperand& z = p.initial_normalizer;
  if (!z.present) return all;
  all.reserve(static_cast<std::size_t>(p.sequences * p.value_heads * p.key_dim));
  for (Index n = 0; n < p.sequences; ++n) {
    for (Index head = 0; head < p.value_heads; ++head) {
      for (Index channel = 0; channel < p.key_dim; ++channel) all.push_back(z.load(z.offset(n, head, channel)));
    }
  }
  return all;
}

/// Where each sequence's intermediate states start; empty without them.
std::vector<Index> first_intermediate_states(const Problem& p) {
  std::vector<Index> firsts;
  if (!p.intermediate_states.present) return firsts;
  firsts.reserve(static_cast<std::size_t>(p.sequences));
  for (Index n = 0, next = 0; n < p.sequences; ++n) {
    firsts.push_back(next);
    next += p.intermediate_count(p.sequence(n));
  }
  return firsts;
}

/// What every slice starts from.
struct Start {
  std::vector<float> normalizers;
  std::vector<Index> intermediate_states;
};

HeadSlice slice_of(const Problem& p, const Plan& plan, Index task) {
  HeadSlice slice;
  slice.column = task % plan.slices * plan.columns;
  slice.count = std::min(plan.columns, p.value_dim - slice.column);
  slice.value_head = task / plan.slices % p.value_heads;
  slice.sequence = task / plan.slices / p.value_heads;
  return slice;
}

/// Tokens of the next chunk of a sequence: to its end, or to its next intermediate state.
Index chunk_tokens(const Problem& p, const Sequence& sequence, Index done) {
  const Index tokens = std::min(kChunkTokens, sequence.length - done);
  return p.intermediate_states.present ? std::min(tokens, p.state_interval - done % p.state_interval) : tokens;
}

void run_slice(const Problem& p, const HeadSlice& slice, ChunkRoutine routine, const Start& start,
               HeadBuffers& buffers) {
  const Sequence sequence = p.sequence(slice.sequence);
  buffers.load_state(slice, start.normalizers.empty() ? nullptr : start.normalizers.data());
  for (Index done = 0; done < sequence.length;) {
    const Index token = sequence.begin + done;
    const Index tokens = chunk_tokens(p, sequence, done);
    buffers.load_tokens(slice, sequence.batch, token, tokens, sequence.length - done);
    routine(buffers.chunk());
    buffers.store_out(slice, sequence.batch, token);
    done += tokens;
    if (p.intermediate_states.present && done % p.state_interval == 0) {
      const Index first = start.intermediate_states[static_cast<std::size_t>(slice.sequence)];
      buffers.store_intermediate_state(slice, first + done / p.state_interval - 1);
    }
  }
  buffers.store_final_state(slice);
}

void run(const Problem& p, const Plan& plan, ChunkRoutine ChunkRoutines::*which) {
  try {
    const ChunkRoutines routines = cpu_kernels::chunk_routines().front();
    const Start start = {load_normalizers(p), first_intermediate_states(p)};
    std::vector<HeadBuffers> buffers;  // all of them before any work: a call that is refused memory has written nothing
    for (int i = 0; i < plan.threads; ++i) buffers.emplace_back(p, routines, plan.columns);
    cpu_kernels::run_tasks(plan.tasks, plan.threads, [&](int worker, TaskQueue& queue) {
      const FlushSubnormals flush;
      for (Index task = 0; queue.take(task);) {
        run_slice(p, slice_of(p, plan, task), routines.*which, start, buffers[static_cast<std::size_t>(worker)]);
      }
    });
  } catch (const std::bad_alloc&) {
    throw OutOfMemory("working memory of the CPU kernel: the system refused it");
  }
}

}  // namespace

extern const Kernel cpu_sequential_kernel;
const Kernel cpu_sequential_kernel = {
    "cpu_sequential",
    "f32, one token after another, threads over heads (Eigen)",
    DeviceType::cpu,
    true,
    -1,
    no_settings,
    [](const Problem& problem, const DeviceProperties&, const Settings&) { return needs_f32(problem); },
    no_workspace,
    [](const Launch& launch) {
      run(launch.problem, plan_whole_heads(launch.problem, launch.threads), &ChunkRoutines::sequential);
    },
};

extern const Kernel cpu_chunkwise_kernel;
const Kernel cpu_chunkwise_kernel = {
    "cpu_chunkwise",
    "f32, chunks of 32 tokens as matrix products, threads over heads and columns of V",
    DeviceType::cpu,
    true,
    10,
    no_settings,
    [](const Problem& problem, const DeviceProperties&, const Settings&) { return needs_f32(problem); },
    no_workspace,
    [](const Launch& launch) {
      run(launch.problem, plan_slices(launch.problem, launch.threads), &ChunkRoutines::chunkwise);
    },
};

}  // namespace delta_attention
