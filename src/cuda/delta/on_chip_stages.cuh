#pragma once

// The stages of the on-chip chain (on_chip_kernel.cuh tells its story): what one block does with one prepared micro-chunk, as functions.
// "Rows" are the block's key channels, "columns" its value columns, "vectors" the 2F vectors W_i and Q_i. The first P::kThreads threads
// compute, the other P::kHelpers fetch tiles and store outputs.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/delta/on_chip_prepare.cuh"
#include "cuda/device/signal.cuh"
#include "cuda/device/warp.cuh"
#include "state/state_update.h"

namespace delta_attention::on_chip {

constexpr int kMostStaged = 8;  // 16-byte pieces that a helper holds with Loads::registers

/// Which columns of a row a thread touches together, and how. They differ in shared-memory bank conflicts alone.
enum class Layout {
  row_major,  // 4 neighbours, one by one: lanes lie 4 words apart, so 4 of them meet on a bank
  striped,    // one of each of 4 stripes: neighbouring lanes touch neighbouring banks
  vectors,    // 4 neighbours in one 16-byte access: row-major without the conflicts
};

/// How prepared micro-chunks come from global memory.
enum class Loads {
  async_copies,  // straight to shared memory (cp.async), under the micro-chunk before
  registers,     // through registers, which stay taken until the micro-chunk before is done
};

/// What is fixed at compile time.
template <class SumType, int kFlushValue, int kColumnsValue, int kThreadsValue, Layout kLayoutValue, Loads kLoadsValue>
struct Policy {
  using Sum = SumType;
  static constexpr int kFlush = kFlushValue;      // F: tokens of a micro-chunk
  static constexpr int kColumns = kColumnsValue;  // C: value columns of a block
  static constexpr int kThreads = kThreadsValue;  // that compute
  static constexpr Layout kLayout = kLayoutValue;
  static constexpr Loads kLoads = kLoadsValue;

  // Slices of 8 columns are for few heads, where a block has a multiprocessor to itself: more threads to help and more registers.
  static constexpr int kHelpers = kColumns == 8 ? 128 : 64;  // threads that fetch tiles and store outputs
  static constexpr int kBlocksPerMultiprocessor = kLoads == Loads::registers || kColumns == 8 ? 1 : 512 / kThreads;
  static constexpr bool kCompensated = sizeof(Sum) == 2 * sizeof(float);
  static constexpr int kColumnGroups = kColumns / 4;
  static constexpr int kVectors = 2 * kFlush;
  static constexpr int kVectorTile = kFlush == 1 ? 2 : 4;  // vectors that a thread multiplies the state with at once
  static constexpr int kTiles = kVectors / kVectorTile * kColumnGroups;
  static constexpr int kRowGroups = kThreads / kTiles;  // threads that share a tile, each with some of the rows
  static_assert(kTiles <= kThreads && kColumns % 4 == 0, "every tile has a thread, rows of U are whole pieces");

  // What blocks exchange for a micro-chunk, in floats: predictions S0^T W_i [F][C], reads S0^T Q_i [F][C], denominators z0^T Q_i [F].
  static constexpr int kReads = kFlush * kColumns;
  static constexpr int kDenominators = 2 * kReads;
  static constexpr int kExchange = (kDenominators + kFlush + 3) / 4 * 4;

  // Lanes that add up a piece of what the row groups have: all threads have something to do.
  static constexpr int kSplit = kDenominators / 4 >= kThreads ? 1 : 4 * kThreads / kDenominators;
  static_assert(kSplit <= kRowGroups && kSplit <= kWarpSize && kRowGroups % kSplit == 0);

  /// Products are stored, exchanged and summed in the order that the threads which made them lie in (with Layout::vectors), so that
  /// neighbouring threads touch neighbouring pieces; this is the place of such a piece in the arrays above.
  static __device__ __forceinline__ int place_of(int piece) {
    if (kLayout != Layout::vectors || piece >= kDenominators / 4) return piece;
    const int tile = piece % kTiles, vector = tile / kColumnGroups * kVectorTile + piece / kTiles;
    return vector * kColumnGroups + tile % kColumnGroups;
  }

