#pragma once

// The device code of the kernel flash_tc, whose story flash_tc.cu tells. Apart from it, so that host threads can run it.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/device/exp2.cuh"
#include "cuda/device/mma.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/softmax/work_order.cuh"

namespace delta_attention::flash {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kRows = 128, kKeys = 64;      // of a block, of a tile
constexpr int kWarpRows = kRows / kWarps;   // 32: two fragments
constexpr int kFragments = kWarpRows / 16;  // of rows a warp

/// kInNats: scores are scaled (and capped) before their maximum is taken. Without a cap and with a positive scale, the scale can
/// wait for the exponential.
template <class Element_, int kDim_, bool kInNats_, int kBuffers_>
struct Policy {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr bool kInNats = kInNats_;
  static constexpr int kBuffers = kBuffers_;  // tiles of keys and of values
  static constexpr int kChunks = kDim / 8;  // of 16 bytes a row
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = (kRows + 2 * kBuffers * kKeys) * kRowBytes;
  static constexpr int kBytes = kTileBytes + 256;  // and the block's Place
};

struct Params {
  SoftmaxProblem problem;
  WorkOrder order;
  std::int64_t side_by_side;  // blocks that start on multiprocessors of their own
};

/// The block's part, in shared memory: most of the time nobody needs it in registers.
struct Place {
  SequencePair pair;
  std::int64_t first_row, head, key_head;
  const void *key_rows, *value_rows;  // where the head's are
  int rows, keys;
  int begin, end;          // keys that any row sees, from the start of a tile
  int all_begin, all_end;  // keys that every row sees
};

/// Scores of a warp's 32 rows and 64 keys, or its outputs: [fragment][columns / 8].
template <int kColumns>
using Sums = float[kFragments][kColumns / 8][4];

/// Weights as fragments of the second product: [fragment][columns / 8][row g, row g + 8], two columns in each.
using Weights = unsigned[kFragments][kKeys / 8][2];

/// A row's running softmax. A lane has rows g and g + 8 of each fragment; its sums are its own share.
using Softmaxes = RunningSoftmax[kFragments][2];

/// Rows from global memory to a swizzled tile: kCount, or `rows` and zeros after them where there are fewer.
template <class P, int kCount>
__device__ __forceinline__ void start_rows(const typename P::Element* from, int stride, int rows, uint4* to) {
  constexpr int kAtOnce = kThreads / P::kChunks;  // rows; a multiple of 8, which the swizzle repeats after
  const int row = threadIdx.x / P::kChunks, chunk = threadIdx.x % P::kChunks;
  const typename P::Element* own = from + static_cast<std::int64_t>(row) * stride + chunk * 8;
  const std::int64_t step = std::int64_t{kAtOnce} * stride;
  uint4* target = to + swizzled<P::kChunks>(row, chunk);
  if (rows >= kCount) {
#pragma unroll
    for (int i = 0; i < kCount; i += kAtOnce, own += step) __pipeline_memcpy_async(target + i * P::kChunks, own, 16);
  } else {
#pragma unroll 1
    for (int i = 0; i < kCount; i += kAtOnce, own += step) {
      const bool exists = row + i < rows;
      __pipeline_memcpy_async(target + i * P::kChunks, exists ? own : from, 16, exists ? 0 : 16);
    }
  }
  __pipeline_commit();
}

__device__ __forceinline__ void arrived() {
  __pipeline_wait_prior(0);
  __syncthreads();
}

/// S = Q K^T
template <class P>
__device__ __forceinline__ void multiply_keys(const uint4* q, const uint4* keys, Sums<kKeys>& scores) {
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * kWarpRows;
  // Where step 0 is; chunks of later steps differ from it in bits that exclusive or changes, also in a swizzled row.
  // A: rows 0-7 and 8-15 of the first 8 channels, then of the next 8. B: keys 0-7 of 8 channels, of the next 8, then keys 8-15.
  const unsigned a_start = shared_address(q + swizzled<P::kChunks>(first_row + lane % 16, lane / 16));
  const unsigned b_start = shared_address(keys + swizzled<P::kChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  // Fragments are fetched one product ahead.
  constexpr int kSteps = P::kDim / 16, kPairs = kKeys / 16;
  unsigned a[2][kFragments][4], b[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) load_matrices((a_start ^ (step * 32)) + f * 16 * P::kRowBytes, a[step % 2][f]);
  };
  const auto load_b = [&](int i) { load_matrices((b_start ^ (i / kPairs * 32)) + i % kPairs * 16 * P::kRowBytes, b[i % 2]); };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int i = 0; i < kSteps * kPairs; ++i) {
    const int step = i / kPairs, pair = i % kPairs;
    if (pair == 0 && step + 1 < kSteps) load_a(step + 1);
    if (i + 1 < kSteps * kPairs) load_b(i + 1);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      if (step == 0) {
        multiply<typename P::Element>(a[0][f], b[i % 2][0], b[i % 2][1], scores[f][pair * 2]);
        multiply<typename P::Element>(a[0][f], b[i % 2][2], b[i % 2][3], scores[f][pair * 2 + 1]);
      } else {
        multiply_add<typename P::Element>(a[step % 2][f], b[i % 2][0], b[i % 2][1], scores[f][pair * 2]);
        multiply_add<typename P::Element>(a[step % 2][f], b[i % 2][2], b[i % 2][3], scores[f][pair * 2 + 1]);
      }
    }
  }
}

