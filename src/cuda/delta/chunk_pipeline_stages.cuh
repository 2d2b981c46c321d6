#pragma once

// The stages of the chunk pipeline (chunk_pipeline_kernel.cuh tells their story): what one block does to one run of tokens, as
// functions that are tested one by one. All of them are called by every thread of the block, or by whole warps where it says so.

#include <cstdint>
#include <type_traits>

#include "cuda/device/micro_chunk.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/warp.cuh"
#include "state/gate.h"
#include "state/state_update.h"

namespace delta_attention::chunk_pipeline_stages {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;

/// What is fixed at compile time. A recurrence without a gate runs as a scalar gate of 1, which costs one multiplication a state
/// element and micro-chunk and saves a third of the compiled kernels.
template <Update kUpdateValue, Gate kGateValue, class SumType, int kKeyTileValue, int kSliceValue>
struct Policy {
  static constexpr Update kUpdate = kUpdateValue;
  static constexpr Gate kGate = kGateValue;
  using Sum = SumType;
  static constexpr int kKeyTile = kKeyTileValue;
  static constexpr int kSlice = kSliceValue;        // value columns
  static constexpr int kColumnStride = kSlice + 4;  // keeps the tokens of a column on different banks
  static constexpr int kRowLanes = kMicroChunk;     // lanes that share a column; each receives one token's sums
  static constexpr int kColumnLanes = kWarpSize / kRowLanes;  // columns that a warp steps side by side
  static constexpr int kStepWarps = kSlice / kColumnLanes;    // the other warps help to load and prepare only
  static constexpr int kRows = kKeyTile / kRowLanes;          // rows that a lane holds
  static constexpr int kBlocksPerMultiprocessor = kKeyTile <= 128 ? 2 : 1;
  static_assert(kStepWarps <= kWarps && kRows % 4 == 0, "lanes read four rows at once");
  using Tile = StateTile<Sum, kRows, 1>;
  // What passes between runs: the parts of the slice's cells, then those of the normaliser.
  static constexpr int kStateFloats = Sum::kParts * kKeyTile * kSlice;
  static constexpr int kHandoffFloats = kStateFloats + Sum::kParts * kKeyTile;
};

constexpr std::int64_t kMostKeys = 256;

namespace detail {

template <class Sum, int kWidestSlice, Update kUpdate, Gate kGate, class Use>
auto with_tiles(std::int64_t key_dim, int slice, const Use& use) {
  if constexpr (kWidestSlice == 32) {
    if (slice == 32 && key_dim <= 64) return use(Policy<kUpdate, kGate, Sum, 64, 32>());
    if (slice == 32) return use(Policy<kUpdate, kGate, Sum, 128, 32>());
  }
  if (key_dim <= 64) return use(Policy<kUpdate, kGate, Sum, 64, 16>());
  if (key_dim <= 128) return use(Policy<kUpdate, kGate, Sum, 128, 16>());
  return use(Policy<kUpdate, kGate, Sum, 256, 16>());
}

}  // namespace detail

/// Calls `use` with the policy of the problem. More than 128 keys come in slices of 16 only: wider ones would run out of registers.
template <class Sum, int kWidestSlice, class Use>
auto with_policy(const Problem& p, int slice, const Use& use) {
  using detail::with_tiles;
  const bool delta = p.update == Update::delta;
  if (p.gate == Gate::channel) {
    return delta ? with_tiles<Sum, kWidestSlice, Update::delta, Gate::channel>(p.key_dim, slice, use)
                 : with_tiles<Sum, kWidestSlice, Update::additive, Gate::channel>(p.key_dim, slice, use);
  }
  return delta ? with_tiles<Sum, kWidestSlice, Update::delta, Gate::scalar>(p.key_dim, slice, use)
               : with_tiles<Sum, kWidestSlice, Update::additive, Gate::scalar>(p.key_dim, slice, use);
}

/// Which operands' rows may be read in pieces of several channels (reads_in_pieces).
struct RowAccess {
  bool q, k, decay;
};

template <class P>
RowAccess row_access_of(const Problem& p) {
  constexpr int kPerLane = P::kKeyTile / kWarpSize;
  return {reads_in_pieces(p.q, p.key_dim, kPerLane), reads_in_pieces(p.k, p.key_dim, kPerLane),
          p.gate == Gate::channel && reads_in_pieces(p.log_decay, p.key_dim, kPerLane)};
}

/// The block's part of the problem.
struct Block {
  std::int64_t sequence;
  std::int64_t batch;
  std::int64_t first_token;  // of the run, in its batch row
  int tokens;                // in this run
  std::int64_t value_head;
  std::int64_t first_column;
  int columns;  // of this slice inside V
  bool first_run, last_run;
};

template <class P>
struct SharedRun {
  float *w, *q, *k, *u, *a_matrix, *decay_end, *beta, *log_decay, *denominator, *scratch;

