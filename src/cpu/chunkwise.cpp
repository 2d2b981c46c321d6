// cpu_chunkwise: 32 tokens at a time, so that the work on the state is matrix products.
//
// For the tokens i of a chunk that starts at state S0, with b_i = a_1...a_i (elementwise) and pairs j <= i:
//
//     u_i = beta_i (v_i - S0^T (b_i k_i) - sum_{j<i}  <k_i, (b_i/b_j) k_j> u_j)          additive: u_i = beta_i v_i
//     o_i = scale  (      S0^T (b_i q_i) + sum_{j<=i} <q_i, (b_i/b_j) k_j> u_j)
//     S   = Diag(b_F) S0 + sum_j ((b_F/b_j) k_j) u_j^T
//
// The state is walked a few times per chunk, by products that use what they load many times, instead of a few times per
// token. The UT transform of the DeltaNet papers (Yang et al., arXiv:2406.06484; gated: 2412.06464; per channel:
// 2510.26692) is here a forward substitution on u itself, a block of 16 tokens at a time: no inverse and no powers of
// the pair matrix, so nearly parallel keys cost no accuracy.
//
// Decays. b_i/b_j is never formed by a division: it is the product a_{j+1}...a_i, every factor and every partial
// product at most 1, so the strongest gates (and a = 0) only ever underflow to the zero they mean.
//   scalar   the products of pairs run along with i (pair_decay) and multiply the undecayed <k_i, k_j>.
//   channel  inside a block the keys themselves are decayed as i advances (block_keys). Between blocks the product is
//            cut at the start of i's block: keys_by_channel holds k_j decayed up to there, query_rows and key_rows the
//            rest, and the pairs are one matrix product. After the last block keys_by_channel holds (b_F/b_j) k_j,
//            ready for the state.
//
// No leak. A row of pairs is used up to its diagonal and no further, products run over earlier blocks only, and vector
// lanes are never summed across tokens: what a later token holds, NaN included, cannot touch an earlier output. Each
// element of a product is one sum in the order of its index, however the product is tiled, so cutting V over threads
// does not change a bit; this is why the products are written out here and not left to a library that chooses by shape.
//
// Data flow of one chunk. pairs_*: q, k, decay -> key_pairs, query_pairs, keys_by_channel, with no look at the state.
// read_state: S0 -> prediction, out. solve_unit_lower: v, beta and the pairs -> u, and the pairs' part of out.
// accumulate_state: u -> S. The products prefetch the next chunk's input meanwhile: the rows of one head lie far apart.
//
// Wins from a few tokens on, and most where K and V are large: then the products are nearly all of the work. At a token
// or two it does what cpu_sequential does with more ceremony. V is padded to 16 columns, so a small V wastes lanes.
//
// Compiled once per instruction set: DELTA_ATTENTION_ISA names the namespace, outside which nothing may be defined.

#include "cpu/chunk.h"
#include "cpu/vector.h"

namespace delta_attention::DELTA_ATTENTION_ISA {
namespace {

using cpu_kernels::Chunk;
using cpu_kernels::Index;
using cpu_kernels::kBlockTokens;

// kTileRows x 2 vectors of sums fill the register file without spilling.
constexpr int kTileRows = kLanes == 16 ? 8 : 4;

Index smaller(Index a, Index b) { return a < b ? a : b; }
Index round_up(Index n, Index unit) { return (n + unit - 1) / unit * unit; }

/// A matrix by its first element and the distance of its rows.
struct Rows {
  float* data;
  Index stride;
  float* row(Index i) const { return data + i * stride; }
};

/// Prefetches the next chunk's input a little with every tile of a product.
struct Prefetcher {
  const cpu_kernels::Run* next;
  const cpu_kernels::Run* end;
  Index runs_per_tile;

  explicit Prefetcher(const Chunk& c) : next(c.upcoming), end(c.upcoming + c.upcoming_count) {
    const Index tiles = (2 * c.tokens + c.key_dim) / kTileRows * (c.columns / (2 * kLanes));
    runs_per_tile = c.upcoming_count / (tiles + 1) + 1;
  }

