#pragma once

// The kernel decode's device code: what decode.cu tells the story of. Apart from it, so that host threads can run it.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/device/rows.cuh"
#include "cuda/softmax/splits.cuh"

namespace delta_attention::decode {

constexpr int kMostRows = 16;   // rows of q that a pass over the keys serves
constexpr int kMostSize = 256;  // channels
constexpr std::int64_t kMostKeys = std::int64_t{1} << 30;  // a place among a sequence's keys is an int

/// A group of lanes holds a key, eight channels a lane; a thread's part of a tile is kKeys keys and their values.
template <class StoredElement, int kLanesOfGroup, int kRowsOfBlock>
struct Policy {
  using Element = StoredElement;
  static constexpr int kLanes = kLanesOfGroup, kRows = kRowsOfBlock;
  static constexpr int kThreads = 128, kChannels = 8, kKeys = 4;
  static constexpr int kGroups = kThreads / kLanes, kTile = kGroups * kKeys;
  static constexpr int kSize = kLanes * kChannels;
  static constexpr int kPieces = kChannels * static_cast<int>(sizeof(Element)) / 16;  // of 16 bytes
  static constexpr int kStages = 4 / kPieces;
  /// Rows whose dot products with the keys are summed over the group at once: each lane then owns one score.
  static constexpr int kRowsAtOnce = kRows < 4 ? kRows : (kLanes / kKeys < 4 ? kLanes / kKeys : 4);
  static constexpr int kRowParts = kRows / kRowsAtOnce;
  static constexpr int kScores = kRowsAtOnce * kKeys;
  static constexpr int kCopies = kLanes / kScores;  // neighbouring lanes with the same score
  static_assert(kCopies >= 1 && kRows % kRowsAtOnce == 0);

  // Shared memory, in float4. The sums of the groups take the stages' place at the end.
  static constexpr int kStagePieces = 2 * kKeys * kPieces * kThreads;
  static constexpr int kSumPieces = kGroups * kRows * kSize / 4;
  static constexpr int kBuffer = kStages * kStagePieces > kSumPieces ? kStages * kStagePieces : kSumPieces;
  static constexpr int kQueries = kRows * kSize / 4;
  static constexpr int kWeights = kGroups * kRows;  // kKeys = 4 a float4
  static constexpr int kFactors = kGroups * ((kRows + 3) / 4);
  static constexpr int kStats = kGroups * ((kRows + 1) / 2);
  static constexpr int kRanges = (kRows + 1) / 2;
  static constexpr std::size_t kBytes =
      sizeof(float4) * static_cast<std::size_t>(kBuffer + kQueries + kWeights + kFactors + kStats + kRanges);
};

struct Params {
  SoftmaxProblem problem;
  bool in_pieces;  // rows of k and v can be copied in pieces of 16 bytes
  Partials partials;
};

/// What a block works on: part `split` of the keys of one sequence and key head.
struct Block {
  std::int64_t n;
  SequencePair sequence;
  int key_head, split;
  int shared_heads;  // query heads of this key head
};

/// Keys that a row sees.
struct Span {
  int begin, end;
};

template <class P>
struct Shared {
  float4* buffer;
  float4* queries;
  float4* weights;
  float* factors;
  RunningSoftmax* stats;
  Span* ranges;

  __device__ __forceinline__ explicit Shared(float4* memory)
      : buffer(memory),
        queries(buffer + P::kBuffer),
        weights(queries + P::kQueries),
        factors(reinterpret_cast<float*>(weights + P::kWeights)),
        stats(reinterpret_cast<RunningSoftmax*>(weights + P::kWeights + P::kFactors)),
        ranges(reinterpret_cast<Span*>(weights + P::kWeights + P::kFactors + P::kStats)) {}

  /// A thread's own piece of a staged key (operand 0) or value (1): nobody else touches it.
  __device__ __forceinline__ float4* piece(int stage, int operand, int key, int piece_of_key) const {
    return buffer + (((stage * 2 + operand) * P::kKeys + key) * P::kPieces + piece_of_key) * P::kThreads + threadIdx.x;
  }
};

/// This thread's group, and its lane there.
template <class P>
__device__ __forceinline__ int group_of_thread() {
  return static_cast<int>(threadIdx.x) / P::kLanes;
}
template <class P>
__device__ __forceinline__ int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % P::kLanes;
}