  /// Pieces of four numbers that are exchanged: denominators only where they are asked for.
  static __device__ __forceinline__ int pieces(const Problem& p) {
    return (p.normalize ? kExchange : kDenominators) / 4;
  }
};

/// How far a loop is unrolled: `roomy` where a block has a multiprocessor's registers to itself. Before sm_90 the compiler needs more
/// registers for the same code: there, loops stay rolled up wherever it would spill otherwise.
template <class P>
__device__ constexpr int unrolled(int roomy, [[maybe_unused]] int tight) {
#if __CUDA_ARCH__ >= 900
  return P::kBlocksPerMultiprocessor == 1 ? roomy : tight;
#else
  return P::kBlocksPerMultiprocessor == 1 && P::kThreads == 256 ? roomy : 1;
#endif
}

/// The block's share of one (sequence, value head).
struct Block {
  std::int64_t sequence, batch, first_token, value_head;
  std::int64_t tokens;  // of the sequence
  std::int64_t first_row, first_column;
  int rank;              // of the row block
  int rows, columns;     // that exist, of the block's row tile and kColumns
  const float* factors;  // of the first micro-chunk
};

/// One prepared micro-chunk in shared memory.
struct Tile {
  float* vectors;    // [rows][2F]
  float* keys;       // [rows][F]
  float* decay_end;  // [rows]
  float* values;     // [F][C]
};

template <class P>
struct Shared {
  float *state, *state_compensation;            // [rows][C]
  float *normalizer, *normalizer_compensation;  // [rows]
  float* partial;                               // [kRowGroups][2F C / 4] pieces of four products (P::place_of)
  float *denominators, *divisors;               // [F]  the block's part of z0^T Q_i; z^T q_i
  float *all_sums, *all_u;                      // [2][kExchange], [2][F][C]
  float* all_products;                          // [3][F][F]  A, kept until the outputs are stored
  float* all_tiles;                             // [buffers][tile_floats()]
  int rows, tile_step;

  __device__ Shared(float* memory, int row_tile, int buffers) {
    layout(row_tile, buffers, [&memory](float*& place, int count) {
      place = memory;
      memory += count;
    });
    rows = row_tile;
    tile_step = buffers == 1 ? 0 : tile_floats(row_tile);
  }

  /// Floats in all.
  static std::size_t count(int row_tile, int buffers) {
    Shared unplaced;
    std::size_t sum = 0;
    unplaced.layout(row_tile, buffers, [&sum](float*&, int floats) { sum += static_cast<std::size_t>(floats); });
    return sum;
  }

  static __host__ __device__ int tile_floats(int rows) { return rows * (3 * P::kFlush + 1) + P::kFlush * P::kColumns; }

  // Micro-chunks take turns: `side` is 0 or 1.
  __device__ float* sums(int side) const { return all_sums + side * P::kExchange; }
  __device__ float* u(int side) const { return all_u + side * (P::kFlush * P::kColumns); }
  __device__ float* products(int third) const { return all_products + third * kProductsFloats; }
  __device__ Tile tile(int side) const {
    Tile part;
    part.vectors = all_tiles + side * tile_step;
    part.keys = part.vectors + rows * 2 * P::kFlush;
    part.decay_end = part.keys + rows * P::kFlush;
    part.values = part.decay_end + rows;
    return part;
  }

 private:
  static constexpr int kProductsFloats = (P::kFlush * P::kFlush + 3) / 4 * 4;
  Shared() = default;