  static constexpr int decay_end_width() { return P::kGate == Gate::channel ? P::kKeyTile : 1; }

  static std::size_t bytes(int run_tokens) {
    const int micro_chunks = run_tokens / kMicroChunk;
    const int floats = run_tokens * (3 * P::kKeyTile + P::kColumnStride + kMicroChunk + 3) +
                       micro_chunks * decay_end_width() + kWarps * kMicroChunk;
    return static_cast<std::size_t>(floats) * sizeof(float);
  }

  /// The longest run of 8, 16, ... `most` tokens that fits; 0 if not even one micro-chunk does.
  static int longest(int most, std::size_t bytes_at_most) {
    int tokens = most;
    while (tokens >= kMicroChunk && bytes(tokens) > bytes_at_most) tokens /= 2;
    return tokens >= kMicroChunk ? tokens : 0;
  }

  __device__ SharedRun(float* memory, int run_tokens) {
    const auto take = [&memory](int floats) {
      float* at = memory;
      memory += floats;
      return at;
    };
    w = take(run_tokens * P::kKeyTile);
    q = take(run_tokens * P::kKeyTile);
    k = take(run_tokens * P::kKeyTile);
    u = take(run_tokens * P::kColumnStride);
    a_matrix = take(run_tokens * kMicroChunk);
    beta = take(run_tokens);
    log_decay = take(run_tokens);
    denominator = take(run_tokens);
    scratch = take(kWarps * kMicroChunk);
    decay_end = take(run_tokens / kMicroChunk * decay_end_width());
  }

  __device__ MicroChunkView micro_chunk(int index, int warp) const {
    const int token = index * kMicroChunk;
    return {w + token * P::kKeyTile,
            q + token * P::kKeyTile,
            k + token * P::kKeyTile,
            u + token * P::kColumnStride,
            a_matrix + token * kMicroChunk,
            decay_end + index * decay_end_width(),
            scratch + warp * kMicroChunk,
            beta + token,
            log_decay + token};
  }
};

/// Every row becomes x / sqrt(sum x^2 + eps).
template <int kPerLane>
__device__ __forceinline__ void l2normalize_rows(int padded_tokens, float* rows) {
  transform_rows<kPerLane>(padded_tokens, rows, [](auto& x) {
    constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(x)>>;
    float factor[kCount] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) factor[i] += x[i][e] * x[i][e];
    }
    warp_sums(factor);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      factor[i] = l2norm_factor(factor[i]);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) x[i][e] *= factor[i];
    }
  });
}

/// The channel gates of the run become log decays; 0 for tokens and channels that do not exist. A warp takes the rows that it has
/// widened itself.
template <int kPerLane>
__device__ __forceinline__ void activate_gates(const Problem& p, const Block& block, int padded_tokens, float* rows) {
  const DecayReader decays(p, block.value_head);
  __syncwarp();
  for (int t = threadIdx.x / kWarpSize; t < padded_tokens; t += kWarps) {
#pragma unroll 1
    for (int channel = threadIdx.x % kWarpSize; channel < kPerLane * kWarpSize; channel += kWarpSize) {
      float& gate = rows[t * kPerLane * kWarpSize + channel];
      gate = t < block.tokens && channel < p.key_dim ? decays.log_decay(gate, channel) : 0.0f;
    }
  }
}

/// beta and scalar log decays, a token a thread.
__device__ __forceinline__ void load_token_scalars(const Problem& p, const Block& block, int padded_tokens, float* beta,
                                                   float* log_decay) {
  const DecayReader decays(p, block.value_head);
  for (int t = threadIdx.x; t < padded_tokens; t += kThreads) {
    const bool inside = t < block.tokens;
    const std::int64_t token = block.first_token + t;
    beta[t] = inside ? load_beta(p, block.batch, token, block.value_head) : 0.0f;
    const bool gated = inside && p.gate == Gate::scalar;
    log_decay[t] = gated ? decays.log_decay(decays.load(block.batch, token, 0), 0) : 0.0f;
  }
}

