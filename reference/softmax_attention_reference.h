#pragma once

// The oracle of softmax attention: float64, a row and a key at a time, as softmax_attention.h writes it. Header-only; it reads the
// caller's arguments directly, in CPU memory, and trusts them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "delta_attention/softmax_attention.h"
#include "delta_attention_reference.h"

namespace delta_attention::reference {

/// Rows and keys of sequence n, and how many of its keys are real.
struct SoftmaxSequence {
  Index batch, first_query, queries, first_key, keys;
};

inline SoftmaxSequence softmax_sequence(const SoftmaxArgs& args, Index n) {
  const auto entry = [](const ConstTensor& x, Index i) { return static_cast<Index>(load(x, i)); };
  SoftmaxSequence s = {n, 0, args.q.shape[1], 0, args.k.shape[1]};
  if (args.cu_seqlens_q.present()) {
    s.batch = 0;
    s.first_query = entry(args.cu_seqlens_q, n);
    s.queries = entry(args.cu_seqlens_q, n + 1) - s.first_query;
  }
  if (args.cu_seqlens_kv.present()) {
    s.first_key = entry(args.cu_seqlens_kv, n);
    s.keys = entry(args.cu_seqlens_kv, n + 1) - s.first_key;
  }
  if (args.valid_len.present()) s.keys = entry(args.valid_len, n);
  return s;
}

/// Element d of key or value j.
inline double load_key(const SoftmaxArgs& args, const ConstTensor& x, Index n, const SoftmaxSequence& s, Index j, Index head,
                       Index d) {
  if (!args.block_table.present()) return load(x, s.batch, s.first_key + j, head, d);
  const Index page_size = x.shape[1], page = static_cast<Index>(load(args.block_table, n, j / page_size));
  return load(x, page, j % page_size, head, d);
}

inline double load_mask(const ConstTensor& mask, Index b, Index h, Index i, Index j) {
  const auto at = [&](int axis, Index index) { return mask.shape[axis] == 1 ? 0 : index; };
  return load(mask, at(0, b), at(1, h), at(2, i), at(3, j));
}

inline bool is_visible(const SoftmaxArgs& args, const SoftmaxSequence& s, Index i, Index j) {
  const Index stands_at = args.alignment == Alignment::top_left ? i : i + s.keys - s.queries;
  return (!args.causal || j <= stands_at) && (args.window_left < 0 || j >= stands_at - args.window_left);
}

/// One row of one head: its output and lse.
inline void softmax_row(const SoftmaxArgs& args, Index n, const SoftmaxSequence& s, Index head, Index i) {
  const Index size = args.q.shape[3], key_head = head / (args.q.shape[2] / args.k.shape[2]);
  const double scale = args.scale ? *args.scale : 1.0 / std::sqrt(static_cast<double>(size));
  constexpr double kNone = -std::numeric_limits<double>::infinity();
  std::vector<double> score(static_cast<std::size_t>(s.keys), kNone), o(static_cast<std::size_t>(size), 0.0);
  double most = kNone;
  for (Index j = 0; j < s.keys; ++j) {
    if (!is_visible(args, s, i, j)) continue;
    double product = 0.0;
    for (Index d = 0; d < size; ++d) {
      product += load(args.q, s.batch, s.first_query + i, head, d) * load_key(args, args.k, n, s, j, key_head, d);
    }
    double x = scale * product;
    if (args.softcap > 0.0f) x = args.softcap * std::tanh(x / args.softcap);
    if (args.mask.present()) x += load_mask(args.mask, s.batch, head, i, j);
    score[static_cast<std::size_t>(j)] = x;
    most = std::isnan(x) ? x : std::max(most, x);
  }
  double sum = 0.0;
  for (Index j = 0; j < s.keys && most != kNone; ++j) {
    const double x = score[static_cast<std::size_t>(j)];
    if (x == kNone) continue;
    const double weight = std::exp(x - most);
    sum += weight;
    for (Index d = 0; d < size; ++d) {
      o[static_cast<std::size_t>(d)] += weight * load_key(args, args.v, n, s, j, key_head, d);
    }
  }
  for (Index d = 0; d < size; ++d) {
    const double value = most == kNone ? 0.0 : o[static_cast<std::size_t>(d)] / sum;
    store(args.out, value, s.batch, s.first_query + i, head, d);
  }
  if (args.lse.present()) {
    store(args.lse, most == kNone ? kNone : most + std::log(sum), s.batch, s.first_query + i, head);
  }
}

inline void softmax_forward(const SoftmaxArgs& args) {
  const Index sequences = args.cu_seqlens_q.present() ? args.cu_seqlens_q.shape[0] - 1 : args.q.shape[0];
  for (Index n = 0; n < sequences; ++n) {
    const SoftmaxSequence s = softmax_sequence(args, n);
    for (Index head = 0; head < args.q.shape[2]; ++head) {
      for (Index i = 0; i < s.queries; ++i) softmax_row(args, n, s, head, i);
    }
  }
}

}  // namespace delta_attention::reference
