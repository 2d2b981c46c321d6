// three_stage: attention as three matrix operations with all scores in memory, as a framework without a fused kernel does it.
//
// Algorithm and data flow, a launch each:
//     scores   S = cap(scale Q K^T) + mask, -infinity where a row does not see a key    -> workspace
//     softmax  each row of S becomes weights; log of the sum of exponentials            -> workspace, lse
//     values   O = P V
// Workspace: 4 bytes for every (head, row, key): B H Nq Nkv numbers, which is what ends its use for long sequences.
//
// Roles. scores, values: 16 x 16 threads make a 16 x 16 piece of the product, walking along channels or keys by 16, with both factors' pieces
// in shared memory (2 KB). softmax: a warp a row.
//
// Loses by writing S, reading it, writing P and reading that; shows what fusing is for. Measured: docs/performance.md.

#include "api/architectures.h"
#include "api/softmax_kernel.h"
#include "cuda/device/runtime.h"
#include "cuda/device/warp.cuh"
#include "cuda/softmax/scores.cuh"

namespace delta_attention {
namespace {

constexpr int kTile = 16;
constexpr int kWarps = 4;
constexpr std::int64_t kMostBlocks = 0x7fffffff;

/// One (sequence, head) with its part of the scores [queries][keys].
struct Head {
  std::int64_t sequence, head, key_head;
  SequencePair pair;
  float* scores;
};

__device__ __forceinline__ Head head_of(const SoftmaxProblem& p, std::int64_t number, float* scores) {
  Head h;
  h.sequence = number / p.heads;
  h.head = number % p.heads;
  h.key_head = p.key_head(h.head);
  h.pair = p.sequence(h.sequence);
  h.scores = scores + number * p.queries * p.keys;
  return h;
}

/// Tiles of the grid: `columns` wide, then rows, then heads.
struct TileAt {
  std::int64_t head, row, column;  // of the thread
};
__device__ __forceinline__ TileAt tile_at(std::int64_t row_tiles, std::int64_t column_tiles) {
  const std::int64_t tile = blockIdx.x;
  return {tile / column_tiles / row_tiles, tile / column_tiles % row_tiles * kTile + threadIdx.y, tile % column_tiles * kTile + threadIdx.x};
}

__global__ void __launch_bounds__(kTile* kTile)
    make_scores(const __grid_constant__ SoftmaxProblem p, float* scores, std::int64_t row_tiles, std::int64_t column_tiles) {
  __shared__ float q[kTile][kTile], k[kTile][kTile + 1];
  const TileAt at = tile_at(row_tiles, column_tiles);
  const Head h = head_of(p, at.head, scores);
  const bool row_exists = at.row < h.pair.queries;
  const std::int64_t key_of_row = at.column - threadIdx.x + threadIdx.y;  // the key whose channels this thread brings
  float dot = 0.0f;
  for (std::int64_t first = 0; first < p.head_dim; first += kTile) {
    const std::int64_t channel = first + threadIdx.x;
    const bool inside = channel < p.head_dim;
    q[threadIdx.y][threadIdx.x] =
        inside && row_exists ? p.q.load(p.q.offset(h.pair.batch, h.pair.query_begin + at.row, h.head) + channel) : 0.0f;
    k[threadIdx.y][threadIdx.x] =
        inside && key_of_row < h.pair.keys ? p.k.load(p.key_offset(p.k, h.sequence, h.pair, key_of_row, h.key_head) + channel) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int c = 0; c < kTile; ++c) dot += q[threadIdx.y][c] * k[threadIdx.x][c];
    __syncthreads();
  }
  if (!row_exists || at.column >= h.pair.keys) return;
  const KeyRange seen = p.visible(h.pair, at.row);
  const bool sees = at.column >= seen.begin && at.column < seen.end;
  h.scores[at.row * p.keys + at.column] = sees ? score_of(p, p.scale * dot, h.pair.batch, h.head, at.row, at.column) : -INFINITY;
}

__global__ void __launch_bounds__(kWarps* kWarpSize) make_weights(const __grid_constant__ SoftmaxProblem p, float* scores) {
  const std::int64_t number = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize, row = number % p.queries;
  if (number >= p.sequences * p.heads * p.queries) return;
  const Head h = head_of(p, number / p.queries, scores);
  if (row >= h.pair.queries) return;
  const int lane = threadIdx.x % kWarpSize;
  float* own = h.scores + row * p.keys;
  RunningSoftmax s;
  for (std::int64_t key = lane; key < h.pair.keys; key += kWarpSize) s.max = fmaxf(s.max, own[key]);
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) s.max = fmaxf(s.max, __shfl_xor_sync(kFullWarp, s.max, step));
  for (std::int64_t key = lane; key < h.pair.keys; key += kWarpSize) s.sum += weight(own[key], s.max);
  s.sum = warp_sum(s.sum);
  const float factor = normalizer(s);
  for (std::int64_t key = lane; key < h.pair.keys; key += kWarpSize) own[key] = factor * weight(own[key], s.max);
  if (p.lse.present && lane == 0) p.lse.store(p.lse.offset(h.pair.batch, h.pair.query_begin + row, h.head), log_sum(s));
}