  void step() {
    constexpr Index kCacheLine = 64;
    for (Index i = 0; i < runs_per_tile && next != end; ++i, ++next) {
      for (Index byte = 0; byte < next->bytes; byte += kCacheLine) __builtin_prefetch(next->data + byte, 0, 2);
    }
  }
};

/// C (+)= A B on kRows rows and kVectors vectors of columns.
template <int kRows, int kVectors>
void product_tile(Rows a, Rows b, Rows c, Index depth, bool accumulate) {
  Vector sum[kRows][kVectors];
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) sum[i][n] = accumulate ? vector_at(c.row(i) + n * kLanes) : Vector{};
  }
  for (Index l = 0; l < depth; ++l) {
    Vector b_row[kVectors];
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) b_row[n] = vector_at(b.row(l) + n * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const float x = a.row(i)[l];
#pragma GCC unroll 2
      for (int n = 0; n < kVectors; ++n) sum[i][n] += x * b_row[n];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 2
    for (int n = 0; n < kVectors; ++n) vector_at(c.row(i) + n * kLanes) = sum[i][n];
  }
}

template <int kRows, int kVectors>
Index product_rows(Prefetcher& prefetcher, Rows a, Rows b, Rows c, Index row, Index rows, Index depth,
                   bool accumulate) {
  for (; row + kRows <= rows; row += kRows) {
    product_tile<kRows, kVectors>({a.row(row), a.stride}, b, {c.row(row), c.stride}, depth, accumulate);
    prefetcher.step();
  }
  return row;
}

template <int kVectors>
void product_columns(Prefetcher& prefetcher, Rows a, Rows b, Rows c, Index rows, Index depth, bool accumulate) {
  Index row = product_rows<kTileRows, kVectors>(prefetcher, a, b, c, 0, rows, depth, accumulate);
  row = product_rows<4, kVectors>(prefetcher, a, b, c, row, rows, depth, accumulate);
  product_rows<1, kVectors>(prefetcher, a, b, c, row, rows, depth, accumulate);
}

/// C (+)= A B, A [rows][depth], B [depth][columns], columns a multiple of kLanes.
void product(Prefetcher& prefetcher, Rows a, Rows b, Rows c, Index rows, Index depth, Index columns, bool accumulate) {
  Index column = 0;
  for (; column + 2 * kLanes <= columns; column += 2 * kLanes) {
    product_columns<2>(prefetcher, a, {b.data + column, b.stride}, {c.data + column, c.stride}, rows, depth,
                       accumulate);
  }
  if (column < columns) {
    product_columns<1>(prefetcher, a, {b.data + column, b.stride}, {c.data + column, c.stride}, rows, depth,
                       accumulate);
  }
}

/// The chunk's matrices under the names of the equations.
struct Work {
  const Chunk& chunk;
  Rows q, k, v, out, state, prediction, u;
  Rows query_rows, key_rows, block_keys, keys_by_channel, query_pairs, key_pairs;

  Prefetcher prefetcher;

  explicit Work(const Chunk& c)
      : chunk(c),
        q{c.q, c.key_stride},
        k{c.k, c.key_stride},
        v{c.v, c.value_stride},
        out{c.out, c.value_stride},
        state{c.state, c.value_stride},
        prediction{c.prediction, c.value_stride},
        u{c.u, c.value_stride},
        query_rows{c.query_rows, c.key_stride},
        key_rows{c.key_rows, c.key_stride},
        block_keys{c.block_keys, c.key_stride},
        keys_by_channel{c.keys_by_channel, c.token_stride},
        query_pairs{c.query_pairs, c.token_stride},
        key_pairs{c.key_pairs, c.token_stride},
        prefetcher(c) {}

  bool delta() const { return chunk.update == Update::delta; }
};

/// row *= factor, for a row of whole vectors.
void scale_row(float* row, Index size, float factor) {
  for (Index i = 0; i < size; i += kLanes) vector_at(row + i) *= factor;
}

/// out = x * y, elementwise.
void multiply_rows(const float* x, const float* y, float* out, Index size) {
  for (Index i = 0; i < size; i += kLanes) vector_at(out + i) = vector_at(x + i) * vector_at(y + i);
}

void fill_row(float* row, Index size, float value) {
  for (Index i = 0; i < size; ++i) row[i] = value;
}