/// Neighbouring blocks take neighbouring heads: their rows of the same key lie side by side in most layouts.
__device__ __forceinline__ Block block_of(const Params& params, std::int64_t index) {
  const SoftmaxProblem& p = params.problem;
  Block block;
  block.key_head = static_cast<int>(index % p.key_heads);
  block.split = static_cast<int>(index / p.key_heads % params.partials.splits);
  block.n = index / p.key_heads / params.partials.splits;
  block.sequence = p.sequence(block.n);
  block.shared_heads = static_cast<int>(p.heads / p.key_heads);
  return block;
}

/// A row of a block in the problem.
struct Row {
  int query, head;
};
__device__ __forceinline__ Row row_of(const Block& block, int row) {
  return {row / block.shared_heads, block.key_head * block.shared_heads + row % block.shared_heads};
}

__device__ __forceinline__ Span span_of(const Params& params, const Block& block, int row) {
  const KeyRange range = params.problem.visible(block.sequence, row_of(block, row).query);
  return {static_cast<int>(range.begin), static_cast<int>(range.end)};
}

/// This block's share of the keys that any of these rows sees. Both ends of what a row sees grow with the row.
__device__ __forceinline__ Span share_of(const Params& params, const Block& block, int first_row, int rows, int tile) {
  const Span first = span_of(params, block, first_row), last = span_of(params, block, first_row + rows - 1);
  const int keys = last.end > first.begin ? last.end - first.begin : 0;
  const int tiles = static_cast<int>(ceil_div(ceil_div(keys, tile), params.partials.splits));
  const std::int64_t begin = first.begin + static_cast<std::int64_t>(tiles) * tile * block.split;
  const std::int64_t end = begin + static_cast<std::int64_t>(tiles) * tile;
  return {static_cast<int>(begin < last.end ? begin : last.end), static_cast<int>(end < last.end ? end : last.end)};
}

/// Where a key and its value lie. With pages, one look into the table for both; the division has 32 bits, since keys do.
struct Offsets {
  std::int64_t key, value;
};
__device__ __forceinline__ Offsets offsets_of(const SoftmaxProblem& p, const Block& block, int key) {
  std::int64_t major = block.sequence.batch, minor = block.sequence.key_begin + key;
  if (p.paged()) {
    const unsigned size = static_cast<unsigned>(p.page_size), page = static_cast<unsigned>(key) / size;
    minor = static_cast<unsigned>(key) - page * size;
    major = SoftmaxProblem::load_count(p.block_table, block.n * p.block_table.strides[0] + page * p.block_table.strides[1],
                                       p.pages - 1);
  }
  return {p.k.offset(major, minor, block.key_head), p.v.offset(major, minor, block.key_head)};
}

/// Starts copying a thread's eight channels at `offset` to its own pieces; what does not exist becomes 0 and is not touched.
template <class P>
__device__ __forceinline__ void start_channels(const Params& params, const void* data, std::int64_t offset, bool exists, int stage,
                                               int operand, int key, const Shared<P>& shared) {
  using Element = typename P::Element;
  constexpr int kPerPiece = 16 / static_cast<int>(sizeof(Element));
  const int first = lane_of_thread<P>() * P::kChannels;
  const int size = static_cast<int>(params.problem.head_dim);
  const Element* from = static_cast<const Element*>(data) + offset + first;
#pragma unroll
  for (int i = 0; i < P::kPieces; ++i) {
    float4* to = shared.piece(stage, operand, key, i);
    if (exists && params.in_pieces && first < size) {
      __pipeline_memcpy_async(to, from + i * kPerPiece, 16);
      continue;
    }
    Piece<Element, kPerPiece> piece;
#pragma unroll
    for (int e = 0; e < kPerPiece; ++e) {
      const int channel = i * kPerPiece + e;
      piece.element[e] = exists && first + channel < size ? from[channel] : from_float<Element>(0.0f);
    }
    *reinterpret_cast<Piece<Element, kPerPiece>*>(to) = piece;
  }
}