__device__ __forceinline__ RowsView rows_of(const InputOperand& operand, const Block& block, std::int64_t head,
                                            bool in_pieces, std::int64_t size) {
  return {operand.data,
          operand.dtype,
          in_pieces,
          operand.offset(block.batch, block.first_token, head),
          operand.strides[1],
          block.tokens,
          static_cast<int>(size)};
}

/// The slice's columns of v, a column a thread, several tokens in flight.
template <class Element, int kColumns, int kColumnStride>
__device__ __forceinline__ void load_values_of(const Problem& p, const Block& block, int padded_tokens, float* u) {
  constexpr int kTokensAside = kThreads / kColumns, kAtOnce = 4;
  const int column = threadIdx.x % kColumns;
  const auto* from = static_cast<const Element*>(p.v.data) +
                     p.v.offset(block.batch, block.first_token, block.value_head) + block.first_column + column;
  for (int first = threadIdx.x / kColumns; first < padded_tokens; first += kTokensAside * kAtOnce) {
    Element value[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int t = first + i * kTokensAside;
      value[i] = t < block.tokens && column < block.columns ? from[t * p.v.strides[1]] : from_float<Element>(0.0f);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int t = first + i * kTokensAside;
      if (t < padded_tokens) u[t * kColumnStride + column] = to_float(value[i]);
    }
  }
}

template <class P>
__device__ __forceinline__ void load_values(const Problem& p, const Block& block, int padded_tokens, float* u) {
  switch (p.dtype) {
    case DType::f16: return load_values_of<Half, P::kSlice, P::kColumnStride>(p, block, padded_tokens, u);
    case DType::bf16: return load_values_of<BFloat16, P::kSlice, P::kColumnStride>(p, block, padded_tokens, u);
    default: return load_values_of<float, P::kSlice, P::kColumnStride>(p, block, padded_tokens, u);
  }
}

/// Stage A. Everything the run reads. Tokens past the end become neutral: k = 0, beta = 0, g = 0.
template <class P>
__device__ void load_run(const Problem& p, const RowAccess& access, const Block& block, int padded_tokens,
                         const SharedRun<P>& shared) {
  constexpr int kPerLane = P::kKeyTile / kWarpSize;
  constexpr bool kChannelGate = P::kGate == Gate::channel;
  constexpr int kRowOperands = kChannelGate ? 3 : 2;  // q, k and gates; loops, so that their code exists once
  const std::int64_t key_head = p.key_head(block.value_head);
#pragma unroll 1
  for (int which = 0; which < kRowOperands; ++which) {
    const RowsView view = which == 0   ? rows_of(p.q, block, key_head, access.q, p.key_dim)
                          : which == 1 ? rows_of(p.k, block, key_head, access.k, p.key_dim)
                                       : rows_of(p.log_decay, block, block.value_head, access.decay, p.key_dim);
    start_rows<kPerLane>(view, padded_tokens, which == 0 ? shared.q : which == 1 ? shared.k : shared.w);
  }
  load_token_scalars(p, block, padded_tokens, shared.beta, shared.log_decay);
  load_values<P>(p, block, padded_tokens, shared.u);
  wait_for_rows();
#pragma unroll 1
  for (int which = 0; which < kRowOperands; ++which) {
    float* rows = which == 0 ? shared.q : which == 1 ? shared.k : shared.w;
    widen_rows<kPerLane>(which == 2 ? p.log_decay.dtype : p.dtype, padded_tokens, rows);
    if (p.qk_l2norm && which < 2) l2normalize_rows<kPerLane>(padded_tokens, rows);
  }
  if (kChannelGate && p.gate_space != GateSpace::log) {
    activate_gates<kPerLane>(p, block, padded_tokens, shared.w);
  }
  __syncthreads();
}

/// A lane's place in the stepping layout (the first kStepWarps warps): some rows of one column, and the token of a micro-chunk
/// whose sums it receives.
template <class P>
struct LaneRole {
  int lane, token, column;

  // Lanes of neighbouring columns are neighbours: they read the same rows, and a 16-byte shared-memory read serves equal
  // addresses of neighbouring lanes at once.
  __device__ LaneRole() {
    lane = threadIdx.x % kWarpSize;
    token = lane / P::kColumnLanes;
    column = threadIdx.x / kWarpSize * P::kColumnLanes + lane % P::kColumnLanes;
  }
  /// Four neighbouring rows a lane, then the next group: 16-byte reads of neighbouring row lanes touch neighbouring banks.
  __device__ int row(int r) const { return r / 4 * (4 * P::kRowLanes) + token * 4 + r % 4; }
  /// The lane that receives token j's sums of the same column.
  __device__ int lane_of(int j) const { return j * P::kColumnLanes + lane % P::kColumnLanes; }
};

