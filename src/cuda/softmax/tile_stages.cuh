#pragma once

// What the tiled kernels do to their rows (tile_kernel.cuh tells the story): device code, which tests also play on host threads.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/device/rows.cuh"
#include "cuda/device/warp.cuh"
#include "cuda/softmax/scores.cuh"
#include "cuda/softmax/work_order.cuh"

namespace delta_attention::tile {

enum class Loads { elements, vectors };  // one channel or four at a time, from global and from shared memory
enum class Merge { row_max, elements };  // a row's sums are rescaled once a tile, or for every key
enum class Exp { exact, fast };

/// kDim: channels, head_dim rounded up. kKeys: keys of a tile. kPadding: floats between rows of keys in shared memory.
template <int kDim_, int kKeys_, Loads kLoads_, int kPadding_, int kBuffers_, Merge kMerge_, Exp kExp_, bool kPlain_>
struct Policy {
  static constexpr int kDim = kDim_, kKeys = kKeys_, kPadding = kPadding_, kBuffers = kBuffers_;
  static constexpr Loads kLoads = kLoads_;
  static constexpr Merge kMerge = kMerge_;
  static constexpr Exp kExp = kExp_;
  static constexpr bool kPlain = kPlain_;  // every row sees every key, unchanged scores

  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int kWarpRows = 8, kRows = kWarps * kWarpRows;  // query rows of a warp, of a block
  static constexpr int kBlocks = kBuffers == 2 || kDim == 128 ? 2 : 3;  // of a multiprocessor, at least
  static constexpr int kStride = kDim + kPadding;                  // of a key in shared memory
  static constexpr int kOwn = kDim / kWarpSize;                    // channels of the output that a lane holds
  // Scores of a tile in a warp: a lane takes kLaneKeys keys and, of tiles narrower than a warp, only every kRowSplit-th row.
  static constexpr int kLaneKeys = kKeys < kWarpSize ? 1 : kKeys / kWarpSize;
  static constexpr int kRowSplit = kKeys < kWarpSize ? kWarpSize / kKeys : 1;
  static constexpr int kLaneRows = kWarpRows / kRowSplit;
  static_assert(kDim % kWarpSize == 0 && kWarpRows % kRowSplit == 0 && kKeys % 4 == 0);

  static constexpr int kTileFloats = kKeys * (kStride + kDim);
  static constexpr int kFloats = kRows * kDim + kBuffers * kTileFloats + kRows * kKeys;
  static constexpr int kOffsets = kPlain ? 0 : 2 * (kKeys + kRows);  // 64-bit: where the tile's keys and values lie, what rows see
  static constexpr int kBytes = kFloats * 4 + kOffsets * 8;
  static_assert(kKeys * 2 <= kThreads && kFloats % 2 == 0);
};

struct Params {
  SoftmaxProblem problem;
  WorkOrder order;
  bool q_vectors, k_vectors, v_vectors;
};

/// Shared memory of a block.
template <class P>
struct Shared {
  float* q;        // [kRows][kDim], scaled
  float* tiles;    // [kBuffers] of keys [kKeys][kStride] and values [kKeys][kDim]
  float* weights;  // [kRows][kKeys] scores, then weights
  std::int64_t *key_offsets, *value_offsets;  // [kKeys] of the tile that is being loaded from pages
  KeyRange* seen;                             // [kRows] keys that a row sees; not for plain problems

  __device__ explicit Shared(float* memory)
      : q(memory), tiles(memory + P::kRows * P::kDim), weights(tiles + P::kBuffers * P::kTileFloats) {
    key_offsets = reinterpret_cast<std::int64_t*>(memory + P::kFloats);
    value_offsets = key_offsets + P::kKeys;
    seen = reinterpret_cast<KeyRange*>(value_offsets + P::kKeys);
  }
  __device__ float* keys(int side) const { return tiles + side * P::kTileFloats; }
  __device__ float* values(int side) const { return keys(side) + P::kKeys * P::kStride; }
};

/// The block's rows of one (sequence, head).
struct Rows {
  std::int64_t sequence, head, key_head, first;
  SequencePair pair;
  KeyRange range;  // that any of the rows can see
  KeyRange all;    // that all of them see, unchanged scores provided
  int count;