/// O += P V
template <class P>
__device__ __forceinline__ void add_values(const Weights& weights, const uint4* values, Sums<P::kDim>& out) {
  const int lane = threadIdx.x % kWarpSize;
  // B, transposed: keys 0-7 and 8-15 of 8 channels, then of the next 8.
  const unsigned b_start = shared_address(values + swizzled<P::kChunks>(lane % 16, lane / 16));
  constexpr int kSteps = kKeys / 16, kPairs = P::kDim / 16;
  unsigned b[2][4];
  const auto load_b = [&](int i) {
    load_matrices_transposed((b_start ^ (i % kPairs * 32)) + i / kPairs * 16 * P::kRowBytes, b[i % 2]);
  };
  load_b(0);
#pragma unroll
  for (int i = 0; i < kSteps * kPairs; ++i) {
    const int step = i / kPairs, pair = i % kPairs;
    if (i + 1 < kSteps * kPairs) load_b(i + 1);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      const auto& w = weights[f];
      const unsigned a[4] = {w[step * 2][0], w[step * 2][1], w[step * 2 + 1][0], w[step * 2 + 1][1]};
      multiply_add<typename P::Element>(a, b[i % 2][0], b[i % 2][1], out[f][pair * 2]);
      multiply_add<typename P::Element>(a, b[i % 2][2], b[i % 2][3], out[f][pair * 2 + 1]);
    }
  }
}

/// This lane's row `half` of fragment `f`, counted in the block.
__device__ __forceinline__ int row_of(int f, int half) {
  return threadIdx.x / kWarpSize * kWarpRows + f * 16 + half * 8 + threadIdx.x % kWarpSize / 4;
}

/// Hides what rows do not see of the tile at `first_key`.
__device__ __forceinline__ void mask_scores(const SoftmaxProblem& p, const Place& place, std::int64_t first_key, Sums<kKeys>& scores) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange seen = p.visible(place.pair, place.first_row + row_of(f, half));
      const int begin = static_cast<int>(seen.begin - first_key), end = static_cast<int>(seen.end - first_key);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + threadIdx.x % 4 * 2 + e;
          if (column < begin || column >= end) scores[f][n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

/// Weights of a tile relative to the rows' maxima so far, and this lane's share of their sums. False if the maxima have to move first:
/// a row has seen no key yet, or a lane's weights of a row are so large that they might overflow 16 bits.
template <class P>
__device__ __forceinline__ bool weigh(float factor, const Sums<kKeys>& scores, const Softmaxes& softmaxes, Weights& weights,
                                      float (&sums)[kFragments][2]) {
  constexpr float kMostSum = 256.0f;
  bool fits = true;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = softmaxes[f][half].max, shift = max > -INFINITY ? max * factor : 0.0f;  // else every weight is 2^-infinity
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        const float first = exp2_approx(scores[f][n][half * 2] * factor - shift);
        const float second = exp2_approx(scores[f][n][half * 2 + 1] * factor - shift);
        sum += first + second;
        weights[f][n][half] = pack<typename P::Element>(first, second);
      }
      sums[f][half] = sum;
      fits = fits && max > -INFINITY && sum <= kMostSum;
    }
  }
  return fits;
}

