#pragma once

// The device code of absorbed MLA: what mla_decode.cu tells the story of. Apart from it, so that host threads can run it.

#include <cmath>
#include <cstdint>

#include "cuda/device/warp.cuh"
#include "cuda/softmax/splits.cuh"
#include "problem/mla_problem.h"

namespace delta_attention::mla {

constexpr int kThreads = 256;
constexpr int kRows = 16;         // of a block: heads of one row of q, or of several
constexpr int kKeys = 16;         // of a tile
constexpr int kParts = 4;         // lanes that share a dot product
constexpr int kMostLatent = 512;  // value channels: two a thread
constexpr int kColumns = kMostLatent / kThreads;
constexpr int kAbsorbedRows = 8;  // rows of q that a pass over W serves
static_assert(kRows * kKeys == kThreads, "a thread owns one score");
static_assert(kRows * kKeys / 4 * kParts == kThreads, "a thread multiplies two rows with two keys");

struct Params {
  MlaProblem problem;
  Partials partials;
  float* queries;  // [B,Nq,H,L+R]: absorbed
};

constexpr int kRowPad = 16;  // floats

/// Floats of a row in shared memory: an odd number of half bank rows, so that the four lanes of a product and their neighbours at the next
/// key read 32 banks.
__host__ __device__ __forceinline__ int padded_channels(const MlaProblem& p) {
  return static_cast<int>(ceil_div(p.channels(), 2 * kRowPad)) * 2 * kRowPad + kRowPad;
}
__host__ __device__ __forceinline__ int shared_floats(const MlaProblem& p) {
  return (kRows + kKeys) * padded_channels(p) + kRows * kKeys + kRows;
}

struct Shared {
  int stride;
  float *queries, *keys;     // [kRows][stride], [kKeys][stride]
  float *weights, *factors;  // [kRows][kKeys], [kRows]

