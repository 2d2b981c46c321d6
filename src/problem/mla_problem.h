#pragma once

// The checked problem of absorbed multi-head latent attention.

#include "delta_attention/mla_decode.h"
#include "problem/softmax_problem.h"

namespace delta_attention {

struct MlaProblem {
  /// Attention of H heads over one key head, the cache: k holds head_dim = L latent channels, which are the values too, and rope_dim
  /// more behind them. Its q is what absorbing makes: [B,Nq,H,L+R].
  SoftmaxProblem attention;

  InputOperand q_nope, q_rope;  // (batch, query, head, channel)
  InputOperand w_uk;            // (head, channel of q_nope, latent channel)
  std::int64_t nope_dim = 0, rope_dim = 0;

  DELTA_ATTENTION_HOST_DEVICE std::int64_t channels() const { return attention.head_dim + rope_dim; }
  DELTA_ATTENTION_HOST_DEVICE std::int64_t rows() const { return attention.batch * attention.queries; }
};

}  // namespace delta_attention