  /// Calls take(place, floats) for every array, in order; all sizes are multiples of 16 bytes.
  template <class Take>
  __host__ __device__ void layout(int row_tile, int buffers, Take take_floats) {
    constexpr int kF = P::kFlush;
    const auto take = [&](float*& place, int count) { take_floats(place, (count + 3) / 4 * 4); };
    take(state, row_tile * P::kColumns);
    take(state_compensation, P::kCompensated ? row_tile * P::kColumns : 0);
    take(normalizer, row_tile);
    take(normalizer_compensation, P::kCompensated ? row_tile : 0);
    take(partial, P::kRowGroups * P::kVectors * P::kColumns);
    take(denominators, kF);
    take(divisors, kF);
    take(all_sums, 2 * P::kExchange);
    take(all_u, 2 * kF * P::kColumns);
    take(all_products, 3 * kProductsFloats);
    take(all_tiles, buffers * tile_floats(row_tile));
  }
};

/// Column `e` of the four that column group `group` holds.
template <class P>
__device__ __forceinline__ int column_of(int group, int e) {
  return P::kLayout == Layout::striped ? group + e * P::kColumnGroups : group * 4 + e;
}

/// Four columns of a row in shared memory.
template <class P>
__device__ __forceinline__ void load_four(const float* row, int group, float (&x)[4]) {
  if constexpr (P::kLayout == Layout::vectors) {
    const float4 four = reinterpret_cast<const float4*>(row)[group];
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
    const volatile float* one = row;  // one by one: the compiler would make vectors of them
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = one[column_of<P>(group, e)];
  }
}
template <class P>
__device__ __forceinline__ void store_four(float* row, int group, const float (&x)[4]) {
  if constexpr (P::kLayout == Layout::vectors) {
    reinterpret_cast<float4*>(row)[group] = make_float4(x[0], x[1], x[2], x[3]);
  } else {
    volatile float* one = row;
#pragma unroll
    for (int e = 0; e < 4; ++e) one[column_of<P>(group, e)] = x[e];
  }
}

/// Four columns of a row of the state.
template <class P>
__device__ __forceinline__ void load_cells(const Shared<P>& shared, int row, int group, typename P::Sum (&cell)[4]) {
  float sum[4], compensation[4];
  load_four<P>(shared.state + row * P::kColumns, group, sum);
  if constexpr (P::kCompensated) load_four<P>(shared.state_compensation + row * P::kColumns, group, compensation);
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    cell[e].sum = sum[e];
    if constexpr (P::kCompensated) cell[e].compensation = compensation[e];
  }
}
template <class P>
__device__ __forceinline__ void store_cells(const Shared<P>& shared, int row, int group,
                                            const typename P::Sum (&cell)[4]) {
  float sum[4], compensation[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum[e] = cell[e].sum;
    if constexpr (P::kCompensated) compensation[e] = cell[e].compensation;
  }
  store_four<P>(shared.state + row * P::kColumns, group, sum);
  if constexpr (P::kCompensated) store_four<P>(shared.state_compensation + row * P::kColumns, group, compensation);
}

/// A sum kept in two places of shared memory.
template <class Sum>
__device__ __forceinline__ Sum load_sum(const float* sum, const float* compensation, int i) {
  Sum s;
  s.sum = sum[i];
  if constexpr (sizeof(Sum) == 2 * sizeof(float)) s.compensation = compensation[i];
  return s;
}
template <class Sum>
__device__ __forceinline__ void store_sum(float* sum, float* compensation, int i, const Sum& s) {
  sum[i] = s.sum;
  if constexpr (sizeof(Sum) == 2 * sizeof(float)) compensation[i] = s.compensation;
}

// ------------------------------------------------------------------------------------------------ the state's two ends

template <class P>
__device__ void load_state(const Problem& p, const Block& block, const Shared<P>& shared) {
#pragma unroll 1
  for (int i = threadIdx.x; i < shared.rows * P::kColumns; i += P::kThreads) {
    const int row = i / P::kColumns, column = i % P::kColumns;
    const bool inside = p.initial_state.present && row < block.rows && column < block.columns;
    shared.state[i] = inside ? p.initial_state.load(p.initial_state.offset(block.sequence, block.value_head,
                                                                           block.first_row + row,
                                                                           block.first_column + column))
                             : 0.0f;
    if (P::kCompensated) shared.state_compensation[i] = 0.0f;
  }
  for (int row = threadIdx.x; row < shared.rows; row += P::kThreads) {
    const bool inside = p.initial_normalizer.present && row < block.rows;
    shared.normalizer[row] = inside ? p.initial_normalizer.load(p.initial_normalizer.offset(
                                          block.sequence, block.value_head, block.first_row + row))
                                    : 0.0f;
    if (P::kCompensated) shared.normalizer_compensation[row] = 0.0f;
  }
}