  template <class P>
  __device__ static Rows of(const Params& params, std::int64_t block, P) {
    const SoftmaxProblem& p = params.problem;
    const WorkOrder::Work work = params.order.at(block);
    Rows rows;
    rows.head = work.head % p.heads;
    rows.key_head = p.key_head(rows.head);
    rows.sequence = work.head / p.heads;
    rows.first = work.row_block * P::kRows;
    rows.pair = p.sequence(rows.sequence);
    const std::int64_t left = rows.pair.queries - rows.first;
    rows.count = static_cast<int>(left < 0 ? 0 : left < P::kRows ? left : P::kRows);
    rows.range = rows.all = {0, rows.pair.keys};
    if (!P::kPlain && rows.count > 0) {
      const KeyRange first = p.visible(rows.pair, rows.first), last = p.visible(rows.pair, rows.first + rows.count - 1);
      rows.range = {first.begin, last.end};
      rows.all = {last.begin, first.end};
      if (p.softcap > 0.0f || p.mask.present) rows.all = {};
    }
    return rows;
  }
};

// -------------------------------------------------------------------------------------------------------------- loading

/// Four neighbouring elements as f32.
template <class Element>
__device__ __forceinline__ float4 load_four(const Element* from) {
  const auto piece = *reinterpret_cast<const Piece<Element, 4>*>(from);
  return make_float4(to_float(piece.element[0]), to_float(piece.element[1]), to_float(piece.element[2]), to_float(piece.element[3]));
}

/// Rows of one operand to shared memory, zeros where there is nothing; kAtOnce loads of a thread in flight. offset_of(row) is where a row
/// starts.
template <class P, int kCount, int kAtOnce, class Element, class OffsetOf>
__device__ __forceinline__ void load_rows_of(const void* data, bool vectors, int rows, int size, int stride, float factor, float* to,
                                             const OffsetOf& offset_of) {
  const Element* from = static_cast<const Element*>(data);
  if (P::kLoads == Loads::vectors && vectors) {
    constexpr int kPieces = P::kDim / 4;
#pragma unroll kAtOnce
    for (int i = threadIdx.x; i < kCount * kPieces; i += P::kThreads) {
      const int row = i / kPieces, channel = i % kPieces * 4;
      float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (row < rows && channel < size) x = load_four(from + offset_of(row) + channel);
      x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
      *reinterpret_cast<float4*>(to + row * stride + channel) = x;
    }
    return;
  }
  constexpr int kUnroll = P::kLoads == Loads::elements ? kAtOnce : 1;
#pragma unroll kUnroll
  for (int i = threadIdx.x; i < kCount * P::kDim; i += P::kThreads) {
    const int row = i / P::kDim, channel = i % P::kDim;
    to[row * stride + channel] = row < rows && channel < size ? factor * to_float(from[offset_of(row) + channel]) : 0.0f;
  }
}

template <class P, int kCount, int kAtOnce, class OffsetOf>
__device__ __forceinline__ void load_rows(const InputOperand& from, bool vectors, int rows, int size, int stride, float factor, float* to,
                                          const OffsetOf& offset_of) {
  switch (from.dtype) {
    case DType::f16: return load_rows_of<P, kCount, kAtOnce, Half>(from.data, vectors, rows, size, stride, factor, to, offset_of);
    case DType::bf16: return load_rows_of<P, kCount, kAtOnce, BFloat16>(from.data, vectors, rows, size, stride, factor, to, offset_of);
    default: return load_rows_of<P, kCount, kAtOnce, float>(from.data, vectors, rows, size, stride, factor, to, offset_of);
  }
}

/// The same, of f32 rows in vectors, without waiting: arrives by wait_for_tiles().
template <class P, class OffsetOf>
__device__ __forceinline__ void start_rows_async(const InputOperand& from, int rows, int size, int stride, float* to,
                                                 const OffsetOf& offset_of) {
  constexpr int kPieces = P::kDim / 4;
#pragma unroll 4
  for (int i = threadIdx.x; i < P::kKeys * kPieces; i += P::kThreads) {
    const int row = i / kPieces, channel = i % kPieces * 4;
    float* target = to + row * stride + channel;
    if (row < rows && channel < size) {
      __pipeline_memcpy_async(target, static_cast<const float*>(from.data) + offset_of(row) + channel, 16);
    } else {
      *reinterpret_cast<float4*>(target) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
}

/// The block's query rows, times `factor`.
template <class P>
__device__ __forceinline__ void load_queries(const Params& params, const Rows& rows, float factor, float* to) {
  const SoftmaxProblem& p = params.problem;
  const std::int64_t start = p.q.offset(rows.pair.batch, rows.pair.query_begin + rows.first, rows.head), step = p.q.strides[1];
  load_rows<P, P::kRows, 4>(p.q, params.q_vectors, rows.count, static_cast<int>(p.head_dim), P::kDim, factor, to,
                         [=](int row) { return start + row * step; });
}

/// Keys and values [first, first + kKeys) of the rows' sequence.
template <class P>
__device__ __forceinline__ void load_tile(const Params& params, const Rows& rows, std::int64_t first, const Shared<P>& shared, int side) {
  const SoftmaxProblem& p = params.problem;
  const std::int64_t left = rows.pair.keys - first, head = rows.key_head;
  const int count = static_cast<int>(left < P::kKeys ? left : P::kKeys), size = static_cast<int>(p.head_dim);
  if (!P::kPlain && p.paged()) {
    const int row = threadIdx.x % P::kKeys;
    if (threadIdx.x < 2 * P::kKeys && row < count) {
      const bool value = threadIdx.x >= P::kKeys;
      (value ? shared.value_offsets : shared.key_offsets)[row] = p.key_offset(value ? p.v : p.k, rows.sequence, rows.pair, first + row, head);
    }
    __syncthreads();
  }
  const auto load = [&](const InputOperand& from, bool vectors, const std::int64_t* offsets, int stride, float* to) {
    if (!P::kPlain && p.paged()) {
      return load_rows<P, P::kKeys, 1>(from, vectors, count, size, stride, 1.0f, to, [=](int row) { return offsets[row]; });
    }
    const std::int64_t start = from.offset(rows.pair.batch, rows.pair.key_begin + first, head), step = from.strides[1];
    const auto offset_of = [=](int row) { return start + row * step; };
    if (P::kBuffers == 2 && P::kLoads == Loads::vectors && vectors && from.dtype == DType::f32) {
      start_rows_async<P>(from, count, size, stride, to, offset_of);
    } else {
      load_rows<P, P::kKeys, 4>(from, vectors, count, size, stride, 1.0f, to, offset_of);
    }
  };
  load(p.k, params.k_vectors, shared.key_offsets, P::kStride, shared.keys(side));
  load(p.v, params.v_vectors, shared.value_offsets, P::kDim, shared.values(side));
  if (P::kBuffers == 2) __pipeline_commit();
}

// --------------------------------------------------------------------------------------------------------- computing

/// What a warp keeps of its rows.
template <class P>
struct State {
  RunningSoftmax softmax[P::kWarpRows];     // the same in all lanes, but for the sum: a lane's own share with Merge::row_max
  float out[P::kWarpRows][P::kOwn] = {};    // lane l: channels l * kOwn and following
};

template <class P>
__device__ __forceinline__ float exponential(float score, float max) {
  if (P::kPlain || P::kExp == Exp::fast) {
    const float x = score - max;  // never NaN where every key is seen
    if (P::kPlain) return P::kExp == Exp::fast ? __expf(x) : expf(x);
    return score == -INFINITY ? 0.0f : __expf(x);
  }
  return weight(score, max);
}

/// Dot products of the warp's rows with the tile's keys.
template <class P>
__device__ __forceinline__ void dot_products(const float* q, const float* keys, float (&dot)[P::kLaneRows][P::kLaneKeys]) {
  const int lane = threadIdx.x % kWarpSize, first_row = lane / P::kKeys;  // 0 unless tiles are narrow
  const float* own_keys = keys + lane % P::kKeys * P::kStride;
  constexpr int kAtOnce = P::kLoads == Loads::vectors ? 4 : 1;
#pragma unroll 2
  for (int c = 0; c < P::kDim; c += kAtOnce) {
    float key[P::kLaneKeys][kAtOnce];
#pragma unroll
    for (int k = 0; k < P::kLaneKeys; ++k) {
      const float* at = own_keys + k * kWarpSize * P::kStride + c;
      if constexpr (kAtOnce == 4) {
        const float4 x = *reinterpret_cast<const float4*>(at);
        key[k][0] = x.x, key[k][1] = x.y, key[k][2] = x.z, key[k][3] = x.w;
      } else {
        key[k][0] = *static_cast<const volatile float*>(at);  // the compiler would make vectors of several
      }
    }
#pragma unroll
    for (int r = 0; r < P::kLaneRows; ++r) {
      const float* at = q + (first_row + r * P::kRowSplit) * P::kDim + c;
      float x[kAtOnce];
      if constexpr (kAtOnce == 4) {
        const float4 four = *reinterpret_cast<const float4*>(at);
        x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
      } else {
        x[0] = *static_cast<const volatile float*>(at);
      }
#pragma unroll
      for (int k = 0; k < P::kLaneKeys; ++k) {
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) dot[r][k] += x[e] * key[k][e];
      }
    }
  }
}

/// Scores of the warp's rows and the tile's keys into `scores`; -infinity where a row does not see a key.
template <class P>
__device__ __forceinline__ void score_tile(const Params& params, const Rows& rows, std::int64_t first_key, const Shared<P>& shared,
                                           int side, int warp_row, float* scores) {
  float dot[P::kLaneRows][P::kLaneKeys] = {};
  dot_products<P>(shared.q + warp_row * P::kDim, shared.keys(side), dot);
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int r = 0; r < P::kLaneRows; ++r) {
#pragma unroll
    for (int k = 0; k < P::kLaneKeys; ++k) {
      const int column = lane % P::kKeys + k * kWarpSize;
      const bool exists = first_key + column < rows.pair.keys;
      scores[(lane / P::kKeys + r * P::kRowSplit) * P::kKeys + column] = exists ? dot[r][k] : -INFINITY;
    }
  }
  __syncwarp();
  if (!P::kPlain && (first_key < rows.all.begin || first_key + P::kKeys > rows.all.end)) {
    const SoftmaxProblem& p = params.problem;
#pragma unroll 1
    for (int i = lane; i < P::kWarpRows * P::kKeys; i += kWarpSize) {
      const int row = warp_row + i / P::kKeys;
      const KeyRange seen = shared.seen[row];
      const std::int64_t key = first_key + i % P::kKeys;
      const bool sees = key >= seen.begin && key < seen.end;
      scores[i] = sees ? score_of(p, scores[i], rows.pair.batch, rows.head, rows.first + row, key) : -INFINITY;
    }
    __syncwarp();
  }
}

/// Turns a tile's scores into weights and brings the warp's sums up to them: one maximum a row and tile.
template <class P>
__device__ __forceinline__ void merge_by_row_max(float* scores, State<P>& state) {
  const int lane = threadIdx.x % kWarpSize;
  constexpr int kLaneScores = (P::kKeys + kWarpSize - 1) / kWarpSize;
#pragma unroll
  for (int r = 0; r < P::kWarpRows; ++r) {
    float score[kLaneScores], max = state.softmax[r].max;
#pragma unroll
    for (int k = 0; k < kLaneScores; ++k) {
      const int column = lane + k * kWarpSize;
      score[k] = column < P::kKeys ? scores[r * P::kKeys + column] : -INFINITY;
      max = fmaxf(max, score[k]);
    }
#pragma unroll
    for (int step = kWarpSize / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));
    const float factor = rescaling(state.softmax[r].max, max);
    float sum = state.softmax[r].sum * factor;
#pragma unroll
    for (int k = 0; k < kLaneScores; ++k) {
      const int column = lane + k * kWarpSize;
      const float share = column < P::kKeys ? exponential<P>(score[k], max) : 0.0f;
      sum += share;
      if (column < P::kKeys) scores[r * P::kKeys + column] = share;
    }
    state.softmax[r] = {max, sum};
#pragma unroll
    for (int e = 0; e < P::kOwn; ++e) state.out[r][e] *= factor;
  }
  __syncwarp();
}