/// The key at place `i` of this thread's part of a tile: neighbouring groups take neighbouring keys.
template <class P>
__device__ __forceinline__ int key_of(int tile_begin, int i) {
  return tile_begin + i * P::kGroups + group_of_thread<P>();
}

template <class P>
__device__ __forceinline__ void start_tile(const Params& params, const Block& block, const Span& share, int tile, int stage,
                                           const Shared<P>& shared) {
  const SoftmaxProblem& p = params.problem;
  const int begin = share.begin + tile * P::kTile;
  if (begin < share.end) {
    Offsets at[P::kKeys];
#pragma unroll
    for (int i = 0; i < P::kKeys; ++i) {
      const int key = key_of<P>(begin, i);
      at[i] = key < share.end ? offsets_of(p, block, key) : Offsets{0, 0};
    }
#pragma unroll
    for (int i = 0; i < P::kKeys; ++i) {
      const bool exists = key_of<P>(begin, i) < share.end;
      start_channels(params, p.k.data, at[i].key, exists, stage, 0, i, shared);
      start_channels(params, p.v.data, at[i].value, exists, stage, 1, i, shared);
    }
  }
  __pipeline_commit();  // also of nothing: stages are counted
}

/// This thread's channels of a key or value as f32.
template <class P>
__device__ __forceinline__ void load_channels(const Shared<P>& shared, int stage, int operand, int key, float (&x)[P::kChannels]) {
  using Element = typename P::Element;
  constexpr int kPerPiece = 16 / static_cast<int>(sizeof(Element));
#pragma unroll
  for (int i = 0; i < P::kPieces; ++i) {
    const auto piece = *reinterpret_cast<const Piece<Element, kPerPiece>*>(shared.piece(stage, operand, key, i));
#pragma unroll
    for (int e = 0; e < kPerPiece; ++e) x[i * kPerPiece + e] = to_float(piece.element[e]);
  }
}

/// Where channel `channel` of a row of q lies in shared memory: the lanes' first four channels, then their last four, so that neighbouring
/// lanes read neighbouring pieces.
template <class P>
__device__ __forceinline__ int query_place(int row, int channel) {
  return (row * 2 + channel % P::kChannels / 4) * P::kLanes * 4 + channel / P::kChannels * 4 + channel % 4;
}

/// Rows of q as f32, 0 where a row or channel does not exist, and what each row sees. All threads of the block.
template <class P>
__device__ __forceinline__ void load_queries(const Params& params, const Block& block, int first_row, int rows,
                                             const Shared<P>& shared) {
  const SoftmaxProblem& p = params.problem;
  auto* queries = reinterpret_cast<float*>(shared.queries);
  for (int i = threadIdx.x; i < P::kRows * P::kSize; i += P::kThreads) {
    const int row = i / P::kSize, channel = i % P::kSize;
    const Row at = row_of(block, first_row + row);
    const bool exists = row < rows && channel < p.head_dim;
    queries[query_place<P>(row, channel)] =
        exists ? p.q.load(p.q.offset(block.sequence.batch, block.sequence.query_begin + at.query, at.head, channel)) : 0.0f;
  }
  const int row = threadIdx.x;
  if (row < P::kRows) shared.ranges[row] = row < rows ? span_of(params, block, first_row + row) : Span{0, 0};
}

/// What a thread carries over the keys: of the rows whose scores it owns, the softmax (its sum over the keys of its own); of all rows,
/// the weighted sum of its channels of the values of its group.
template <class P>
struct Running {
  RunningSoftmax softmax[P::kRowParts];
  float sum[P::kRows][P::kChannels] = {};
};

/// Which row of a part and which key of a thread's kKeys the score that this lane owns belongs to.
template <class P>
__device__ __forceinline__ int owned_score() {
  return lane_of_thread<P>() / P::kCopies;
}