template <class P>
__device__ void store_state(const Problem& p, const Block& block, const Shared<P>& shared) {
  if (p.final_state.present) {
#pragma unroll 1
    for (int i = threadIdx.x; i < block.rows * P::kColumns; i += P::kThreads) {
      const int row = i / P::kColumns, column = i % P::kColumns;
      if (column >= block.columns) continue;
      const auto cell = load_sum<typename P::Sum>(shared.state, shared.state_compensation, i);
      p.final_state.store(p.final_state.offset(block.sequence, block.value_head, block.first_row + row,
                                               block.first_column + column),
                          cell.value());
    }
  }
  if (p.final_normalizer.present && block.first_column == 0) {
    for (int row = threadIdx.x; row < block.rows; row += P::kThreads) {
      const auto z = load_sum<typename P::Sum>(shared.normalizer, shared.normalizer_compensation, row);
      p.final_normalizer.store(p.final_normalizer.offset(block.sequence, block.value_head, block.first_row + row),
                               z.value());
    }
  }
}

// ----------------------------------------------------------------------------------------- A: prepared micro-chunks come in

/// Calls move(from, to) for each 16-byte piece of a micro-chunk that is this helper's.
template <class P, class Move>
__device__ __forceinline__ void for_each_piece(const FactorLayout& layout, const Block& block, int helper,
                                               const float* factors, const Tile& tile, float* products,
                                               const Move& move) {
  constexpr int kF = P::kFlush, kPerRow = P::kColumns / 4, kProducts = (kF * kF + 3) / 4;
  const float* rows = factors + block.rank * layout.block_floats();
  constexpr int kUnroll = P::kCompensated ? 4 : unrolled<P>(4, 4);
#pragma unroll kUnroll
  for (int i = 4 * helper; i < layout.block_floats(); i += 4 * P::kHelpers) move(rows + i, tile.vectors + i);
  const float* values = factors + layout.values() + block.first_column;
  for (int i = helper; i < kF * kPerRow; i += P::kHelpers) {
    move(values + i / kPerRow * layout.value_columns + i % kPerRow * 4, tile.values + i * 4);
  }
  for (int i = helper; i < kProducts; i += P::kHelpers) move(factors + layout.products() + 4 * i, products + 4 * i);
}

/// What a helper holds of the next micro-chunk with Loads::registers.
template <class P>
struct Staged {
  float4 piece[P::kLoads == Loads::registers ? kMostStaged : 1];
};

/// Starts fetching a micro-chunk.
template <class P>
__device__ __forceinline__ void start_tile(const FactorLayout& layout, const Block& block, int helper,
                                           const float* factors, const Tile& tile, float* products, Staged<P>& staged) {
  if constexpr (P::kLoads == Loads::async_copies) {
    for_each_piece<P>(layout, block, helper, factors, tile, products,
                      [](const float* from, float* to) { __pipeline_memcpy_async(to, from, 16); });
    __pipeline_commit();
  } else {
    int next = 0;
    for_each_piece<P>(layout, block, helper, factors, tile, products, [&](const float* from, float*) {
#pragma unroll
      for (int n = 0; n < kMostStaged; ++n) {
        if (n == next) staged.piece[n] = *reinterpret_cast<const float4*>(from);
      }
      ++next;
    });
  }
}

/// Ends the fetch; the block has yet to meet.
template <class P>
__device__ __forceinline__ void finish_tile(const FactorLayout& layout, const Block& block, int helper,
                                            const Tile& tile, float* products, const Staged<P>& staged) {
  if constexpr (P::kLoads == Loads::async_copies) {
    __pipeline_wait_prior(0);
  } else {
    int next = 0;
    for_each_piece<P>(layout, block, helper, block.factors, tile, products, [&](const float*, float* to) {
#pragma unroll
      for (int n = 0; n < kMostStaged; ++n) {
        if (n == next) *reinterpret_cast<float4*>(to) = staged.piece[n];
      }
      ++next;
    });
  }
}

// ---------------------------------------------------------------------------------------------- B, C: read and exchange