/// A sum as another block left it, parts `stride` floats apart.
template <class Sum>
__device__ __forceinline__ Sum take_over(const float* at, int stride) {
  Sum sum;
#pragma unroll
  for (int part = 0; part < Sum::kParts; ++part) sum.part(part) = __ldcg(at + part * stride);
  return sum;
}
template <class Sum>
__device__ __forceinline__ void hand_on(const Sum& sum, float* at, int stride) {
#pragma unroll
  for (int part = 0; part < Sum::kParts; ++part) __stcg(at + part * stride, sum.part(part));
}

/// The chain's slot in the hand-off memory: element `index` of this thread, neighbouring threads' side by side.
template <class P>
__device__ __forceinline__ float* handoff_element(float* slot, int index) {
  return slot + index * (P::kStepWarps * kWarpSize) + threadIdx.x;
}

template <class P>
__device__ void load_state(const Problem& p, const Block& block, const LaneRole<P>& role, float* handoff,
                           typename P::Tile& state) {
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    typename P::Sum cell;
    if (!block.first_run) {
      cell = take_over<typename P::Sum>(handoff_element<P>(handoff, r), P::kKeyTile * P::kSlice);
    } else if (p.initial_state.present && role.row(r) < p.key_dim && role.column < block.columns) {
      cell.set(p.initial_state.load(
          p.initial_state.offset(block.sequence, block.value_head, role.row(r), block.first_column + role.column)));
    }
    state.cell[r][0] = cell;
  }
}

template <class P>
__device__ void store_state(const Problem& p, const Block& block, const LaneRole<P>& role, float* handoff,
                            const typename P::Tile& state) {
#pragma unroll
  for (int r = 0; r < P::kRows; ++r) {
    const typename P::Sum& cell = state.cell[r][0];
    if (!block.last_run) {
      hand_on(cell, handoff_element<P>(handoff, r), P::kKeyTile * P::kSlice);
    } else if (p.final_state.present && role.row(r) < p.key_dim && role.column < block.columns) {
      p.final_state.store(
          p.final_state.offset(block.sequence, block.value_head, role.row(r), block.first_column + role.column),
          cell.value());
    }
  }
}

/// S^T x_i of this lane's column, for the lane's token i, summed over the column's lanes; x are the micro-chunk's 8 vectors. One
/// result for each of `vectors`: several products at once hide each other's latency.
template <class P, int kProducts>
__device__ __forceinline__ void multiply_state(const typename P::Tile& state, const LaneRole<P>& role,
                                               const float* const (&vectors)[kProducts], float (&result)[kProducts]) {
  float partial[kProducts][kMicroChunk][1] = {};
#pragma unroll
  for (int r = 0; r < P::kRows; r += 4) {
#pragma unroll
    for (int product = 0; product < kProducts; ++product) {
#pragma unroll
      for (int i = 0; i < kMicroChunk; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(vectors[product] + i * P::kKeyTile + role.row(r));
        accumulate_product(state, r, x.x, partial[product][i]);
        accumulate_product(state, r + 1, x.y, partial[product][i]);
        accumulate_product(state, r + 2, x.z, partial[product][i]);
        accumulate_product(state, r + 3, x.w, partial[product][i]);
      }
    }
  }
#pragma unroll
  for (int product = 0; product < kProducts; ++product) {
    float sums[kMicroChunk];
#pragma unroll
    for (int i = 0; i < kMicroChunk; ++i) sums[i] = partial[product][i][0];
    result[product] = spread_sum<P::kRowLanes, P::kColumnLanes>(sums, role.lane);
  }
}

