#pragma once

// What the on-chip kernels compute before the chain starts (on_chip_kernel.cuh tells the story): for every micro-chunk, everything
// that needs no state, all micro-chunks of all heads side by side. With b_i the decay from the start of the micro-chunk to token i and
// d_ij = b_i / b_j as a product of decays, never a quotient:
//     W_i = beta_i (b_i k_i - sum_{j<i} <k_i, d_ij k_j> W_j)      U_i = beta_i (v_i - sum_{j<i} <k_i, d_ij k_j> U_j)
//     Q_i = b_i q_i       A_ij = <q_i, d_ij k_j>, j <= i       R_j = d_Fj k_j       b_F
// so that a step is u = U - S^T W, o = S^T Q + A u, S <- Diag(b_F) S + R u^T. (The additive update has W = 0, U_i = beta_i v_i.)

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "state/gate.h"
#include "state/state_update.h"

namespace delta_attention::on_chip {

constexpr int kPrepareThreads = 256;

/// Which lanes fetch what while preparing.
enum class Lanes {
  channels,  // neighbouring lanes read neighbouring channels of a token
  tokens,    // neighbouring lanes read neighbouring tokens: every access a transaction of its own
};

/// Where a micro-chunk's factors lie, in floats from its start: for each row block of the chain one piece of memory, then U and A.
struct FactorLayout {
  int flush, row_blocks, row_tile, value_columns;  // rows and columns padded to whole 16-byte pieces

