#include "cpu/head_buffers.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <type_traits>

#include "state/gate.h"

namespace delta_attention::cpu_kernels {
namespace {

Index round_up(Index n, Index unit) { return ceil_div(n, unit) * unit; }

/// Padded row length. An odd number of cache lines, so that a column of rows spreads over the whole cache.
Index row_stride(Index size) {
  const Index lines = ceil_div(size, kAlignment);
  return (lines + (lines % 2 == 0 ? 1 : 0)) * kAlignment;
}

template <class Element>
void load_as(const void* data, Index offset, Index stride, Index count, float* to) {
  const Element* from = static_cast<const Element*>(data) + offset;
  if (stride == 1 && std::is_same<Element, float>::value) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * sizeof(float));
  } else if (stride == 1) {
    for (Index i = 0; i < count; ++i) to[i] = to_float(from[i]);
  } else {
    for (Index i = 0; i < count; ++i) to[i] = to_float(from[i * stride]);
  }
}

/// `count` elements of an operand, `stride` apart. The dtype is looked at once, not once an element.
void load_run(const InputOperand& x, Index offset, Index stride, Index count, float* to) {
  switch (x.dtype) {
    case DType::f16: return load_as<Half>(x.data, offset, stride, count, to);
    case DType::bf16: return load_as<BFloat16>(x.data, offset, stride, count, to);
    default: return load_as<float>(x.data, offset, stride, count, to);
  }
}

template <class Operand>
Run run_of(const Operand& x, Index offset, Index count) {
  const auto size = static_cast<Index>(size_of(x.dtype));
  return {static_cast<const char*>(x.data) + offset * size, count * size};
}

template <class Element>
void store_as(void* data, Index offset, Index stride, Index count, const float* from) {
  Element* to = static_cast<Element*>(data) + offset;
  for (Index i = 0; i < count; ++i) to[i * stride] = from_float<Element>(from[i]);
}

void store_run(const OutputOperand& x, Index offset, Index stride, Index count, const float* from) {
  switch (x.dtype) {
    case DType::f16: return store_as<Half>(x.data, offset, stride, count, from);
    case DType::bf16: return store_as<BFloat16>(x.data, offset, stride, count, from);
    default: return store_as<float>(x.data, offset, stride, count, from);
  }
}

}  // namespace

HeadBuffers::HeadBuffers(const Problem& problem, const ChunkRoutines& routines, Index columns)
    : problem_(problem), routines_(routines) {
  Chunk& c = chunk_;
  c.key_dim = problem.key_dim;
  c.columns = round_up(columns, kAlignment);
  c.key_stride = row_stride(problem.key_dim);
  c.value_stride = row_stride(columns);
  c.token_stride = row_stride(kChunkTokens);
  c.update = problem.update;
  c.gate = problem.gate;
  c.normalize = problem.normalize;
  c.scale = problem.scale;

  struct Piece {
    float** where;
    Index rows, stride;
  };
  const Piece pieces[] = {
      {&c.state, c.key_dim, c.value_stride},
      {&c.normalizer, 1, c.key_stride},
      {&c.q, kChunkTokens, c.key_stride},
      {&c.k, kChunkTokens, c.key_stride},
      {&c.decay, kChunkTokens, c.key_stride},
      {&c.beta, 1, kChunkTokens},
      {&c.v, kChunkTokens, c.value_stride},
      {&c.out, kChunkTokens, c.value_stride},
      {&c.query_rows, kChunkTokens, c.key_stride},
      {&c.key_rows, kChunkTokens, c.key_stride},
      {&c.block_keys, kBlockTokens, c.key_stride},
      {&c.keys_by_channel, c.key_dim, c.token_stride},
      {&c.query_pairs, kChunkTokens, c.token_stride},
      {&c.key_pairs, kChunkTokens, c.token_stride},
      {&c.block_decay, 1, c.key_stride},
      {&c.chunk_decay, 1, c.key_stride},
      {&c.token_decay, 1, kChunkTokens},
      {&c.pair_decay, 1, kChunkTokens},
      {&c.prediction, kChunkTokens, c.value_stride},
      {&c.u, kChunkTokens, c.value_stride},
  };
  Index floats = 0;
  for (const Piece& piece : pieces) floats += piece.rows * piece.stride;
  memory_.reset(
      static_cast<float*>(::operator new (static_cast<std::size_t>(floats) * sizeof(float), std::align_val_t{64})));
  std::fill_n(memory_.get(), floats, 0.0f);
  upcoming_.resize(5 * kChunkTokens);
  float* next = memory_.get();
  for (const Piece& piece : pieces) {
    *piece.where = next;
    next += piece.rows * piece.stride;
  }
}

void HeadBuffers::load_state(const HeadSlice& slice, const float* normalizers) {
  const Problem& p = problem_;
  const InputOperand& state = p.initial_state;
  for (Index channel = 0; channel < p.key_dim; ++channel) {
    float* row = chunk_.state + channel * chunk_.value_stride;
    std::fill_n(row, chunk_.columns, 0.0f);
    if (!state.present) continue;
    load_run(state, state.offset(slice.sequence, slice.value_head, channel, slice.column), state.strides[3],
             slice.count, row);
  }
  if (!p.normalize) return;
  const Index head = slice.sequence * p.value_heads + slice.value_head;
  for (Index channel = 0; channel < p.key_dim; ++channel) {
    chunk_.normalizer[channel] = normalizers != nullptr ? normalizers[head * p.key_dim + channel] : 0.0f;
  }
}