/// Stage B. S <- Diag(b_7) S + sum_j R_j u_j^T.
template <class P>
__device__ __forceinline__ void advance(const MicroChunkView& chunk, const LaneRole<P>& role,
                                        const float (&u)[kMicroChunk][1], typename P::Tile& state) {
#pragma unroll
  for (int r = 0; r < P::kRows; r += 4) {
    const float* end = chunk.decay_end;
    const bool channel = P::kGate == Gate::channel;
    const float4 b =
        channel ? *reinterpret_cast<const float4*>(end + role.row(r)) : make_float4(*end, *end, *end, *end);
    decay(state, r, b.x);
    decay(state, r + 1, b.y);
    decay(state, r + 2, b.z);
    decay(state, r + 3, b.w);
#pragma unroll
    for (int j = 0; j < kMicroChunk; ++j) {
      const float4 key = *reinterpret_cast<const float4*>(chunk.k + j * P::kKeyTile + role.row(r));
      accumulate(state, r, key.x, u[j]);
      accumulate(state, r + 1, key.y, u[j]);
      accumulate(state, r + 2, key.z, u[j]);
      accumulate(state, r + 3, key.w, u[j]);
    }
  }
}

/// Stage D. u = U - S^T W: the corrections of all 8 tokens in this lane's column. `predicted` is S^T W of the lane's own token; beta
/// is inside U and W already. Tokens past the end contribute nothing, whatever the state holds.
template <class P>
__device__ __forceinline__ void correct_micro_chunk(const MicroChunkView& chunk, int tokens, const LaneRole<P>& role,
                                                    float predicted, float (&u)[kMicroChunk][1]) {
  const float value = chunk.u[role.token * P::kColumnStride + role.column];
  const float own = role.token < tokens ? correct<P::kUpdate>(value, predicted, 1.0f) : 0.0f;
#pragma unroll
  for (int j = 0; j < kMicroChunk; ++j) u[j][0] = __shfl_sync(kFullWarp, own, role.lane_of(j));
}

/// Stage C. o = S^T Q + A u of the lane's token and column; `product` is S^T Q with the state before the micro-chunk.
template <class P>
__device__ __forceinline__ float read_out(const MicroChunkView& chunk, const LaneRole<P>& role, float product,
                                          const float (&u)[kMicroChunk][1]) {
  const float* row = chunk.a_matrix + role.token * kMicroChunk;
  const float4 low = *reinterpret_cast<const float4*>(row), high = *reinterpret_cast<const float4*>(row + 4);
  const float weights[kMicroChunk] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  float o = product;
#pragma unroll
  for (int j = 0; j < kMicroChunk; ++j) {
    // Later tokens are left out, not multiplied by zero: their values may be anything.
    const float with_token = o + weights[j] * u[j][0];
    o = j <= role.token ? with_token : o;
  }
  return o;
}

/// Stages D, C and B over one micro-chunk. The read-outs stay in shared memory in place of U.
template <class P>
__device__ __forceinline__ void step_micro_chunk(const MicroChunkView& chunk, int tokens, const LaneRole<P>& role,
                                                 typename P::Tile& state) {
  float predicted = 0.0f, product = 0.0f;
  if constexpr (P::kUpdate == Update::delta) {
    float results[2];
    multiply_state<P>(state, role, {chunk.w, chunk.q}, results);
    predicted = results[0];
    product = results[1];
  } else {
    float results[1];
    multiply_state<P>(state, role, {chunk.q}, results);
    product = results[0];
  }
  float u[kMicroChunk][1];
  correct_micro_chunk<P>(chunk, tokens, role, predicted, u);
  chunk.u[role.token * P::kColumnStride + role.column] = read_out<P>(chunk, role, product, u);
  advance<P>(chunk, role, u, state);
}

/// The normaliser of the run, by one warp: denominators z^T q of every token, z handed on like the state.
template <class P>
__device__ void normalize_run(const Problem& p, const Block& block, const SharedRun<P>& shared, int micro_chunks,
                              float* handoff) {
  constexpr int kPerLane = P::kKeyTile / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  typename P::Sum z[kPerLane];
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) {
    const int channel = e * kWarpSize + lane;
    if (!block.first_run) {
      z[e] = take_over<typename P::Sum>(handoff + channel, P::kKeyTile);
    } else if (p.initial_normalizer.present && channel < p.key_dim) {
      z[e].set(p.initial_normalizer.load(p.initial_normalizer.offset(block.sequence, block.value_head, channel)));
    }
  }
  for (int m = 0; m < micro_chunks; ++m) {
    const MicroChunkView chunk = shared.micro_chunk(m, 0);
    for (int i = 0; i < kMicroChunk; ++i) {
      float part = 0.0f;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) part += z[e].value() * chunk.q[i * P::kKeyTile + e * kWarpSize + lane];
      if (lane <= i && lane < kMicroChunk) part += chunk.a_matrix[i * kMicroChunk + lane];
      const float denominator = warp_sum(part);
      if (lane == 0) shared.denominator[m * kMicroChunk + i] = denominator;
    }
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      z[e].scale(chunk.decay_end[P::kGate == Gate::channel ? e * kWarpSize + lane : 0]);
      for (int j = 0; j < kMicroChunk; ++j) z[e].add(chunk.k[j * P::kKeyTile + e * kWarpSize + lane]);
    }
  }
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) {
    const int channel = e * kWarpSize + lane;
    if (!block.last_run) {
      hand_on(z[e], handoff + channel, P::kKeyTile);
    } else if (p.final_normalizer.present && block.first_column == 0 && channel < p.key_dim) {
      p.final_normalizer.store(p.final_normalizer.offset(block.sequence, block.value_head, channel), z[e].value());
    }
  }
}