__global__ void __launch_bounds__(kTile* kTile)
    weigh_values(const __grid_constant__ SoftmaxProblem p, float* weights, std::int64_t row_tiles, std::int64_t column_tiles) {
  __shared__ float w[kTile][kTile], v[kTile][kTile];
  const TileAt at = tile_at(row_tiles, column_tiles);
  const Head h = head_of(p, at.head, weights);
  const bool row_exists = at.row < h.pair.queries, inside = at.column < p.head_dim;
  float sum = 0.0f;
  for (std::int64_t first = 0; first < h.pair.keys; first += kTile) {
    const std::int64_t key = first + threadIdx.x, own_key = first + threadIdx.y;
    w[threadIdx.y][threadIdx.x] = row_exists && key < h.pair.keys ? h.scores[at.row * p.keys + key] : 0.0f;
    v[threadIdx.y][threadIdx.x] =
        inside && own_key < h.pair.keys ? p.v.load(p.key_offset(p.v, h.sequence, h.pair, own_key, h.key_head) + at.column) : 0.0f;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kTile; ++j) sum += w[threadIdx.y][j] * v[j][threadIdx.x];
    __syncthreads();
  }
  if (row_exists && inside) p.out.store(p.out.offset(h.pair.batch, h.pair.query_begin + at.row, h.head) + at.column, sum);
}

std::int64_t row_tiles(const SoftmaxProblem& p) { return ceil_div(p.queries, kTile); }
std::int64_t tiles(const SoftmaxProblem& p, std::int64_t columns) { return p.sequences * p.heads * row_tiles(p) * ceil_div(columns, kTile); }
std::int64_t weight_blocks(const SoftmaxProblem& p) { return ceil_div(p.sequences * p.heads * p.queries, kWarps); }

std::string unsupported(const SoftmaxProblem& p, const DeviceProperties& device, const Settings&) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  const bool fits = tiles(p, p.keys) <= kMostBlocks && tiles(p, p.head_dim) <= kMostBlocks && weight_blocks(p) <= kMostBlocks;
  return fits ? "" : "more blocks than a grid has";
}

std::size_t workspace(const SoftmaxProblem& p, const DeviceProperties&, const Settings&) {
  return static_cast<std::size_t>(p.sequences * p.heads * p.queries * p.keys) * sizeof(float);
}

void launch(const SoftmaxLaunch& call) {
  const SoftmaxProblem& p = call.problem;
  auto* scores = static_cast<float*>(call.workspace);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const dim3 threads(kTile, kTile);
  if (p.keys > 0) {
    make_scores<<<static_cast<unsigned>(tiles(p, p.keys)), threads, 0, stream>>>(p, scores, row_tiles(p), ceil_div(p.keys, kTile));
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  }
  make_weights<<<static_cast<unsigned>(weight_blocks(p)), kWarps * kWarpSize, 0, stream>>>(p, scores);
  DELTA_ATTENTION_CUDA(cudaGetLastError());
  weigh_values<<<static_cast<unsigned>(tiles(p, p.head_dim)), threads, 0, stream>>>(p, scores, row_tiles(p), ceil_div(p.head_dim, kTile));
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

}  // namespace

extern const SoftmaxKernel three_stage_softmax_kernel;
const SoftmaxKernel three_stage_softmax_kernel = {
    "three_stage", "three products with all scores in memory", DeviceType::cuda, true, -1, no_settings, unsupported, workspace, launch};

}  // namespace delta_attention