/// This lane's channels of a row of values.
template <class P>
__device__ __forceinline__ void load_value(const float* row, float (&x)[P::kOwn]) {
  const auto piece = reinterpret_cast<const Piece<float, P::kOwn>*>(row)[threadIdx.x % kWarpSize];
#pragma unroll
  for (int e = 0; e < P::kOwn; ++e) x[e] = piece.element[e];
}

/// Adds the tile's values by their weights.
template <class P>
__device__ __forceinline__ void add_values(const float* weights, const float* values, State<P>& state) {
#pragma unroll 1
  for (int j = 0; j < P::kKeys; j += 4) {
    float value[4][P::kOwn];
#pragma unroll
    for (int n = 0; n < 4; ++n) load_value<P>(values + (j + n) * P::kDim, value[n]);
#pragma unroll
    for (int r = 0; r < P::kWarpRows; ++r) {
      const float4 w = *reinterpret_cast<const float4*>(weights + r * P::kKeys + j);
#pragma unroll
      for (int e = 0; e < P::kOwn; ++e) {
        state.out[r][e] += w.x * value[0][e];
        state.out[r][e] += w.y * value[1][e];
        state.out[r][e] += w.z * value[2][e];
        state.out[r][e] += w.w * value[3][e];
      }
    }
  }
}