/// Moves the rows' maxima up to the tile's; what the rows have follows.
template <class P>
__device__ __forceinline__ void move_maxima(float factor, const Sums<kKeys>& scores, Softmaxes& softmaxes, Sums<P::kDim>& out) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RunningSoftmax& s = softmaxes[f][half];
      float max = s.max;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) max = fmaxf(max, fmaxf(scores[f][n][half * 2], scores[f][n][half * 2 + 1]));
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 1));
      max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, 2));
      const float rescale = s.max == -INFINITY ? 0.0f : exp2_approx((s.max - max) * factor);
      s = {max, s.sum * rescale};
#pragma unroll
      for (int n = 0; n < P::kDim / 8; ++n) {
        out[f][n][half * 2] *= rescale;
        out[f][n][half * 2 + 1] *= rescale;
      }
    }
  }
}

/// Scores, in units of 1 / factor of log2, become weights, and the rows' sums follow. Weights are relative to maxima that lag behind: as long as
/// nothing can overflow, nobody looks for the tile's maxima, and nothing is rescaled.
template <class P>
__device__ __forceinline__ void merge(float factor, const Sums<kKeys>& scores, Softmaxes& softmaxes, Sums<P::kDim>& out, Weights& weights) {
  float sums[kFragments][2];
  if (__any_sync(kFullWarp, !weigh<P>(factor, scores, softmaxes, weights, sums))) {
    move_maxima<P>(factor, scores, softmaxes, out);
    weigh<P>(factor, scores, softmaxes, weights, sums);
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) softmaxes[f][half].sum += sums[f][half];
  }
}

/// tanh(x), off by 2^-23 or so: next to what a dot product of 16-bit numbers has lost, nothing. (tanhf has two branches, and registers are
/// short here.)
__device__ __forceinline__ float short_tanh(float x) { return 1.0f - __fdividef(2.0f, exp2_approx(2.0f * kLog2E * x) + 1.0f); }

/// Scores in nats.
__device__ __forceinline__ void scale_scores(const SoftmaxProblem& p, Sums<kKeys>& scores) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float score = p.scale * scores[f][n][e];
        scores[f][n][e] = p.softcap > 0.0f ? p.softcap * short_tanh(__fdividef(score, p.softcap)) : score;
      }
    }
  }
}

/// Outputs, divided by their sums, through the warp's own rows of shared memory to global memory.
template <class P>
__device__ __forceinline__ void store(const SoftmaxProblem& p, const Place& place, Softmaxes& softmaxes, float factor, Sums<P::kDim>& out,
                                      uint4* staging) {
  using Element = typename P::Element;
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * kWarpRows;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RunningSoftmax s = softmaxes[f][half];
      s.sum += __shfl_xor_sync(kFullWarp, s.sum, 1);
      s.sum += __shfl_xor_sync(kFullWarp, s.sum, 2);
      const float divide = normalizer(s);
      const int row = row_of(f, half);
      if (p.lse.present && lane % 4 == 0 && row < place.rows) {
        const float lse = s.sum > 0.0f ? s.max * factor / kLog2E + logf(s.sum) : -INFINITY;
        p.lse.store(p.lse.offset(place.pair.batch, place.pair.query_begin + place.first_row + row, place.head), lse);
      }
#pragma unroll
      for (int n = 0; n < P::kDim / 8; ++n) {
        reinterpret_cast<unsigned*>(staging + swizzled<P::kChunks>(row, n))[lane % 4] =
            pack<Element>(out[f][n][half * 2] * divide, out[f][n][half * 2 + 1] * divide);
      }
    }
  }
  __syncwarp();
  const std::int64_t start = p.out.offset(place.pair.batch, place.pair.query_begin + place.first_row, place.head);
  auto* to = static_cast<Element*>(p.out.data) + start;
#pragma unroll 4
  for (int i = lane; i < kWarpRows * P::kChunks; i += kWarpSize) {
    const int row = first_row + i / P::kChunks, chunk = i % P::kChunks;
    if (row < place.rows) *reinterpret_cast<uint4*>(to + row * p.out.strides[1] + chunk * 8) = staging[swizzled<P::kChunks>(row, chunk)];
  }
}

/// Where all blocks run at once, two a multiprocessor, the second ones come in the opposite order, so that a long one shares with a
/// short one.
__device__ __forceinline__ WorkOrder::Work work_of(const Params& params, std::int64_t block) {
  const std::int64_t blocks = params.order.row_blocks * params.order.heads;
  const bool second = blocks <= 2 * params.side_by_side && block >= params.side_by_side;
  return params.order.at(second ? blocks - 1 - (block - params.side_by_side) : block);
}