float dot(const float* x, const float* y, Index size) {
  Vector sum{};
  for (Index i = 0; i < size; i += kLanes) sum += vector_at(x + i) * vector_at(y + i);
  return sum_of_lanes(sum);
}

/// Rows [first, first + count) of `rows` become columns of keys_by_channel.
void transpose_keys(Work& w, Rows rows, Index count, Index first) {
  for (Index channel = 0; channel < w.chunk.key_dim; ++channel) {
    float* to = w.keys_by_channel.row(channel) + first;
    for (Index i = 0; i < count; ++i) to[i] = rows.row(i)[channel];
  }
}

// --- Pairs, gates none and scalar
// --------------------------------------------------------------------------------------

/// Multiplies row i of the pairs by a_{j+1}...a_i and moves the products of pairs one token on.
void decay_pairs(Work& w, Index i) {
  const float a = w.chunk.decay[i];
  float* pair_decay = w.chunk.pair_decay;
  for (Index j = 0; j < i; ++j) pair_decay[j] *= a;
  pair_decay[i] = 1.0f;
  w.chunk.token_decay[i] = i > 0 ? w.chunk.token_decay[i - 1] * a : a;
  for (Index j = 0; j < i; ++j) w.query_pairs.row(i)[j] *= pair_decay[j];
  if (!w.delta()) return;
  for (Index j = 0; j < i; ++j) w.key_pairs.row(i)[j] *= pair_decay[j];
}

void pairs_by_token_decay(Work& w) {
  const Chunk& c = w.chunk;
  transpose_keys(w, w.k, c.tokens, 0);
  for (Index begin = 0; begin < c.tokens; begin += kBlockTokens) {
    const Index count = smaller(kBlockTokens, c.tokens - begin), columns = round_up(begin + count, kLanes);
    const auto pairs = [&](Rows rows, Rows to) {
      product(w.prefetcher, {rows.row(begin), rows.stride}, w.keys_by_channel, {to.row(begin), to.stride}, count,
              c.key_dim, columns, false);
    };
    pairs(w.q, w.query_pairs);
    if (w.delta()) pairs(w.k, w.key_pairs);
  }
  if (c.gate == Gate::none) {
    fill_row(c.chunk_decay, c.key_dim, 1.0f);
    return;
  }
  for (Index i = 0; i < c.tokens; ++i) decay_pairs(w, i);
  fill_row(c.chunk_decay, c.key_dim, c.token_decay[c.tokens - 1]);
  for (Index channel = 0; channel < c.key_dim; ++channel) {
    for (Index j = 0; j < c.tokens; ++j) w.keys_by_channel.row(channel)[j] *= c.pair_decay[j];
  }
}

// --- Pairs, gate channel
// -----------------------------------------------------------------------------------------------

/// Decays kKeys keys of the block by a, and gives their products with q and k of the token that a belongs to.
template <int kKeys>
void decay_and_dot(float* keys, Index stride, const float* a, const float* q, const float* k, float* query_pairs,
                   float* key_pairs) {
  Vector with_q[kKeys] = {}, with_k[kKeys] = {};
  for (Index channel = 0; channel < stride; channel += kLanes) {
#pragma GCC unroll 4
    for (int j = 0; j < kKeys; ++j) {
      Vector& key = vector_at(keys + j * stride + channel);
      const Vector decayed = key * vector_at(a + channel);
      key = decayed;
      with_q[j] += decayed * vector_at(q + channel);
      with_k[j] += decayed * vector_at(k + channel);
    }
  }
  for (int j = 0; j < kKeys; ++j) {
    query_pairs[j] = sum_of_lanes(with_q[j]);
    key_pairs[j] = sum_of_lanes(with_k[j]);
  }
}

