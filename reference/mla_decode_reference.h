#pragma once

// The oracle of MLA: float64, and not absorbed. Every head's keys are built with its up-projection, as the model was trained, so that the
// oracle also checks that queries may take the projection instead. Header-only; it reads CPU memory and trusts the arguments.

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "delta_attention/mla_decode.h"
#include "delta_attention_reference.h"

namespace delta_attention::reference {

/// <q, key> of one row, head and key.
inline double mla_product(const MlaArgs& args, Index b, Index i, Index head, Index j) {
  const Index latent = args.w_uk.shape[2];
  double product = 0.0;
  for (Index d = 0; d < args.w_uk.shape[1]; ++d) {
    double key = 0.0;
    for (Index l = 0; l < latent; ++l) key += load(args.w_uk, head, d, l) * load(args.cache, b, j, l);
    product += load(args.q_nope, b, i, head, d) * key;
  }
  for (Index r = 0; r < args.q_rope.shape[3]; ++r) {
    product += load(args.q_rope, b, i, head, r) * load(args.cache, b, j, latent + r);
  }
  return product;
}

inline void mla_row(const MlaArgs& args, Index b, Index i, Index head) {
  const Index latent = args.w_uk.shape[2], queries = args.q_nope.shape[1];
  Index keys = args.valid_len.present() ? static_cast<Index>(load(args.valid_len, b)) : args.cache.shape[1];
  if (args.causal) keys = std::max<Index>(0, keys - queries + i + 1);
  const double scale = args.scale ? *args.scale : 1.0 / std::sqrt(static_cast<double>(args.q_nope.shape[3] + args.q_rope.shape[3]));
  double most = -std::numeric_limits<double>::infinity(), sum = 0.0;
  std::vector<double> score, o(static_cast<std::size_t>(latent), 0.0);
  for (Index j = 0; j < keys; ++j) {
    score.push_back(scale * mla_product(args, b, i, head, j));
    most = std::max(most, score.back());
  }
  for (Index j = 0; j < keys; ++j) {
    const double weight = std::exp(score[static_cast<std::size_t>(j)] - most);
    sum += weight;
    for (Index l = 0; l < latent; ++l) o[static_cast<std::size_t>(l)] += weight * load(args.cache, b, j, l);
  }
  for (Index l = 0; l < latent; ++l) store(args.out, keys > 0 ? o[static_cast<std::size_t>(l)] / sum : 0.0, b, i, head, l);
  if (args.lse.present()) store(args.lse, most + (keys > 0 ? std::log(sum) : 0.0), b, i, head);
}

inline void mla_forward(const MlaArgs& args) {
  for (Index b = 0; b < args.q_nope.shape[0]; ++b) {
    for (Index i = 0; i < args.q_nope.shape[1]; ++i) {
      for (Index head = 0; head < args.q_nope.shape[2]; ++head) mla_row(args, b, i, head);
    }
  }
}

}  // namespace delta_attention::reference