void HeadBuffers::load_key_row(const InputOperand& x, Index batch, Index token, Index head, float* row) const {
  load_run(x, x.offset(batch, token, head), 1, problem_.key_dim, row);
  if (problem_.qk_l2norm) routines_.l2_normalize_row(row, problem_.key_dim, kL2NormEpsilon);
}

/// The rows of one head lie far apart, often pages, where no hardware prefetcher follows: the routines ask for them
/// while they compute.
void HeadBuffers::list_upcoming(const HeadSlice& slice, Index batch, Index token, Index tokens) {
  const Problem& p = problem_;
  const Index key_head = p.key_head(slice.value_head);
  Run* next = upcoming_.data();
  for (Index t = token - chunk_.tokens; t < token; ++t) {
    *next++ = run_of(p.out, p.out.offset(batch, t, slice.value_head, slice.column), slice.count);
  }
  for (Index t = token; t < token + tokens; ++t) {
    *next++ = run_of(p.q, p.q.offset(batch, t, key_head), p.key_dim);
    *next++ = run_of(p.k, p.k.offset(batch, t, key_head), p.key_dim);
    *next++ = run_of(p.v, p.v.offset(batch, t, slice.value_head, slice.column), slice.count);
    if (p.gate == Gate::channel) {
      *next++ = run_of(p.log_decay, p.log_decay.offset(batch, t, slice.value_head), p.key_dim);
    }
  }
  chunk_.upcoming = upcoming_.data();
  chunk_.upcoming_count = next - upcoming_.data();
}

void HeadBuffers::load_decay(const HeadSlice& slice, Index batch, Index token) {
  const DecayReader reader(problem_, slice.value_head);
  const InputOperand& x = problem_.log_decay;
  const bool channels = problem_.gate == Gate::channel;
  const Index count = channels ? problem_.key_dim : 1;
  for (Index i = 0; i < chunk_.tokens; ++i) {
    float* row = chunk_.decay + (channels ? i * chunk_.key_stride : i);
    load_run(x, x.offset(batch, token + i, slice.value_head), 1, count, row);
    if (channels && problem_.gate_space == GateSpace::log) {
      std::fill(row + count, row + chunk_.key_stride, 0.0f);
      routines_.exponentiate_row(row, chunk_.key_stride);
    } else {
      for (Index channel = 0; channel < count; ++channel) row[channel] = reader.decay(row[channel], channel);
    }
  }
}

void HeadBuffers::load_tokens(const HeadSlice& slice, Index batch, Index token, Index tokens, Index left) {
  const Problem& p = problem_;
  const Index key_head = p.key_head(slice.value_head);
  chunk_.tokens = tokens;
  for (Index i = 0; i < tokens; ++i) {
    load_key_row(p.q, batch, token + i, key_head, chunk_.q + i * chunk_.key_stride);
    load_key_row(p.k, batch, token + i, key_head, chunk_.k + i * chunk_.key_stride);
    load_run(p.v, p.v.offset(batch, token + i, slice.value_head, slice.column), 1, slice.count,
             chunk_.v + i * chunk_.value_stride);
    chunk_.beta[i] = load_beta(p, batch, token + i, slice.value_head);
  }
  if (p.gate != Gate::none) load_decay(slice, batch, token);
  list_upcoming(slice, batch, token + tokens, std::min(kChunkTokens, left - tokens));
}

void HeadBuffers::store_out(const HeadSlice& slice, Index batch, Index token) const {
  const OutputOperand& out = problem_.out;
  for (Index i = 0; i < chunk_.tokens; ++i) {
    store_run(out, out.offset(batch, token + i, slice.value_head, slice.column), 1, slice.count,
              chunk_.out + i * chunk_.value_stride);
  }
}

void HeadBuffers::store_state(const HeadSlice& slice, const OutputOperand& states, Index at) const {
  for (Index channel = 0; channel < problem_.key_dim; ++channel) {
    store_run(states, states.offset(at, slice.value_head, channel, slice.column), states.strides[3], slice.count,
              chunk_.state + channel * chunk_.value_stride);
  }
}

void HeadBuffers::store_intermediate_state(const HeadSlice& slice, Index at) const {
  store_state(slice, problem_.intermediate_states, at);
}

void HeadBuffers::store_final_state(const HeadSlice& slice) const {
  const OutputOperand& normalizer = problem_.final_normalizer;
  if (problem_.final_state.present) store_state(slice, problem_.final_state, slice.sequence);
  if (normalizer.present && slice.column == 0) {
    store_run(normalizer, normalizer.offset(slice.sequence, slice.value_head), normalizer.strides[2], problem_.key_dim,
              chunk_.normalizer);
  }
}

}  // namespace delta_attention::cpu_kernels
