// step_loop: one launch per token, the state in global memory. The baseline ("native loop") that the staged kernels are
// measured against, and what a framework does when the recurrence is written as a loop over tokens.
//
// Algorithm. Launch t applies token t of every sequence: decay, predict, correct, accumulate, read (docs/math.md), one after
// the other as the formulas stand.
//
// Data flow. initial_state -> f32 state in the workspace -> read and written back by every launch -> final_state. Per token and
// head K*V floats travel twice through L2 or device memory, which is what the other kernels avoid.
//
// Roles. A block takes 32 value columns of one (sequence, value head): 32 threads side by side along the columns (coalesced
// rows of the state), 8 groups of rows; the sums over K go through shared memory in a fixed order. Shared memory: q, k and the
// decays of the token (3K floats) and 8 x 32 partial sums. No limit on V; K up to 4096.
//
// Wins nowhere: T launches of a few microseconds each. Measured ratios: docs/performance.md.

#include <cstdint>

#include "api/architectures.h"
#include "api/kernel.h"
#include "cuda/device/runtime.h"
#include "cuda/device/warp.cuh"
#include "state/gate.h"
#include "state/state_update.h"

namespace delta_attention {

extern const Kernel step_loop_kernel;

namespace {

constexpr int kColumns = 32;
constexpr int kRowGroups = 8;
constexpr int kThreads = kColumns * kRowGroups;
constexpr int kBlocksPerMultiprocessor = 4;
constexpr std::int64_t kMostRows = 4096;  // 3 rows of floats in 48 KB of shared memory

using Cell = StateTile<PlainSum, 1, 1>;

struct Params {
  Problem problem;
  std::int64_t column_tiles;
  float* states;       // [N,HV,K,V]
  float* normalizers;  // [blocks,K]: every column tile keeps its own copy, so that blocks share nothing
};

/// One block's part: a sequence, a value head and a tile of columns.
struct Place {
  std::int64_t sequence, value_head, column;
  float* state;       // [K,V]
  float* normalizer;  // [K]
  bool inside;        // this thread has a column

  __device__ explicit Place(const Params& params) {
    const Problem& p = params.problem;
    const std::int64_t head = blockIdx.x / params.column_tiles;
    sequence = head / p.value_heads;
    value_head = head % p.value_heads;
    column = blockIdx.x % params.column_tiles * kColumns + threadIdx.x % kColumns;
    state = params.states + head * p.key_dim * p.value_dim;
    normalizer = params.normalizers + blockIdx.x * p.key_dim;
    inside = column < p.value_dim;
  }
};

__device__ int row_group() { return threadIdx.x / kColumns; }

__global__ void __launch_bounds__(kThreads) load_states(const __grid_constant__ Params params) {
  const Problem& p = params.problem;
  const Place at(params);
  for (std::int64_t row = row_group(); row < p.key_dim; row += kRowGroups) {
    if (at.inside) {
      at.state[row * p.value_dim + at.column] =
          p.initial_state.present
              ? p.initial_state.load(p.initial_state.offset(at.sequence, at.value_head, row, at.column))
              : 0.0f;
    }
    if (p.normalize && threadIdx.x % kColumns == 0) {
      at.normalizer[row] = p.initial_normalizer.present
                               ? p.initial_normalizer.load(p.initial_normalizer.offset(at.sequence, at.value_head, row))
                               : 0.0f;
    }
  }
}

__global__ void __launch_bounds__(kThreads) store_states(const __grid_constant__ Params params) {
  const Problem& p = params.problem;
  const Place at(params);
  for (std::int64_t row = row_group(); row < p.key_dim; row += kRowGroups) {
    if (at.inside && p.final_state.present) {
      p.final_state.store(p.final_state.offset(at.sequence, at.value_head, row, at.column),
                          at.state[row * p.value_dim + at.column]);
    }
    if (at.column == 0 && p.final_normalizer.present) {
      p.final_normalizer.store(p.final_normalizer.offset(at.sequence, at.value_head, row), at.normalizer[row]);
    }
  }
}

/// Sums one number a thread over the row groups of its column, in a fixed order, for every thread.
__device__ float sum_row_groups(float part, float* partial) {
  partial[threadIdx.x] = part;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) sum += partial[group * kColumns + threadIdx.x % kColumns];
  __syncthreads();
  return sum;
}

/// Sums one number a thread over the whole block, for every thread.
__device__ float sum_block(float part, float* partial) {
  const float sum = warp_sum(part);
  if (threadIdx.x % kWarpSize == 0) partial[threadIdx.x / kWarpSize] = sum;
  __syncthreads();
  float total = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kThreads / kWarpSize; ++warp) total += partial[warp];
  __syncthreads();
  return total;
}

/// One row of q or k into shared memory, l2-normalised where asked.
__device__ void load_row(const Problem& p, const InputOperand& operand, std::int64_t row, float* out, float* partial) {
  float squares = 0.0f;
  for (std::int64_t i = threadIdx.x; i < p.key_dim; i += kThreads) {
    const float x = operand.load(row + i);
    squares += x * x;
    out[i] = x;
  }
  if (!p.qk_l2norm) return;
  const float factor = l2norm_factor(sum_block(squares, partial));
  for (std::int64_t i = threadIdx.x; i < p.key_dim; i += kThreads) out[i] *= factor;
}