  __host__ __device__ int key_rows() const { return row_blocks * row_tile; }
  __host__ __device__ int block_floats() const { return row_tile * (3 * flush + 1); }
  // Inside a row block, for its row r:
  __host__ __device__ int vectors(int r) const { return r * 2 * flush; }                     // [2F]  W, then Q
  __host__ __device__ int keys(int r) const { return row_tile * 2 * flush + r * flush; }     // [F]  R
  __host__ __device__ int decay_end(int r) const { return row_tile * 3 * flush + r; }        // b_F
  __host__ __device__ int values() const { return row_blocks * block_floats(); }             // [F][value_columns]  U
  __host__ __device__ int products() const { return values() + flush * value_columns; }      // [F][F]  A
  __host__ __device__ int floats() const { return products() + (flush * flush + 3) / 4 * 4; }
};

/// Micro-chunks of a sequence lie one after another; this is the first one's place. Sequences of a packed batch get places from their
/// offsets alone: floor(begin / F) + n never reaches into the next sequence's.
__host__ __device__ inline std::int64_t first_micro_chunk(const Problem& p, const Sequence& sequence, std::int64_t n,
                                                          int flush) {
  return p.cu_seqlens.present ? sequence.begin / flush + n : n * ceil_div(p.tokens, flush);
}
inline std::int64_t most_micro_chunks(const Problem& p, int flush) {
  return p.cu_seqlens.present ? p.tokens / flush + p.sequences : p.sequences * ceil_div(p.tokens, flush);
}

struct PrepareParams {
  Problem problem;
  FactorLayout layout;
  Lanes lanes;
  bool decays;  // false only for the diagnostic that must be found out
  float* factors;
};

/// The micro-chunk that a block prepares.
struct MicroChunk {
  std::int64_t batch, token, value_head;
  int tokens;  // that exist; 0: nothing to do
};

/// The last sequence whose first place is not after `place`.
template <int kFlush>
__device__ __forceinline__ MicroChunk micro_chunk_at(const Problem& p, std::int64_t place, std::int64_t value_head) {
  std::int64_t low = 0, high = p.sequences - 1;
  while (low < high) {
    const std::int64_t middle = (low + high + 1) / 2;
    if (first_micro_chunk(p, p.sequence(middle), middle, kFlush) <= place) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const Sequence sequence = p.sequence(low);
  const std::int64_t first = (place - first_micro_chunk(p, sequence, low, kFlush)) * kFlush;
  const std::int64_t left = sequence.length - first;
  return {sequence.batch, sequence.begin + first, value_head,
          static_cast<int>(left < 0 ? 0 : left < kFlush ? left : kFlush)};
}

template <int kFlush>
struct PreparedRows {
  float *k, *q, *decay, *since_start;  // [F][key_rows]; scalar gates [F]
  float *keys;                         // [F][key_rows]  R
  float *key_products;                 // [F][F]  <k_i, d_ij k_j> at [i][j]
  float *query_products;               // [F][F]  A
  float *beta;                         // [F]

  static std::size_t floats(int key_rows) { return static_cast<std::size_t>(kFlush) * (5 * key_rows + 2 * kFlush + 1); }

  __device__ PreparedRows(float* memory, int key_rows) {
    k = memory;
    q = k + kFlush * key_rows;
    decay = q + kFlush * key_rows;
    since_start = decay + kFlush * key_rows;
    keys = since_start + kFlush * key_rows;
    key_products = keys + kFlush * key_rows;
    query_products = key_products + kFlush * kFlush;
    beta = query_products + kFlush * kFlush;
  }
};

/// Elements that a thread has under way at once.
constexpr int kAtOnce = 4;

/// A thread's elements of [F][width]: token and channel of the first, and the steps from one to the next.
template <int kFlush>
struct Walk {
  int token, channel, token_step, channel_step;

  __device__ __forceinline__ Walk(Lanes lanes, int width) {
    const int thread = threadIdx.x;
    if (lanes == Lanes::tokens) {
      token = thread % kFlush, channel = thread / kFlush;
      token_step = 0, channel_step = kPrepareThreads / kFlush;
    } else if (width <= kPrepareThreads) {
      token = thread / width, channel = thread % width;
      token_step = kPrepareThreads / width, channel_step = 0;
      if (token >= token_step) token = kFlush;  // the last threads, where rows do not divide the block
    } else {
      token = 0, channel = thread;
      token_step = 0, channel_step = kPrepareThreads;
    }
  }
  __device__ __forceinline__ bool inside(int width) const { return token < kFlush && channel < width; }
  __device__ __forceinline__ void next(int width) {
    token += token_step;
    channel += channel_step;
    if (token_step == 0 && channel_step == kPrepareThreads && channel >= width && token + 1 < kFlush) {
      channel = threadIdx.x;  // rows longer than the block: on to the next
      ++token;
    }
  }
};

/// change(x, token, channel) for [F][width] elements as f32, 0 for those that do not exist. Neighbouring lanes are on what `lanes` says.
template <int kFlush, class Element, class Change>
__device__ __forceinline__ void load_tokens_of(Lanes lanes, const InputOperand& operand, std::int64_t start, int tokens,
                                               int channels, int width, const Change& change) {
  const auto* from = static_cast<const Element*>(operand.data) + start;
  Walk<kFlush> load(lanes, width), use(lanes, width);
#pragma unroll 1
  while (use.inside(width)) {
    Element element[kAtOnce];
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n, load.next(width)) {
      const bool exists = load.token < tokens && load.channel < channels;
      element[n] = exists ? from[load.token * operand.strides[1] + load.channel] : from_float<Element>(0.0f);
    }
#pragma unroll
    for (int n = 0; n < kAtOnce; ++n, use.next(width)) {
      if (use.inside(width)) change(to_float(element[n]), use.token, use.channel);
    }
  }
}
template <int kFlush, class Change>
__device__ __forceinline__ void load_tokens(Lanes lanes, const InputOperand& operand, std::int64_t start, int tokens,
                                            int channels, int width, const Change& change) {
  switch (operand.dtype) {
    case DType::f16: return load_tokens_of<kFlush, Half>(lanes, operand, start, tokens, channels, width, change);
    case DType::bf16: return load_tokens_of<kFlush, BFloat16>(lanes, operand, start, tokens, channels, width, change);
    default: return load_tokens_of<kFlush, float>(lanes, operand, start, tokens, channels, width, change);
  }
}

/// q, k, decays and beta, as f32; tokens past the end and channels past K become neutral.
template <int kFlush>
__device__ void load_rows(const PrepareParams& params, const MicroChunk& chunk, const PreparedRows<kFlush>& rows) {
  const Problem& p = params.problem;
  const int width = params.layout.key_rows(), channels = static_cast<int>(p.key_dim);
  const std::int64_t key_head = p.key_head(chunk.value_head);
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const InputOperand& operand = which == 0 ? p.q : p.k;
    float* to = which == 0 ? rows.q : rows.k;
    load_tokens<kFlush>(params.lanes, operand, operand.offset(chunk.batch, chunk.token, key_head), chunk.tokens, channels,
                        width, [&](float x, int token, int channel) { to[token * width + channel] = x; });
  }
  const DecayReader decays(p, chunk.value_head);
  if (p.gate == Gate::channel) {
    load_tokens<kFlush>(params.lanes, p.log_decay, p.log_decay.offset(chunk.batch, chunk.token, chunk.value_head),
                        chunk.tokens, channels, width, [&](float x, int token, int channel) {
                          const bool inside = token < chunk.tokens && channel < channels && params.decays;
                          const float g = !inside                            ? 0.0f
                                          : p.gate_space == GateSpace::log ? x
                                                                             : decays.log_decay(x, channel);
                          rows.since_start[token * width + channel] = g;
                          rows.decay[token * width + channel] = expf(g);
                        });
  }
  if (threadIdx.x < kFlush) {
    const int token = threadIdx.x;
    const bool inside = token < chunk.tokens;
    rows.beta[token] = inside ? load_beta(p, chunk.batch, chunk.token + token, chunk.value_head) : 0.0f;
    if (p.gate != Gate::channel) {
      const bool gated = inside && p.gate == Gate::scalar && params.decays;
      const float g = gated ? decays.log_decay(decays.load(chunk.batch, chunk.token + token, 0), 0) : 0.0f;
      rows.since_start[token] = g;
      rows.decay[token] = expf(g);
    }
  }
  __syncthreads();
}