/// Multiplies the state with all vectors: each row group's part of the sums to `partial`.
template <class P>
__device__ __forceinline__ void read_state(const Shared<P>& shared, const Tile& tile) {
  const int place = threadIdx.x % P::kTiles, row_group = threadIdx.x / P::kTiles;
  const int group = place % P::kColumnGroups, first_vector = place / P::kColumnGroups * P::kVectorTile;
  float product[P::kVectorTile][4] = {};
  constexpr int kUnroll = unrolled<P>(8, 2);
#pragma unroll kUnroll
  for (int row = row_group; row < shared.rows; row += P::kRowGroups) {
    StateTile<typename P::Sum, 1, 4> cells;
    load_cells<P>(shared, row, group, cells.cell[0]);
    const float* vectors = tile.vectors + row * P::kVectors + first_vector;
    float x[P::kVectorTile];
    if constexpr (P::kVectorTile == 4) {
      const float4 four = *reinterpret_cast<const float4*>(vectors);
      x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
    } else {
      const float2 two = *reinterpret_cast<const float2*>(vectors);
      x[0] = two.x, x[1] = two.y;
    }
#pragma unroll
    for (int v = 0; v < P::kVectorTile; ++v) read(cells, 0, x[v], product[v]);
  }
#pragma unroll
  for (int v = 0; v < P::kVectorTile; ++v) {
    if constexpr (P::kLayout == Layout::vectors) {
      const int piece = (row_group * P::kVectorTile + v) * P::kTiles + place;
      reinterpret_cast<float4*>(shared.partial)[piece] =
          make_float4(product[v][0], product[v][1], product[v][2], product[v][3]);
    } else {
      store_four<P>(shared.partial + (row_group * P::kVectors + first_vector + v) * P::kColumns, group, product[v]);
    }
  }
}

/// z0^T Q_i over the block's rows, a warp a token.
template <class P>
__device__ __forceinline__ void read_normalizer(const Shared<P>& shared, const Tile& tile) {
  for (int i = threadIdx.x / kWarpSize; i < P::kFlush; i += P::kThreads / kWarpSize) {
    float product = 0.0f;
    for (int row = threadIdx.x % kWarpSize; row < shared.rows; row += kWarpSize) {
      const auto z = load_sum<typename P::Sum>(shared.normalizer, shared.normalizer_compensation, row);
      product += z.value() * tile.vectors[row * P::kVectors + P::kFlush + i];
    }
    product = warp_sum(product);
    if (threadIdx.x % kWarpSize == 0) shared.denominators[i] = product;
  }
}

/// The blocks that share a state, and their memory for one flush after another.
struct Group {
  int blocks, rank;
  bool atomic;
  float* slots;  // ordered: [2][blocks][kExchange]; atomic: [3][kExchange], zero where nobody has added yet
  unsigned long long* arrivals;
  unsigned long long flushes;  // so far
  int turn;                    // flushes modulo the 2 or 3 places that a flush can have

  __device__ __forceinline__ void count_flush() {
    ++flushes;
    turn = turn == (atomic ? 2 : 1) ? 0 : turn + 1;
  }
  /// Where the flush `ahead` of this one has its slots.
  template <class P>
  __device__ __forceinline__ float* place(int ahead) const {
    const int places = atomic ? 3 : 2, at = turn + ahead < places ? turn + ahead : turn + ahead - places;
    return slots + at * (atomic ? 1 : blocks) * P::kExchange;
  }
};

__device__ __forceinline__ void add_four(float* to, const float4& x) {
#if __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float4*>(to), x);
#else
  atomicAdd(to, x.x), atomicAdd(to + 1, x.y), atomicAdd(to + 2, x.z), atomicAdd(to + 3, x.w);
#endif
}

__device__ __forceinline__ void add_to(float4& sum, const float4& x) {
  sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
}

/// Which pieces a thread sums: P::kSplit lanes of a warp share one, each with a part of the row groups, and neighbouring lanes have
/// neighbouring pieces.
template <class P>
struct PieceWalk {
  static constexpr int kAside = kWarpSize / P::kSplit;  // pieces of a warp
  int piece, part;

  __device__ __forceinline__ PieceWalk() {
    const int lane = threadIdx.x % kWarpSize;
    piece = static_cast<int>(threadIdx.x) / kWarpSize * kAside + lane % kAside;
    part = lane / kAside;
  }
  __device__ __forceinline__ void next() { piece += P::kThreads / P::kSplit; }
};