  __device__ __forceinline__ Shared(const MlaProblem& p, float* memory)
      : stride(padded_channels(p)),
        queries(memory),
        keys(queries + kRows * stride),
        weights(keys + kKeys * stride),
        factors(weights + kRows * kKeys) {}
};

/// t[r] = sum_d W_dl q_d of kAbsorbedRows rows of q that start at `starts`.
__device__ __forceinline__ void project(const MlaProblem& p, std::int64_t head, std::int64_t channel,
                                        const std::int64_t (&starts)[kAbsorbedRows], float (&t)[kAbsorbedRows]) {
  for (std::int64_t d = 0; d < p.nope_dim; ++d) {
    const float w = p.w_uk.load(p.w_uk.offset(head, d, channel));
#pragma unroll
    for (int r = 0; r < kAbsorbedRows; ++r) t[r] += w * p.q_nope.load(starts[r] + d);
  }
}

/// What a row's query has in this thread's channel, for one head and every row of q: W^T q_nope or, from channel L on, q_rope. W is read
/// once for kAbsorbedRows rows.
__device__ __forceinline__ void absorb_channel(const Params& params, std::int64_t head, std::int64_t channel) {
  const MlaProblem& p = params.problem;
  const SoftmaxProblem& a = p.attention;
  if (channel >= p.channels()) return;
  const bool is_latent = channel < a.head_dim;
  const InputOperand& q = is_latent ? p.q_nope : p.q_rope;
  const int all_rows = static_cast<int>(p.rows()), queries = static_cast<int>(a.queries);
  for (int first = 0; first < all_rows; first += kAbsorbedRows) {
    std::int64_t starts[kAbsorbedRows];
#pragma unroll
    for (int r = 0; r < kAbsorbedRows; ++r) {
      const int row = first + r < all_rows ? first + r : first;  // past the end: a row again, not written
      starts[r] = q.offset(row / queries, row % queries, head);
    }
    float t[kAbsorbedRows] = {};
    if (is_latent) project(p, head, channel, starts, t);
#pragma unroll
    for (int r = 0; r < kAbsorbedRows; ++r) {
      if (first + r >= all_rows) continue;
      const float x = is_latent ? t[r] : q.load(starts[r] + channel - a.head_dim);
      params.queries[((first + r) * a.heads + head) * p.channels() + channel] = x;
    }
  }
}

/// What a block works on: rows [first_row, first_row + rows) of Nq * H of one sequence, and part `split` of its keys.
struct Block {
  std::int64_t n;
  SequencePair sequence;
  int first_row, rows, split, heads;
  int begin, end;  // keys
};

__device__ __forceinline__ std::int64_t row_tiles(const SoftmaxProblem& a) { return ceil_div(a.queries * a.heads, kRows); }

__device__ __forceinline__ Block block_of(const Params& params, std::int64_t index) {
  const SoftmaxProblem& a = params.problem.attention;
  const int all_rows = static_cast<int>(a.queries * a.heads);
  Block block;
  block.heads = static_cast<int>(a.heads);
  block.first_row = static_cast<int>(index % row_tiles(a)) * kRows;
  block.split = static_cast<int>(index / row_tiles(a) % params.partials.splits);
  block.n = index / row_tiles(a) / params.partials.splits;
  block.sequence = a.sequence(block.n);
  block.rows = all_rows - block.first_row < kRows ? all_rows - block.first_row : kRows;
  const std::int64_t keys = a.visible(block.sequence, (block.first_row + block.rows - 1) / block.heads).end;  // the last row's
  const std::int64_t share = ceil_div(ceil_div(keys, kKeys), params.partials.splits) * kKeys;
  const std::int64_t begin = share * block.split, end = begin + share;
  block.begin = static_cast<int>(begin < keys ? begin : keys);
  block.end = static_cast<int>(end < keys ? end : keys);
  return block;
}

/// Absorbed queries of the block; 0 where a row or channel does not exist.
__device__ __forceinline__ void load_queries(const Params& params, const Block& block, const Shared& shared) {
  const MlaProblem& p = params.problem;
  const SoftmaxProblem& a = p.attention;
  const float* from = params.queries + (block.n * a.queries * a.heads + block.first_row) * p.channels();
  for (int row = 0; row < kRows; ++row) {
    for (int c = threadIdx.x; c < shared.stride; c += kThreads) {
      shared.queries[row * shared.stride + c] = row < block.rows && c < p.channels() ? from[row * p.channels() + c] : 0.0f;
    }
  }
}

/// A tile of the cache as f32; 0 where a key or channel does not exist.
__device__ __forceinline__ void load_keys(const Params& params, const Block& block, int first_key, const Shared& shared) {
  const MlaProblem& p = params.problem;
  const InputOperand& cache = p.attention.k;
#pragma unroll 4
  for (int key = 0; key < kKeys; ++key) {
    for (int c = threadIdx.x; c < shared.stride; c += kThreads) {
      const bool exists = first_key + key < block.end && c < p.channels();
      shared.keys[key * shared.stride + c] = exists ? cache.load(cache.offset(block.n, first_key + key, 0, c)) : 0.0f;
    }
  }
}

/// Dot products of all rows with all keys of the tile: a thread has two rows, two keys and every fourth piece of the channels.
__device__ __forceinline__ void multiply(const Shared& shared) {
  const int part = threadIdx.x % kParts, pair = threadIdx.x / kParts;
  const int row = pair / (kKeys / 2) * 2, key = pair % (kKeys / 2);  // and the next row; and the key half a tile on
  float product[2][2] = {};
#pragma unroll 2
  for (int c = part * 4; c < shared.stride - kRowPad; c += 4 * kParts) {
    float4 q[2], k[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      q[i] = *reinterpret_cast<const float4*>(shared.queries + (row + i) * shared.stride + c);
      k[i] = *reinterpret_cast<const float4*>(shared.keys + (key + i * kKeys / 2) * shared.stride + c);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) product[i][j] += q[i].x * k[j].x + q[i].y * k[j].y + q[i].z * k[j].z + q[i].w * k[j].w;
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum = product[i][j];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (part == 0) shared.weights[(row + i) * kKeys + key + j * kKeys / 2] = sum;
    }
  }
}