/// x / sqrt(sum x^2 + eps) for every row of k and q, a warp a row.
template <int kFlush>
__device__ __forceinline__ void l2normalize(int width, const PreparedRows<kFlush>& rows) {
  for (int r = threadIdx.x / kWarpSize; r < 2 * kFlush; r += kPrepareThreads / kWarpSize) {
    float* x = r < kFlush ? rows.k + r * width : rows.q + (r - kFlush) * width;
    float square = 0.0f;
    for (int i = threadIdx.x % kWarpSize; i < width; i += kWarpSize) square += x[i] * x[i];
    const float factor = l2norm_factor(warp_sum(square));
    for (int i = threadIdx.x % kWarpSize; i < width; i += kWarpSize) x[i] *= factor;
  }
  __syncthreads();
}

/// From a_i: b_i, their running product, and b_F from the sum of logarithms, which is closer. A thread a row, or one for all rows.
template <int kFlush>
__device__ __forceinline__ void accumulate_decays(bool channel_gate, const FactorLayout& layout,
                                                  const PreparedRows<kFlush>& rows, float* factors) {
  const int width = layout.key_rows();
  const int own = channel_gate ? width : 1;
  for (int row = threadIdx.x; row < width; row += kPrepareThreads) {
    const int from = channel_gate ? row : 0;
    float product = 1.0f, log_product = 0.0f, products[kFlush];
#pragma unroll
    for (int i = 0; i < kFlush; ++i) {
      log_product += rows.since_start[i * own + from];
      product *= rows.decay[i * own + from];
      products[i] = product;
    }
    const int block = row / layout.row_tile;
    factors[block * layout.block_floats() + layout.decay_end(row % layout.row_tile)] = exp_decay(log_product);
    if (channel_gate) {
#pragma unroll
      for (int i = 0; i < kFlush; ++i) rows.since_start[i * own + from] = products[i];
    }
  }
  if (!channel_gate) {
    __syncthreads();
    if (threadIdx.x == 0) {
      float product = 1.0f;
      for (int i = 0; i < kFlush; ++i) rows.since_start[i] = product *= rows.decay[i];
    }
  }
  __syncthreads();
}