/// One key after the other: every key may move a row's maximum, and then rescales all that the row has.
template <class P>
__device__ __forceinline__ void merge_elements(const float* scores, const float* values, State<P>& state) {
#pragma unroll 1
  for (int j = 0; j < P::kKeys; ++j) {
    float value[P::kOwn];
    load_value<P>(values + j * P::kDim, value);
#pragma unroll
    for (int r = 0; r < P::kWarpRows; ++r) {
      const float score = scores[r * P::kKeys + j];
      RunningSoftmax& s = state.softmax[r];
      const float max = fmaxf(s.max, score);
      const float factor = s.max == -INFINITY ? 0.0f : P::kExp == Exp::fast ? __expf(s.max - max) : expf(s.max - max);
      const float share = score == -INFINITY ? 0.0f : P::kExp == Exp::fast ? __expf(score - max) : expf(score - max);
      s = {max, s.sum * factor + share};
#pragma unroll
      for (int e = 0; e < P::kOwn; ++e) state.out[r][e] = state.out[r][e] * factor + share * value[e];
    }
  }
}

/// Everything of one tile that is in shared memory.
template <class P>
__device__ __forceinline__ void attend_tile(const Params& params, const Rows& rows, std::int64_t first_key, const Shared<P>& shared,
                                            int side, State<P>& state) {
  const int warp_row = threadIdx.x / kWarpSize * P::kWarpRows;
  float* scores = shared.weights + warp_row * P::kKeys;
  score_tile<P>(params, rows, first_key, shared, side, warp_row, scores);
  if constexpr (P::kMerge == Merge::row_max) {
    merge_by_row_max<P>(scores, state);
    add_values<P>(scores, shared.values(side), state);
  } else {
    merge_elements<P>(scores, shared.values(side), state);
  }
}