/// Scores of one part of the rows with this group's keys, and their weights relative to the new maxima, into shared memory. True if a
/// maximum has grown.
template <class P>
__device__ __forceinline__ bool weigh_keys(const Params& params, const Block& block, int first_row, int part, int tile_begin,
                                           const float (&k)[P::kKeys][P::kChannels], const Shared<P>& shared, RunningSoftmax& running) {
  const int lane = lane_of_thread<P>(), group = group_of_thread<P>();
  float products[P::kScores];
#pragma unroll
  for (int r = 0; r < P::kRowsAtOnce; ++r) {
    const float4* q = shared.queries + (part * P::kRowsAtOnce + r) * 2 * P::kLanes + lane;
    const float4 low = q[0], high = q[P::kLanes];
#pragma unroll
    for (int i = 0; i < P::kKeys; ++i) {
      products[r * P::kKeys + i] = low.x * k[i][0] + low.y * k[i][1] + low.z * k[i][2] + low.w * k[i][3] + high.x * k[i][4] +
                                   high.y * k[i][5] + high.z * k[i][6] + high.w * k[i][7];
    }
  }
  const float product = spread_sum<P::kLanes, 1>(products, threadIdx.x % kWarpSize);

  const int row = part * P::kRowsAtOnce + owned_score<P>() / P::kKeys, place = owned_score<P>() % P::kKeys;
  const int key = key_of<P>(tile_begin, place);
  const Span range = shared.ranges[row];
  float score = -INFINITY;
  if (key >= range.begin && key < range.end) {
    const Row at = row_of(block, first_row + row);
    score = score_of(params.problem, params.problem.scale * product, block.sequence.batch, at.head, at.query, key);
  }
  float max = fmaxf(running.max, score);
#pragma unroll
  for (int step = P::kCopies; step < P::kCopies * P::kKeys; step *= 2) max = fmaxf(max, __shfl_xor_sync(kFullWarp, max, step));

  const float factor = rescaling(running.max, max), weighed = weight(score, max);
  const bool grown = max > running.max;
  running = {max, running.sum * factor + weighed};
  if (lane % P::kCopies == 0) {
    reinterpret_cast<float*>(shared.weights + group * P::kRows + row)[place] = weighed;
    if (place == 0) shared.factors[group * P::kRows + row] = factor;
  }
  return grown;
}

/// Adds this group's weighted values to the sums of rows [0, rows).
template <class P>
__device__ __forceinline__ void add_values(int stage, int rows, bool rescale, const Shared<P>& shared, Running<P>& running) {
  const int group = group_of_thread<P>();
  float v[P::kKeys][P::kChannels];
#pragma unroll
  for (int i = 0; i < P::kKeys; ++i) load_channels(shared, stage, 1, i, v[i]);
#pragma unroll
  for (int row = 0; row < P::kRows; ++row) {
    if (row / P::kRowsAtOnce * P::kRowsAtOnce >= rows) continue;
    const float4 w = shared.weights[group * P::kRows + row];
    const float factor = rescale ? shared.factors[group * P::kRows + row] : 1.0f;
#pragma unroll
    for (int c = 0; c < P::kChannels; ++c) {
      float sum = running.sum[row][c];
      if (rescale) sum *= factor;
      running.sum[row][c] = sum + w.x * v[0][c] + w.y * v[1][c] + w.z * v[2][c] + w.w * v[3][c];
    }
  }
}

/// One tile of keys and values against all rows.
template <class P>
__device__ __forceinline__ void attend_tile(const Params& params, const Block& block, int first_row, int rows, int tile_begin,
                                            int stage, const Shared<P>& shared, Running<P>& running) {
  bool grown = false;
  {
    float k[P::kKeys][P::kChannels];
#pragma unroll
    for (int i = 0; i < P::kKeys; ++i) load_channels(shared, stage, 0, i, k[i]);
#pragma unroll
    for (int part = 0; part < P::kRowParts; ++part) {
      if (part * P::kRowsAtOnce >= rows) continue;
      grown |= weigh_keys<P>(params, block, first_row, part, tile_begin, k, shared, running.softmax[part]);
    }
  }
  const bool rescale = __any_sync(kFullWarp, grown);
  __syncwarp();  // weights have been written
  add_values(stage, rows, rescale, shared, running);
  __syncwarp();  // and read
}