/// o = scale * numerator [/ denominator], neighbouring columns by neighbouring threads.
template <class P>
__device__ void store_outputs(const Problem& p, const Block& block, const SharedRun<P>& shared) {
  for (int i = threadIdx.x; i < block.tokens * P::kSlice; i += kThreads) {
    const int t = i / P::kSlice, column = i % P::kSlice;
    if (column >= block.columns) continue;
    float o = p.scale * shared.u[t * P::kColumnStride + column];
    if (p.normalize) o /= shared.denominator[t];
    p.out.store(p.out.offset(block.batch, block.first_token + t, block.value_head) + block.first_column + column, o);
  }
}

/// Micro-chunks that hold the block's tokens.
__device__ __forceinline__ int micro_chunks_of(const Block& block) {
  return (block.tokens + kMicroChunk - 1) / kMicroChunk;
}

/// Run `index` of a sequence, in runs of `run_tokens`; `chain` counts the slices of value head 0, then those of head 1, and so on.
template <class P>
__device__ __forceinline__ Block block_of(const Problem& p, std::int64_t sequence_index, std::int64_t index,
                                          int run_tokens, std::int64_t chain, std::int64_t slices) {
  const Sequence sequence = p.sequence(sequence_index);
  const std::int64_t start = index * run_tokens;
  const std::int64_t left = sequence.length - start;
  const std::int64_t first_column = chain % slices * P::kSlice;
  Block block;
  block.sequence = sequence_index;
  block.batch = sequence.batch;
  block.first_token = sequence.begin + start;
  block.tokens = static_cast<int>(left < run_tokens ? left : run_tokens);
  block.value_head = chain / slices;
  block.first_column = first_column;
  block.columns = static_cast<int>(p.value_dim - first_column < P::kSlice ? p.value_dim - first_column : P::kSlice);
  block.first_run = index == 0;
  block.last_run = left <= run_tokens;
  return block;
}

/// Everything that needs no state: what a block does before it waits.
template <class P>
__device__ __forceinline__ void prepare_run(const Problem& p, const RowAccess& access, const Block& block,
                                            const SharedRun<P>& shared) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, micro_chunks = micro_chunks_of(block);
  load_run(p, access, block, micro_chunks * kMicroChunk, shared);
  for (int m = warp; m < micro_chunks; m += kWarps) {
    prepare_micro_chunk<P::kUpdate, P::kGate, P::kKeyTile, P::kSlice, P::kColumnStride>(shared.micro_chunk(m, warp),
                                                                                        lane);
  }
  __syncthreads();
}

/// Takes the state over, steps it over the run and leaves it behind. `handoff` is the chain's slot: a state slice, then the
/// normaliser. By reference, so that a block that keeps it in shared memory reads it before and after, and has the register between.
template <class P>
__device__ __forceinline__ void step_run(const Problem& p, const Block& block, const SharedRun<P>& shared,
                                         float* const& handoff) {
  const int warp = threadIdx.x / kWarpSize, micro_chunks = micro_chunks_of(block);
  if (p.normalize && warp == kWarps - 1) normalize_run(p, block, shared, micro_chunks, handoff + P::kStateFloats);
  if (warp >= P::kStepWarps) return;
  const LaneRole<P> role;
  typename P::Tile state;
  load_state<P>(p, block, role, handoff, state);
  for (int m = 0; m < micro_chunks; ++m) {
    step_micro_chunk<P>(shared.micro_chunk(m, warp), block.tokens - m * kMicroChunk, role, state);
  }
  store_state<P>(p, block, role, handoff, state);
}

}  // namespace delta_attention::chunk_pipeline_stages