/// The pairs inside one block, and its rows of q and k decayed from the block's start.
void pairs_inside_block(Work& w, Index begin, Index count) {
  const Chunk& c = w.chunk;
  fill_row(c.block_decay, c.key_stride, 1.0f);
  for (Index i = 0; i < count; ++i) {
    const Index token = begin + i;
    const float* a = c.decay + token * c.key_stride;
    const float *q = w.q.row(token), *k = w.k.row(token);
    float *query_pairs = w.query_pairs.row(token) + begin, *key_pairs = w.key_pairs.row(token) + begin;
    Index j = 0;
    for (; j + 4 <= i; j += 4) {
      decay_and_dot<4>(w.block_keys.row(j), c.key_stride, a, q, k, query_pairs + j, key_pairs + j);
    }
    for (; j + 2 <= i; j += 2) {
      decay_and_dot<2>(w.block_keys.row(j), c.key_stride, a, q, k, query_pairs + j, key_pairs + j);
    }
    for (; j < i; ++j) decay_and_dot<1>(w.block_keys.row(j), c.key_stride, a, q, k, query_pairs + j, key_pairs + j);
    query_pairs[i] = dot(q, k, c.key_stride);
    for (Index channel = 0; channel < c.key_stride; channel += kLanes) {
      vector_at(w.block_keys.row(i) + channel) = vector_at(k + channel);
    }
    multiply_rows(c.block_decay, a, c.block_decay, c.key_stride);
    multiply_rows(q, c.block_decay, w.query_rows.row(token), c.key_stride);
    multiply_rows(k, c.block_decay, w.key_rows.row(token), c.key_stride);
  }
}

/// Pairs of the block's tokens with all earlier blocks of the chunk; key_rows and query_rows are decayed from the
/// block's start.
void pairs_with_earlier_blocks(Work& w, Index begin, Index count) {
  const auto pairs = [&](Rows rows, Rows to) {
    product(w.prefetcher, {rows.row(begin), rows.stride}, w.keys_by_channel, {to.row(begin), to.stride}, count,
            w.chunk.key_dim, begin, false);
  };
  pairs(w.query_rows, w.query_pairs);
  if (w.delta()) pairs(w.key_rows, w.key_pairs);
}

/// From "decayed since the block's start" to "since the chunk's start", and the keys of all tokens so far to the
/// block's end.
void carry_decay_over_block(Work& w, Index begin, Index count) {
  const Chunk& c = w.chunk;
  for (Index token = begin; token < begin + count; ++token) {
    multiply_rows(w.query_rows.row(token), c.chunk_decay, w.query_rows.row(token), c.key_stride);
    multiply_rows(w.key_rows.row(token), c.chunk_decay, w.key_rows.row(token), c.key_stride);
  }
  multiply_rows(c.chunk_decay, c.block_decay, c.chunk_decay, c.key_stride);
  for (Index channel = 0; channel < c.key_dim; ++channel) {
    scale_row(w.keys_by_channel.row(channel), begin, c.block_decay[channel]);
  }
  transpose_keys(w, w.block_keys, count, begin);
}

void pairs_by_channel_decay(Work& w) {
  const Chunk& c = w.chunk;
  fill_row(c.chunk_decay, c.key_stride, 1.0f);
  for (Index begin = 0; begin < c.tokens; begin += kBlockTokens) {
    const Index count = smaller(kBlockTokens, c.tokens - begin);
    pairs_inside_block(w, begin, count);
    pairs_with_earlier_blocks(w, begin, count);
    carry_decay_over_block(w, begin, count);
  }
}

// --- Through the state
// -------------------------------------------------------------------------------------------------

/// prediction_i = S0^T (b_i k_i) and out_i = S0^T (b_i q_i).
void read_state(Work& w) {
  const Chunk& c = w.chunk;
  const bool channel = c.gate == Gate::channel;
  product(w.prefetcher, channel ? w.query_rows : w.q, w.state, w.out, c.tokens, c.key_dim, c.columns, false);
  if (w.delta()) {
    product(w.prefetcher, channel ? w.key_rows : w.k, w.state, w.prediction, c.tokens, c.key_dim, c.columns, false);
  }
  if (c.gate != Gate::scalar) return;
  for (Index i = 0; i < c.tokens; ++i) {
    scale_row(w.out.row(i), c.columns, c.token_decay[i]);
    if (w.delta()) scale_row(w.prediction.row(i), c.columns, c.token_decay[i]);
  }
}

