#pragma once

// What stands between the caller's numbers and the recurrence: gates, beta and the l2 norm. Everything in f32, whatever the
// storage, until it meets the state.

#include <cmath>

#include "problem/problem.h"

namespace delta_attention {

constexpr float kLn2 = 0.69314718055994531f;
constexpr float kL2NormEpsilon = 1e-6f;

DELTA_ATTENTION_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/// log(1 + e^x) without overflow for large x and without cancellation for small.
DELTA_ATTENTION_HOST_DEVICE float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

DELTA_ATTENTION_HOST_DEVICE float activate_beta(float x, BetaSpace space) {
  if (space == BetaSpace::value) return x;
  return space == BetaSpace::sigmoid ? sigmoid(x) : 2.0f * sigmoid(x);
}

/// e^g, near 1 to half an ulp. A slow decay is applied thousands of times, and what its rounding adds to each is what remains of
/// the error in the end; expf alone may be off by twice as much and more.
DELTA_ATTENTION_HOST_DEVICE float exp_decay(float g) { return g > -0.5f ? 1.0f + expm1f(g) : expf(g); }

/// The log decay g (natural logarithm) from one element of log_decay (GateSpace says what it holds), with exp(a_log) and dt_bias of
/// its channel.
DELTA_ATTENTION_HOST_DEVICE float log_decay_of(float x, GateSpace space, float exp_a_log, float dt_bias,
                                               float lower_bound) {
  switch (space) {
    case GateSpace::log: return x;
    case GateSpace::log2: return x * kLn2;
    case GateSpace::linear: return logf(x);
    case GateSpace::softplus: return -exp_a_log * softplus(x + dt_bias);
    case GateSpace::lower_bound: return lower_bound * sigmoid(exp_a_log * (x + dt_bias));
  }
  return 0.0f;
}

/// The decay a = e^g from the same element.
DELTA_ATTENTION_HOST_DEVICE float decay_factor(float x, GateSpace space, float exp_a_log, float dt_bias,
                                               float lower_bound) {
  if (space == GateSpace::linear) return x;
  if (space == GateSpace::log2 && x <= -0.5f) return exp2f(x);
  return exp_decay(log_decay_of(x, space, exp_a_log, dt_bias, lower_bound));
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

  /// The element of log_decay as it is stored; `channel` is 0 for scalar gates.
  DELTA_ATTENTION_HOST_DEVICE float load(std::int64_t batch, std::int64_t token, std::int64_t channel) const {
    return problem.log_decay.load(problem.log_decay.offset(batch, token, value_head, channel));
  }
  /// The decay a, or its logarithm g, of `channel` from its element x.
  DELTA_ATTENTION_HOST_DEVICE float decay(float x, std::int64_t channel) const {
    return decay_factor(x, problem.gate_space, exp_a_log, bias(channel), problem.gate_lower_bound);
  }
  DELTA_ATTENTION_HOST_DEVICE float log_decay(float x, std::int64_t channel) const {
    return log_decay_of(x, problem.gate_space, exp_a_log, bias(channel), problem.gate_lower_bound);
  }
  DELTA_ATTENTION_HOST_DEVICE float bias(std::int64_t channel) const {
    return problem.dt_bias.present ? problem.dt_bias.load(problem.dt_bias.offset(value_head, channel)) : 0.0f;
  }
};

}  // namespace delta_attention