/// The groups' sums and statistics of every row, into shared memory.
template <class P>
__device__ __forceinline__ void share_sums(Running<P>& running, const Shared<P>& shared) {
  const int lane = lane_of_thread<P>(), group = group_of_thread<P>();
#pragma unroll
  for (int part = 0; part < P::kRowParts; ++part) {
    RunningSoftmax stat = running.softmax[part];
#pragma unroll
    for (int step = P::kCopies; step < P::kCopies * P::kKeys; step *= 2) stat.sum += __shfl_xor_sync(kFullWarp, stat.sum, step);
    if (lane % (P::kCopies * P::kKeys) == 0) {
      shared.stats[group * P::kRows + part * P::kRowsAtOnce + owned_score<P>() / P::kKeys] = stat;
    }
  }
  float4* sums = shared.buffer + (group * P::kRows * P::kSize + lane * P::kChannels) / 4;
#pragma unroll
  for (int row = 0; row < P::kRows; ++row) {
    const float(&x)[P::kChannels] = running.sum[row];
    sums[row * P::kSize / 4] = make_float4(x[0], x[1], x[2], x[3]);
    sums[row * P::kSize / 4 + 1] = make_float4(x[4], x[5], x[6], x[7]);
  }
}

/// Merges the groups' sums: into the outputs, or into the workspace where other blocks have the rest of the keys.
template <class P>
__device__ __forceinline__ void store_rows(const Params& params, const Block& block, int first_row, int rows,
                                           const Shared<P>& shared) {
  const SoftmaxProblem& p = params.problem;
  const int size = static_cast<int>(p.head_dim);
  const auto* sums = reinterpret_cast<const float*>(shared.buffer);
  for (int i = threadIdx.x; i < rows * P::kSize; i += P::kThreads) {
    const int row = i / P::kSize, channel = i % P::kSize;
    if (channel >= size) continue;
    const RunningSoftmax* stats = shared.stats + row;
    const RunningSoftmax all = merged(stats, P::kGroups, P::kRows);
    float sum = 0.0f;
    for (int g = 0; g < P::kGroups; ++g) {
      sum += rescaling(stats[g * P::kRows].max, all.max) * sums[(g * P::kRows + row) * P::kSize + channel];
    }
    const Row at = row_of(block, first_row + row);
    store_split(p, params.partials, block.split, block.sequence.batch, block.sequence.query_begin + at.query, at.head, channel, sum, all);
  }
}

/// Rows [first_row, first_row + rows) of a block over its share of the keys.
template <class P>
__device__ __forceinline__ void attend_rows(const Params& params, const Block& block, int first_row, int rows,
                                            const Shared<P>& shared) {
  const Span share = share_of(params, block, first_row, rows, P::kTile);
  const int tiles = static_cast<int>(ceil_div(share.end - share.begin, P::kTile));
  for (int stage = 0; stage < P::kStages - 1; ++stage) start_tile(params, block, share, stage, stage, shared);
  load_queries(params, block, first_row, rows, shared);
  __syncthreads();

  Running<P> running;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    // Into the stage that the tile before has left.
    start_tile(params, block, share, tile + P::kStages - 1, (tile + P::kStages - 1) % P::kStages, shared);
    __pipeline_wait_prior(P::kStages - 1);
    attend_tile(params, block, first_row, rows, share.begin + tile * P::kTile, tile % P::kStages, shared, running);
  }
  __pipeline_wait_prior(0);
  __syncthreads();  // nobody needs the stages any more
  share_sums(running, shared);
  __syncthreads();
  store_rows(params, block, first_row, rows, shared);
}

/// All that a block does.
template <class P>
__device__ __forceinline__ void decode_block(const Params& params, std::int64_t index, float4* memory) {
  const Shared<P> shared(memory);
  const Block block = block_of(params, index);
  const int rows = static_cast<int>(block.sequence.queries) * block.shared_heads;
  for (int first = 0; first < rows; first += P::kRows) {
    if (first > 0) __syncthreads();
    attend_rows(params, block, first, rows - first < P::kRows ? rows - first : P::kRows, shared);
  }
}

}  // namespace delta_attention::decode