/// The score that this thread owns: its weight, and what its row's sums are to be multiplied with. Sixteen neighbours have one row.
__device__ __forceinline__ void weigh(const Params& params, const Block& block, int first_key, const Shared& shared,
                                      RunningSoftmax& running) {
  const SoftmaxProblem& a = params.problem.attention;
  const int row = threadIdx.x / kKeys, key = first_key + static_cast<int>(threadIdx.x) % kKeys;
  const int query = (block.first_row + row) / block.heads;
  const bool sees = row < block.rows && key < block.end && key < a.visible(block.sequence, query).end;
  const float score = sees ? a.scale * shared.weights[threadIdx.x] : -INFINITY;
  float max = fmaxf(running.max, score);
#pragma unroll
  for (int step = 1; step < kKeys; step *= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
  const float factor = rescaling(running.max, max), weighed = weight(score, max);
  running = {max, running.sum * factor + weighed};
  shared.weights[threadIdx.x] = weighed;
  if (threadIdx.x % kKeys == 0) shared.factors[row] = factor;
}

/// This thread's value channels, threadIdx.x and so on, of every row.
__device__ __forceinline__ void add_values(const Params& params, const Shared& shared, float (&sum)[kRows][kColumns]) {
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sum[row][i] *= shared.factors[row];
  }
#pragma unroll 1
  for (int key = 0; key < kKeys; key += 4) {
    float v[4][kColumns];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        const int channel = static_cast<int>(threadIdx.x) + i * kThreads;
        v[j][i] = channel < params.problem.attention.head_dim ? shared.keys[(key + j) * shared.stride + channel] : 0.0f;
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float4 w = *reinterpret_cast<const float4*>(shared.weights + row * kKeys + key);
#pragma unroll
      for (int i = 0; i < kColumns; ++i) sum[row][i] += w.x * v[0][i] + w.y * v[1][i] + w.z * v[2][i] + w.w * v[3][i];
    }
  }
}

/// The block's rows: into the outputs, or into the workspace where other blocks have the rest of the keys.
__device__ __forceinline__ void store_rows(const Params& params, const Block& block, const RunningSoftmax& running, const Shared& shared,
                                           const float (&sum)[kRows][kColumns]) {
  const SoftmaxProblem& a = params.problem.attention;
  auto* stats = reinterpret_cast<RunningSoftmax*>(shared.keys);
  RunningSoftmax all = running;
#pragma unroll
  for (int step = 1; step < kKeys; step *= 2) all.sum += __shfl_xor_sync(kFullWarp, all.sum, step);
  if (threadIdx.x % kKeys == 0) stats[threadIdx.x / kKeys] = all;
  __syncthreads();
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    if (row >= block.rows) continue;
    const int query = (block.first_row + row) / block.heads, head = (block.first_row + row) % block.heads;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int channel = static_cast<int>(threadIdx.x) + i * kThreads;
      if (channel >= a.head_dim) continue;
      store_split(a, params.partials, block.split, block.n, query, head, channel, sum[row][i], stats[row]);
    }
  }
}

/// All that a block does.
__device__ __forceinline__ void decode_block(const Params& params, std::int64_t index, float* memory) {
  const Shared shared(params.problem, memory);
  const Block block = block_of(params, index);
  RunningSoftmax running;
  float sum[kRows][kColumns] = {};
  load_queries(params, block, shared);
#pragma unroll 1
  for (int first_key = block.begin; first_key < block.end; first_key += kKeys) {
    load_keys(params, block, first_key, shared);
    __syncthreads();
    multiply(shared);
    __syncthreads();
    weigh(params, block, first_key, shared, running);
    __syncthreads();
    add_values(params, shared, sum);
    __syncthreads();
  }
  store_rows(params, block, running, shared, sum);
}

}  // namespace delta_attention::mla