/// A piece of four numbers of what the block has for the group; the same in all lanes that share it. Whole warps.
template <class P>
__device__ __forceinline__ float4 own_part(const Shared<P>& shared, const PieceWalk<P>& walk) {
  constexpr int kPieces = P::kDenominators / 4, kPart = P::kRowGroups / P::kSplit;
  if (walk.piece >= kPieces) {
    float four[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int token = (walk.piece - kPieces) * 4 + e;
      four[e] = token < P::kFlush ? shared.denominators[token] : 0.0f;
    }
    return make_float4(four[0], four[1], four[2], four[3]);
  }
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int g = 0; g < kPart; ++g) {
    add_to(sum, reinterpret_cast<const float4*>(shared.partial)[(walk.part * kPart + g) * kPieces + walk.piece]);
  }
#pragma unroll
  for (int step = PieceWalk<P>::kAside; step < kWarpSize; step *= 2) {
    add_to(sum, make_float4(__shfl_xor_sync(kFullWarp, sum.x, step), __shfl_xor_sync(kFullWarp, sum.y, step),
                            __shfl_xor_sync(kFullWarp, sum.z, step), __shfl_xor_sync(kFullWarp, sum.w, step)));
  }
  return sum;
}

/// Hands the block's sums to the group: to its slot, or on top of everyone's.
template <class P>
__device__ __forceinline__ void publish(const Problem& p, const Group& group, const Shared<P>& shared) {
  float* slot = group.atomic ? group.place<P>(0) : group.place<P>(0) + group.rank * P::kExchange;
  for (PieceWalk<P> walk; walk.piece < P::pieces(p); walk.next()) {
    const float4 sum = own_part<P>(shared, walk);
    if (walk.part != 0) continue;
    if (group.atomic) {
      add_four(slot + walk.piece * 4, sum);
    } else {
      __stcg(reinterpret_cast<float4*>(slot) + walk.piece, sum);
    }
  }
}

/// A piece of the group's sums.
template <class P>
__device__ __forceinline__ float4 group_sum(const Group& group, int piece) {
  const float4* from = reinterpret_cast<const float4*>(group.place<P>(0)) + piece;
  if (group.atomic) return __ldcg(from);
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
  for (int rank = 0; rank < group.blocks; ++rank) add_to(sum, __ldcg(from + rank * (P::kExchange / 4)));
  return sum;
}