template <class P>
__device__ __forceinline__ void store_rows(const SoftmaxProblem& p, const Rows& rows, State<P>& state) {
  const int lane = threadIdx.x % kWarpSize, warp_row = threadIdx.x / kWarpSize * P::kWarpRows;
#pragma unroll
  for (int r = 0; r < P::kWarpRows; ++r) {
    RunningSoftmax s = state.softmax[r];
    if (P::kMerge == Merge::row_max) s.sum = warp_sum(s.sum);
    if (warp_row + r >= rows.count) continue;
    const std::int64_t row = rows.pair.query_begin + rows.first + warp_row + r;
    const std::int64_t start = p.out.offset(rows.pair.batch, row, rows.head);
    const float factor = normalizer(s);
#pragma unroll
    for (int e = 0; e < P::kOwn; ++e) {
      const int channel = lane * P::kOwn + e;
      if (channel < p.head_dim) p.out.store(start + channel, factor * state.out[r][e]);
    }
    if (p.lse.present && lane == 0) p.lse.store(p.lse.offset(rows.pair.batch, row, rows.head), log_sum(s));
  }
}

/// One block's work.
template <class P>
__device__ void attend_rows(const Params& params, std::int64_t block, float* memory) {
  const SoftmaxProblem& p = params.problem;
  const Rows rows = Rows::of(params, block, P());
  if (rows.count == 0) return;
  const Shared<P> shared(memory);
  State<P> state;
  const std::int64_t begin = rows.range.begin / P::kKeys * P::kKeys, end = rows.range.end;
  load_queries<P>(params, rows, p.scale, shared.q);
  if (!P::kPlain && threadIdx.x < P::kRows) {
    const int row = threadIdx.x;
    shared.seen[row] = row < rows.count ? p.visible(rows.pair, rows.first + row) : KeyRange();
  }
  if (P::kBuffers == 2 && begin < end) load_tile<P>(params, rows, begin, shared, 0);
  int side = 0;
  for (std::int64_t first = begin; first < end; first += P::kKeys) {
    if constexpr (P::kBuffers == 2) {
      __pipeline_wait_prior(0);
      __syncthreads();  // the tile is here; the one before is done with
      if (first + P::kKeys < end) load_tile<P>(params, rows, first + P::kKeys, shared, 1 - side);
      attend_tile<P>(params, rows, first, shared, side, state);
      side = 1 - side;
    } else {
      __syncthreads();  // the tile before is done with
      load_tile<P>(params, rows, first, shared, 0);
      __syncthreads();
      attend_tile<P>(params, rows, first, shared, 0, state);
    }
  }
  store_rows<P>(p, rows, state);
}

}  // namespace delta_attention::tile