/// Forward substitution inside one block, on kVectors vectors of columns.
template <int kVectors>
void solve_columns(Work& w, Index begin, Index count, Index column) {
  for (Index i = begin; i < begin + count; ++i) {
    const float beta = w.chunk.beta[i];
    const float *key_pairs = w.key_pairs.row(i), *query_pairs = w.query_pairs.row(i);
    Vector predicted[kVectors], read[kVectors];
    for (int n = 0; n < kVectors; ++n) {
      predicted[n] = vector_at(w.prediction.row(i) + column + n * kLanes);
      read[n] = vector_at(w.out.row(i) + column + n * kLanes);
    }
    for (Index j = begin; j < i; ++j) {
      for (int n = 0; n < kVectors; ++n) {
        const Vector u = vector_at(w.u.row(j) + column + n * kLanes);
        predicted[n] += key_pairs[j] * u;
        read[n] += query_pairs[j] * u;
      }
    }
    for (int n = 0; n < kVectors; ++n) {
      const Vector v = vector_at(w.v.row(i) + column + n * kLanes);
      const Vector u = w.delta() ? beta * (v - predicted[n]) : beta * v;
      vector_at(w.u.row(i) + column + n * kLanes) = u;
      vector_at(w.out.row(i) + column + n * kLanes) = read[n] + query_pairs[i] * u;
    }
  }
}

void solve_block(Work& w, Index begin, Index count) {
  Index column = 0;
  for (; column + 2 * kLanes <= w.chunk.columns; column += 2 * kLanes) solve_columns<2>(w, begin, count, column);
  if (column < w.chunk.columns) solve_columns<1>(w, begin, count, column);
}

/// u and out, block by block: what earlier blocks contribute is a product, the block itself a substitution.
void solve_unit_lower(Work& w) {
  const Chunk& c = w.chunk;
  for (Index begin = 0; begin < c.tokens; begin += kBlockTokens) {
    const Index count = smaller(kBlockTokens, c.tokens - begin);
    const auto add_earlier = [&](Rows pairs, Rows to) {
      product(w.prefetcher, {pairs.row(begin), pairs.stride}, w.u, {to.row(begin), to.stride}, count, begin, c.columns,
              true);
    };
    if (w.delta()) add_earlier(w.key_pairs, w.prediction);
    add_earlier(w.query_pairs, w.out);
    solve_block(w, begin, count);
  }
}

/// z_i^T q_i, the divisor of token i: what z0 gives plus the sum of its pairs.
float divisor(Work& w, Index i) {
  const Chunk& c = w.chunk;
  float sum = dot(c.normalizer, c.gate == Gate::channel ? w.query_rows.row(i) : w.q.row(i), c.key_stride);
  if (c.gate == Gate::scalar) sum *= c.token_decay[i];
  for (Index j = 0; j <= i; ++j) sum += w.query_pairs.row(i)[j];
  return sum;
}

void scale_out(Work& w) {
  const Chunk& c = w.chunk;
  for (Index i = 0; i < c.tokens; ++i) {
    scale_row(w.out.row(i), c.columns, c.normalize ? c.scale / divisor(w, i) : c.scale);
  }
}

/// S = Diag(b_F) S0 + sum_j ((b_F/b_j) k_j) u_j^T, and z with ones for u.
void accumulate_state(Work& w) {
  const Chunk& c = w.chunk;
  if (c.gate != Gate::none) {
    for (Index channel = 0; channel < c.key_dim; ++channel) {
      scale_row(w.state.row(channel), c.columns, c.chunk_decay[channel]);
    }
  }
  product(w.prefetcher, w.keys_by_channel, w.u, w.state, c.key_dim, c.tokens, c.columns, true);
  if (!c.normalize) return;
  for (Index channel = 0; channel < c.key_dim; ++channel) {
    float z = c.normalizer[channel] * c.chunk_decay[channel];
    for (Index j = 0; j < c.tokens; ++j) z += w.keys_by_channel.row(channel)[j];
    c.normalizer[channel] = z;
  }
}

}  // namespace

void chunkwise_chunk(const Chunk& chunk) {
  Work w(chunk);
  if (chunk.gate == Gate::channel) {
    pairs_by_channel_decay(w);
  } else {
    pairs_by_token_decay(w);
  }
  read_state(w);
  solve_unit_lower(w);
  scale_out(w);
  accumulate_state(w);
}

}  // namespace delta_attention::DELTA_ATTENTION_ISA