/// Products of every key, decayed to each later token i, with k_i (the first four warps) and q_i (the others), and what is left of the
/// key at the end. 8 lanes a key j, each with four of every 32 rows.
template <int kFlush>
__device__ __forceinline__ void multiply_keys(bool channel_gate, int width, const PreparedRows<kFlush>& rows) {
  constexpr int kLanes = 8, kWarpsAside = kPrepareThreads / kWarpSize / 2;
  const int warp = threadIdx.x / kWarpSize;
  const bool with_queries = warp >= kWarpsAside;
  const int first_j = warp % kWarpsAside * (kWarpSize / kLanes);  // of the warp
  if (first_j >= kFlush) return;
  const int lane = threadIdx.x % kLanes, j = first_j + threadIdx.x % kWarpSize / kLanes;
  const float* others = with_queries ? rows.q : rows.k;
  float products[kFlush] = {};
  for (int row = 4 * lane; row < width; row += 4 * kLanes) {
    const auto four_of = [&](const float* x, int i) { return *reinterpret_cast<const float4*>(x + i * width + row); };
    float4 key = j < kFlush ? four_of(rows.k, j) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < kFlush; ++i) {
      if (i < first_j) continue;
      if (i > j) {
        float4 a;
        if (channel_gate) {
          a = four_of(rows.decay, i);
        } else {
          const float one = rows.decay[i];
          a = make_float4(one, one, one, one);
        }
        key.x *= a.x, key.y *= a.y, key.z *= a.z, key.w *= a.w;
      }
      const float4 x = four_of(others, i);
      products[i] += x.x * key.x + x.y * key.y + x.z * key.z + x.w * key.w;
    }
    if (j < kFlush && !with_queries) *reinterpret_cast<float4*>(rows.keys + j * width + row) = key;
  }
  constexpr int kSums = kFlush < kLanes ? 1 : kFlush / kLanes;  // that a lane receives
  float sums[kSums];
  spread_sums<kLanes>(products, lane, sums);
  constexpr int kSharers = kFlush < kLanes ? kLanes / kFlush : 1;  // lanes that receive the same sum
  if (j >= kFlush || lane % kSharers != 0) return;
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
    const int i = lane / kSharers * kSums + n;
    float* products_of = with_queries ? rows.query_products : rows.key_products;
    products_of[i * kFlush + j] = sums[n];
  }
}

/// A row of F numbers in shared memory.
template <int kFlush>
__device__ __forceinline__ void load_row(const float* row, float (&x)[kFlush]) {
  if constexpr (kFlush % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kFlush; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(row + i);
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kFlush; ++i) x[i] = row[i];
  }
}
template <int kFlush>
__device__ __forceinline__ void store_row(float* row, const float (&x)[kFlush]) {
  if constexpr (kFlush % 4 == 0) {
#pragma unroll
    for (int i = 0; i < kFlush; i += 4) {
      *reinterpret_cast<float4*>(row + i) = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kFlush; ++i) row[i] = x[i];
  }
}

/// x_i <- beta_i (x_i - sum_{j<i} <k_i, d_ij k_j> x_j): one row of W or one column of U.
template <int kFlush>
__device__ __forceinline__ void solve(const PreparedRows<kFlush>& rows, float (&x)[kFlush]) {
#pragma unroll
  for (int i = 0; i < kFlush; ++i) {
    float products[kFlush];
    load_row(rows.key_products + i * kFlush, products);
#pragma unroll
    for (int j = 0; j < i; ++j) x[i] -= products[j] * x[j];
    x[i] *= rows.beta[i];
  }
}

/// The rows of W, Q and R, a thread of the first half of the block a row.
template <int kFlush>
__device__ __forceinline__ void store_rows(bool delta, bool channel_gate, const FactorLayout& layout,
                                           const PreparedRows<kFlush>& rows, float* factors) {
  const int width = layout.key_rows();
  for (int row = threadIdx.x; row < width; row += kPrepareThreads / 2) {
    const int block = row / layout.row_tile, r = row % layout.row_tile;
    float* to = factors + block * layout.block_floats();
    float x[kFlush];
#pragma unroll
    for (int i = 0; i < kFlush; ++i) x[i] = rows.keys[i * width + row];
    store_row(to + layout.keys(r), x);
    const auto since_start = [&](int i) { return rows.since_start[channel_gate ? i * width + row : i]; };
#pragma unroll
    for (int i = 0; i < kFlush; ++i) x[i] = since_start(i) * rows.q[i * width + row];
    store_row(to + layout.vectors(r) + kFlush, x);
#pragma unroll
    for (int i = 0; i < kFlush; ++i) x[i] = delta ? since_start(i) * rows.k[i * width + row] : 0.0f;
    if (delta) solve<kFlush>(rows, x);
    store_row(to + layout.vectors(r), x);
  }
}

