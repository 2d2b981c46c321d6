#pragma once

// What stands between the caller's numbers and the recurrence: gates, beta and the l2 norm. Everything in f32, whatever the
// storage, until it meets the state.

#include <cmath>

#include "problem/problem.h"

namespace delta_attention {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kL2NormEpsilon = 1e-6f;

DELTA_ATTENTION_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// log(1 + e^x) without overflow for large x and without cancellation for small.
DELTA_ATTENTION_HOST_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

DELTA_ATTENTION_HOST_DEVICE float activate_beta(float x, BetaSpace space) {
  if (space == BetaSpace::value) return x;
  return space == BetaSpace::sigmoid ? sigmoid(x) : 2.0f * sigmoid(x);
}

/// The decay a from one element of log_decay (GateSpace says what it holds), with exp(a_log) and dt_bias of its channel.
DELTA_ATTENTION_HOST_DEVICE float decay_factor(float x, GateSpace space, float exp_a_log, float dt_bias,
                                               float lower_bound) {
  switch (space) {
    case GateSpace::log: return expf(x);
    case GateSpace::log2: return exp2f(x);
    case GateSpace::linear: return x;
    case GateSpace::softplus: return expf(-exp_a_log * softplus(x + dt_bias));
    case GateSpace::lower_bound: return expf(lower_bound * sigmoid(exp_a_log * (x + dt_bias)));
  }
  return 1.0f;
}

/// The factor that turns a vector with this sum of squares into its l2-normalised self; a zero vector stays zero.
DELTA_ATTENTION_HOST_DEVICE float l2norm_factor(float sum_of_squares) {
  return 1.0f / sqrtf(sum_of_squares + kL2NormEpsilon);
}

/// beta of one token and value head.
DELTA_ATTENTION_HOST_DEVICE float load_beta(const Problem& problem, std::int64_t batch, std::int64_t token,
                                            std::int64_t value_head) {
  if (!problem.beta.present) return 1.0f;
  return activate_beta(problem.beta.load(problem.beta.offset(batch, token, value_head)), problem.beta_space);
}

/// Reads the decays of one value head: what does not change from token to token is loaded once.
struct DecayReader {
  const Problem& problem;
  std::int64_t value_head;
  float exp_a_log;

  DELTA_ATTENTION_HOST_DEVICE DecayReader(const Problem& p, std::int64_t head)
      : problem(p), value_head(head), exp_a_log(p.a_log.present ? expf(p.a_log.load(p.a_log.offset(head))) : 1.0f) {}

  /// The decay of `channel` (0 for scalar gates) from its element x of log_decay.
  DELTA_ATTENTION_HOST_DEVICE float activate(float x, std::int64_t channel) const {
    const float bias =
        problem.dt_bias.present ? problem.dt_bias.load(problem.dt_bias.offset(value_head, channel)) : 0.0f;
    return decay_factor(x, problem.gate_space, exp_a_log, bias, problem.gate_lower_bound);
  }

  DELTA_ATTENTION_HOST_DEVICE float load(std::int64_t batch, std::int64_t token, std::int64_t channel) const {
    return activate(problem.log_decay.load(problem.log_decay.offset(batch, token, value_head, channel)), channel);
  }
};

}  // namespace delta_attention