__device__ void load_decays(const Problem& p, const Place& at, std::int64_t batch, std::int64_t token, float* out) {
  const DecayReader decays(p, at.value_head);
  for (std::int64_t i = threadIdx.x; i < p.key_dim; i += kThreads) {
    const std::int64_t channel = p.gate == Gate::channel ? i : 0;
    out[i] = p.gate == Gate::none ? 1.0f : decays.decay(decays.load(batch, token, channel), channel);
  }
}

/// z <- Diag(a) z + k; returns z^T q.
__device__ float step_normalizer(const Problem& p, const Place& at, const float* q, const float* k, const float* a,
                                 float* partial) {
  float part = 0.0f;
  for (std::int64_t i = threadIdx.x; i < p.key_dim; i += kThreads) {
    const float z = at.normalizer[i] * a[i] + k[i];
    part += z * q[i];
    at.normalizer[i] = z;
  }
  return sum_block(part, partial);
}

// Left to itself the compiler spills to fit more blocks on a multiprocessor than one token ever fills.
template <Update kUpdate>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor) step(const __grid_constant__ Params params, std::int64_t t) {
  extern __shared__ float rows[];
  __shared__ float partial[kThreads];
  const Problem& p = params.problem;
  const Place at(params);
  const Sequence sequence = p.sequence(at.sequence);
  if (t >= sequence.length) return;

  const std::int64_t token = sequence.begin + t, key_head = p.key_head(at.value_head);
  float *q = rows, *k = rows + p.key_dim, *a = rows + 2 * p.key_dim;
  load_row(p, p.q, p.q.offset(sequence.batch, token, key_head), q, partial);
  load_row(p, p.k, p.k.offset(sequence.batch, token, key_head), k, partial);
  load_decays(p, at, sequence.batch, token, a);
  __syncthreads();

  float prediction[1] = {0.0f}, read_out[1] = {0.0f};
  Cell cell;
  if (kUpdate == Update::delta) {
#pragma unroll 4
    for (std::int64_t row = row_group(); row < p.key_dim && at.inside; row += kRowGroups) {
      cell.cell[0][0].set(at.state[row * p.value_dim + at.column]);
      decay(cell, 0, a[row]);
      predict(cell, 0, k[row], prediction);
    }
    prediction[0] = sum_row_groups(prediction[0], partial);
  }
  const float v = at.inside ? p.v.load(p.v.offset(sequence.batch, token, at.value_head, at.column)) : 0.0f;
  const float u[1] = {correct<kUpdate>(v, prediction[0], load_beta(p, sequence.batch, token, at.value_head))};
#pragma unroll 4
  for (std::int64_t row = row_group(); row < p.key_dim && at.inside; row += kRowGroups) {
    float* element = at.state + row * p.value_dim + at.column;
    cell.cell[0][0].set(*element);
    decay(cell, 0, a[row]);
    accumulate(cell, 0, k[row], u);
    read(cell, 0, q[row], read_out);
    *element = cell.cell[0][0].value();
  }
  float o = p.scale * sum_row_groups(read_out[0], partial);
  if (p.normalize) o /= step_normalizer(p, at, q, k, a, partial);
  if (at.inside && row_group() == 0) {
    p.out.store(p.out.offset(sequence.batch, token, at.value_head, at.column), o);
  }
}

std::int64_t blocks_of(const Problem& p) { return p.sequences * p.value_heads * ceil_div(p.value_dim, kColumns); }

std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings&) {
  if (p.has_f64) return needs_f32(p);
  if (p.intermediate_states.present) return lacks_intermediate_states(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.key_dim > kMostRows) return "K = " + std::to_string(p.key_dim) + "; at most " + std::to_string(kMostRows);
  if (blocks_of(p) > 0x7fffffff) return "more than 2^31 blocks";
  return "";
}

std::size_t workspace(const Problem& p, const DeviceProperties&, const Settings&) {
  const std::int64_t normalizers = p.normalize ? blocks_of(p) * p.key_dim : 0;
  return static_cast<std::size_t>(p.state_elements() + normalizers) * sizeof(float);
}

void launch(const Launch& call) {
  const Problem& p = call.problem;
  Params params;
  params.problem = p;
  params.column_tiles = ceil_div(p.value_dim, kColumns);
  params.states = static_cast<float*>(call.workspace);
  params.normalizers = params.states + p.state_elements();

  const auto stream = static_cast<cudaStream_t>(call.stream);
  const auto blocks = static_cast<unsigned>(blocks_of(p));
  const std::size_t shared = 3 * static_cast<std::size_t>(p.key_dim) * sizeof(float);
  const auto kernel = p.update == Update::delta ? step<Update::delta> : step<Update::additive>;
  load_states<<<blocks, kThreads, 0, stream>>>(params);
  // Packed sequences: their lengths are on the device, so T launches, of which a shorter sequence sits out the last ones.
  for (std::int64_t t = 0; t < p.tokens; ++t) kernel<<<blocks, kThreads, shared, stream>>>(params, t);
  store_states<<<blocks, kThreads, 0, stream>>>(params);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

}  // namespace

const Kernel step_loop_kernel = {
    "step_loop",
    "one launch a token, state in global memory: the baseline",
    DeviceType::cuda,
    true,
    -1,
    no_settings,
    unsupported,
    workspace,
    launch,
};

}  // namespace delta_attention