/// A column of v; 0 for tokens past `tokens`.
template <class Element, int kFlush>
__device__ __forceinline__ void load_column(const Problem& p, std::int64_t at, int tokens, float (&u)[kFlush]) {
  const auto* from = static_cast<const Element*>(p.v.data) + at;
#pragma unroll
  for (int i = 0; i < kFlush; ++i) u[i] = i < tokens ? to_float(from[i * p.v.strides[1]]) : 0.0f;
}

/// The columns of U, a thread of the second half of the block a column.
template <int kFlush>
__device__ __forceinline__ void store_values(const PrepareParams& params, const MicroChunk& chunk,
                                             const PreparedRows<kFlush>& rows, float* factors) {
  const Problem& p = params.problem;
  const int width = params.layout.value_columns;
  const std::int64_t v0 = p.v.offset(chunk.batch, chunk.token, chunk.value_head);
  for (int column = threadIdx.x - kPrepareThreads / 2; column < width; column += kPrepareThreads / 2) {
    float u[kFlush];
    const bool exists = column < p.value_dim;
    switch (p.dtype) {
      case DType::f16: load_column<Half>(p, v0 + column, exists ? chunk.tokens : 0, u); break;
      case DType::bf16: load_column<BFloat16>(p, v0 + column, exists ? chunk.tokens : 0, u); break;
      default: load_column<float>(p, v0 + column, exists ? chunk.tokens : 0, u);
    }
    if (p.update == Update::delta) {
      solve<kFlush>(rows, u);
    } else {
#pragma unroll
      for (int i = 0; i < kFlush; ++i) u[i] *= rows.beta[i];
    }
    float* values = factors + params.layout.values() + column;
#pragma unroll
    for (int i = 0; i < kFlush; ++i) values[i * width] = u[i];
  }
}

/// One block a micro-chunk (x) and value head (y).
template <int kFlush>
static __global__ void __launch_bounds__(kPrepareThreads, 3)
    prepare_micro_chunks(const __grid_constant__ PrepareParams params) {
  extern __shared__ float4 dynamic_shared[];
  const Problem& p = params.problem;
  const PreparedRows<kFlush> rows(reinterpret_cast<float*>(dynamic_shared), params.layout.key_rows());
  const MicroChunk chunk = micro_chunk_at<kFlush>(p, blockIdx.x, blockIdx.y);
  if (chunk.tokens == 0) return;
  const bool channel_gate = p.gate == Gate::channel, delta = p.update == Update::delta;
  float* factors =
      params.factors + (std::int64_t{blockIdx.x} * p.value_heads + blockIdx.y) * params.layout.floats();

  load_rows<kFlush>(params, chunk, rows);
  if (p.qk_l2norm) l2normalize<kFlush>(params.layout.key_rows(), rows);
  accumulate_decays<kFlush>(channel_gate, params.layout, rows, factors);
  multiply_keys<kFlush>(channel_gate, params.layout.key_rows(), rows);
  __syncthreads();
  if (threadIdx.x < kPrepareThreads / 2) {
    store_rows<kFlush>(delta, channel_gate, params.layout, rows, factors);
  } else {
    store_values<kFlush>(params, chunk, rows, factors);
  }
  constexpr int kProducts = kFlush * kFlush, kWithPadding = (kProducts + 3) / 4 * 4;  // the chain copies whole pieces
  for (int i = threadIdx.x; i < kWithPadding; i += kPrepareThreads) {
    factors[params.layout.products() + i] = i < kProducts ? rows.query_products[i] : 0.0f;
  }
}

}  // namespace delta_attention::on_chip