/// Makes the place that everyone has read the next but one: the one before this.
template <class P>
__device__ __forceinline__ void clear_next_place(const Group& group) {
  float4* next = reinterpret_cast<float4*>(group.place<P>(2));
  for (int i = group.rank * P::kThreads + threadIdx.x; i < P::kExchange / 4; i += group.blocks * P::kThreads) {
    __stcg(next + i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
  }
}

// ------------------------------------------------------------------------------------------------ D: correct, advance

/// u = U - S0^T W, from the sums over all rows; the reads S0^T Q and denominators go to `sums`. Tokens past the end contribute nothing,
/// whatever the state holds.
template <class P>
__device__ __forceinline__ void correct_tokens(const Problem& p, const Group& group, std::int64_t left,
                                               const Shared<P>& shared, const Tile& tile, float* sums, float* u) {
  for (PieceWalk<P> walk; walk.piece < P::pieces(p); walk.next()) {
    const float4 sum = group.blocks == 1 ? own_part<P>(shared, walk) : group_sum<P>(group, walk.piece);
    if (walk.part != 0) continue;
    const int i = P::place_of(walk.piece);
    if (i >= P::kReads / 4) {
      reinterpret_cast<float4*>(sums)[i] = sum;
      continue;
    }
    const float4 value = reinterpret_cast<const float4*>(tile.values)[i];
    float4 own = value;
    if (p.update == Update::delta) {
      own.x = correct<Update::delta>(value.x, sum.x, 1.0f), own.y = correct<Update::delta>(value.y, sum.y, 1.0f);
      own.z = correct<Update::delta>(value.z, sum.z, 1.0f), own.w = correct<Update::delta>(value.w, sum.w, 1.0f);
    }
    const bool inside = i * 4 / P::kColumns < left;
    reinterpret_cast<float4*>(u)[i] = inside ? own : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
}

/// S <- Diag(b_F) S + R u^T on kRows rows and four columns a thread.
template <class P, int kRows>
__device__ __forceinline__ void advance_rows(const Shared<P>& shared, const Tile& tile, const float* u) {
  for (int item = threadIdx.x; item < shared.rows / kRows * P::kColumnGroups; item += P::kThreads) {
    const int first_row = item / P::kColumnGroups * kRows, group = item % P::kColumnGroups;
    StateTile<typename P::Sum, kRows, 4> cells;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      load_cells<P>(shared, first_row + r, group, cells.cell[r]);
      decay(cells, r, tile.decay_end[first_row + r]);
    }
    constexpr int kAtOnce = P::kFlush < 4 ? P::kFlush : 4;  // tokens
    constexpr int kUnroll = unrolled<P>(4, 1);
#pragma unroll kUnroll
    for (int j = 0; j < P::kFlush; j += kAtOnce) {
      float key[kRows][kAtOnce];
#pragma unroll
      for (int r = 0; r < kRows; ++r) load_row<kAtOnce>(tile.keys + (first_row + r) * P::kFlush + j, key[r]);
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        float correction[4];
        load_four<P>(u + (j + n) * P::kColumns, group, correction);
#pragma unroll
        for (int r = 0; r < kRows; ++r) accumulate(cells, r, key[r][n], correction);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) store_cells<P>(shared, first_row + r, group, cells.cell[r]);
  }
}

template <class P>
__device__ __forceinline__ void advance(const Problem& p, const Shared<P>& shared, const Tile& tile, const float* u) {
  constexpr int kWide = P::kCompensated || unrolled<P>(4, 4) == 1 ? 2 : 4;  // rows a thread
  if (shared.rows * P::kColumns >= 4 * kWide * P::kThreads) {
    advance_rows<P, kWide>(shared, tile, u);
  } else {
    advance_rows<P, 1>(shared, tile, u);
  }
  if (!p.normalize) return;
  for (int row = threadIdx.x; row < shared.rows; row += P::kThreads) {
    auto z = load_sum<typename P::Sum>(shared.normalizer, shared.normalizer_compensation, row);
    z.scale(tile.decay_end[row]);
    for (int j = 0; j < P::kFlush; ++j) z.add(tile.keys[row * P::kFlush + j]);
    store_sum(shared.normalizer, shared.normalizer_compensation, row, z);
  }
}

/// o_i = scale (S0^T Q_i + sum_{j<=i} A_ij u_j) [/ (z0^T Q_i + sum_{j<=i} A_ij)] of one micro-chunk; of R blocks a state, each writes
/// every R-th token. The helpers.
template <class P>
__device__ __forceinline__ void store_outputs(const Problem& p, const Block& block, const Group& group,
                                              std::int64_t first, int helper, const Shared<P>& shared,
                                              const float* products, const float* sums, const float* u) {
  constexpr int kF = P::kFlush;
  const std::int64_t left = block.tokens - first;
  if (p.normalize) {
    if (helper < kF) {
      float z = sums[P::kDenominators + helper];
      for (int j = 0; j <= helper; ++j) z += products[helper * kF + j];
      shared.divisors[helper] = z;
    }
    sync_part(2, P::kHelpers);
  }
  const std::int64_t start = p.out.offset(block.batch, block.first_token + first, block.value_head) + block.first_column;
#pragma unroll 1
  for (int at = helper; at < kF * P::kColumns; at += P::kHelpers) {
    const int i = group.rank + at / P::kColumns * group.blocks, column = at % P::kColumns;
    if (i >= kF || i >= left) break;
    if (column >= block.columns) continue;
    float o = sums[P::kReads + i * P::kColumns + column];
    constexpr int kUnroll = P::kCompensated ? 4 : unrolled<P>(4, 4);
#pragma unroll kUnroll
    for (int j = 0; j <= i; ++j) o += products[i * kF + j] * u[j * P::kColumns + column];
    o *= p.scale;
    if (p.normalize) o /= shared.divisors[i];
    p.out.store(start + i * p.out.strides[1] + column, o);
  }
}

}  // namespace delta_attention::on_chip