__device__ __forceinline__ Place place_of(const Params& params, std::int64_t block) {
  const SoftmaxProblem& p = params.problem;
  const WorkOrder::Work work = work_of(params, block);
  Place place;
  place.head = work.head % p.heads;
  place.key_head = p.key_head(place.head);
  place.pair = p.sequence(work.head / p.heads);
  place.first_row = work.row_block * kRows;
  const auto rows_of = [&](const InputOperand& x) {
    return static_cast<const char*>(x.data) + 2 * x.offset(place.pair.batch, place.pair.key_begin, place.key_head);
  };
  place.key_rows = rows_of(p.k);
  place.value_rows = rows_of(p.v);
  place.keys = static_cast<int>(place.pair.keys);
  const std::int64_t left = place.pair.queries - place.first_row;
  place.rows = static_cast<int>(left < 0 ? 0 : left < kRows ? left : kRows);
  const KeyRange first = p.visible(place.pair, place.first_row), last = p.visible(place.pair, place.first_row + place.rows - 1);
  place.begin = static_cast<int>(first.begin / kKeys * kKeys);
  place.end = static_cast<int>(last.end);
  place.all_begin = static_cast<int>(last.begin);
  place.all_end = static_cast<int>(first.end);
  return place;
}

/// Keys or values from `key` on; `rows` is where the head's first one is.
template <class P>
__device__ __forceinline__ void start_tile(const InputOperand& x, const void* rows, const Place& place, int key, uint4* to) {
  const int stride = static_cast<int>(x.strides[1]);
  const auto* from = static_cast<const typename P::Element*>(rows) + static_cast<std::int64_t>(key) * stride;
  start_rows<P, kKeys>(from, stride, place.keys - key, to);
}

/// One block's work. `memory`: P::kBytes of shared memory, aligned to 256 bytes.
template <class P>
__device__ __forceinline__ void attend_block(const Params& params, std::int64_t block, uint4* memory) {
  static_assert(sizeof(Place) <= P::kBytes - P::kTileBytes);
  Place& place = *reinterpret_cast<Place*>(reinterpret_cast<unsigned char*>(memory) + P::kTileBytes);
  const SoftmaxProblem& p = params.problem;
  if (threadIdx.x == 0) place = place_of(params, block);
  __syncthreads();
  if (place.rows == 0) return;
  constexpr int kTile = kKeys * P::kChunks;
  uint4 *q = memory, *all_keys = q + kRows * P::kChunks, *all_values = all_keys + P::kBuffers * kTile;
  const auto start_keys = [&](int key, int side) { start_tile<P>(p.k, place.key_rows, place, key, all_keys + side * kTile); };
  const auto start_values = [&](int key, int side) { start_tile<P>(p.v, place.value_rows, place, key, all_values + side * kTile); };

  Sums<P::kDim> out = {};
  Softmaxes softmaxes;
  const float factor = P::kInNats ? kLog2E : p.scale * kLog2E;
  const int end = place.end;
  int key = place.begin, side = 0;
  if (key < end) {
    const std::int64_t start = p.q.offset(place.pair.batch, place.pair.query_begin + place.first_row, place.head);
    start_rows<P, kRows>(static_cast<const typename P::Element*>(p.q.data) + start, static_cast<int>(p.q.strides[1]), place.rows, q);
    start_keys(key, 0);
    if (P::kBuffers == 2) start_values(key, 0);
  }
#pragma unroll 1
  for (; key < end; key += kKeys) {
    arrived();  // the keys, and with two buffers the values; everyone is done with the tile before
    if (P::kBuffers == 1) {
      start_values(key, 0);
    } else if (key + kKeys < end) {
      start_keys(key + kKeys, 1 - side);
      start_values(key + kKeys, 1 - side);
    }
    Sums<kKeys> scores;
    multiply_keys<P>(q, all_keys + side * kTile, scores);
    if (P::kInNats) scale_scores(p, scores);
    if (key < place.all_begin || key + kKeys > place.all_end) mask_scores(p, place, key, scores);
    Weights weights;
    merge<P>(factor, scores, softmaxes, out, weights);
    if (P::kBuffers == 1) {
      arrived();  // the values; everyone is done with the keys
      if (key + kKeys < end) start_keys(key + kKeys, 0);
    }
    add_values<P>(weights, all_values + side * kTile, out);
    if (P::kBuffers == 2) side = 1 - side;
  }
  __syncwarp();  // a warp's own rows of Q become its staging
  store<P>(p, place, softmaxes, factor, out, q);
}

}  // namespace delta_attention::flash
