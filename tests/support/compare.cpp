// The oracle and the tolerances.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "delta_attention_reference.h"
#include "problem/problem.h"
#include "support/run.h"

namespace delta_attention::test {
namespace {

ConstTensor view(const Array& array) {
  ConstTensor x;
  if (!array.present()) return x;
  x.data = array.values.data();
  x.rank = static_cast<int>(array.shape.size());
  Index stride = 1;
  for (std::size_t axis = array.shape.size(); axis-- > 0;) {
    x.shape[axis] = array.shape[axis];
    x.strides[axis] = stride;
    stride *= array.shape[axis];
  }
  return x;
}

double norm(double sum_of_squares) { return std::sqrt(sum_of_squares); }

/// The error that rounding to the storage type alone causes.
double rounding_error(const std::vector<double>& truth, DType dtype) {
  double difference = 0, size = 0;
  for (double x : truth) {
    const double stored = dtype == DType::f32 ? x : rounded(static_cast<float>(x), dtype);
    difference += (stored - x) * (stored - x);
    size += x * x;
  }
  return size > 0 ? norm(difference / size) : 0.0;
}

/// Relative error that f32 arithmetic may add.
///
/// Every product and sum rounds with 2^-24. A dot product over K channels adds such errors at random, about sqrt(K) of them; with
/// the reads of S, q, k, the gate's exponential and the update on the way, 2e-6 sqrt(K) (33 roundings a channel, in a random walk)
/// is the bar for updates that contract: there an error made at one token dies out. An additive sum does not forget: each of T
/// additions to the state rounds once, a random walk of sqrt(T) steps, 4 roundings each. Normalising divides by a second sum of
/// the same kind, so errors double.
double f32_bar(const Case& c) {
  const bool contracts =
      c.recurrence.update == Update::delta && !c.beta_to_two && c.beta_space != BetaSpace::twice_sigmoid;
  double bar = 2e-6 * std::sqrt(static_cast<double>(c.key_dim));
  if (!contracts) bar += 4 * 0x1p-24 * std::sqrt(static_cast<double>(c.tokens));
  return c.recurrence.normalize ? 2 * bar : bar;
}

/// The size that an output of one head has when q meets a key at a random angle: scale |q| |k| |beta v| / sqrt(K) over its tokens.
/// Outputs that happen to cancel below it are judged against it, or a lucky zero of q.k would read as a kernel's error.
double natural_size(const Inputs& inputs, Index head) {
  const Case& c = inputs.problem;
  if (c.recurrence.normalize) return 0.0;
  double sum = 0;
  const Index key_head = head / (c.value_heads / c.heads);
  for (Index b = 0; b < c.batch; ++b) {
    for (Index t = 0; t < c.tokens; ++t) {
      double q = 0, k = 0, v = 0;
      for (Index i = 0; i < c.key_dim; ++i) {
        q += std::pow(inputs.q.get({b, t, key_head, i}), 2);
        k += std::pow(inputs.k.get({b, t, key_head, i}), 2);
      }
      for (Index j = 0; j < c.value_dim; ++j) v += std::pow(inputs.v.get({b, t, head, j}), 2);
      if (c.qk_l2norm) {
        q /= q + 1e-6;
        k /= k + 1e-6;
      }
      double beta = c.with_beta ? inputs.beta.get({b, t, head}) : 1.0;
      if (c.beta_space != BetaSpace::value && c.with_beta) beta = 1 / (1 + std::exp(-beta));
      sum += q * k * v * beta * beta;
    }
  }
  const double scale = c.scale ? *c.scale : 1 / std::sqrt(static_cast<double>(c.key_dim));
  return scale * norm(sum / static_cast<double>(c.key_dim));
}

/// Tokens that a kernel solves for together, at most: a chunk of one with products below 24 bits, a micro-chunk of the others.
Index solved_together(int product_bits) { return product_bits < kF32Bits ? 32 : 16; }

/// How many such chunks a problem's tokens make: intermediate states cut them, too.
double chunks_of(const Case& c, Index together) {
  const Index span = c.state_interval > 0 ? c.state_interval : std::max<Index>(1, c.tokens);
  return static_cast<double>(c.tokens / span * ceil_div(span, together) + ceil_div(c.tokens % span, together));
}

/// The size of the state that the last tokens took away from one head: the largest that a state from up to `together` tokens before a
/// sequence's end would have at its end, had it only decayed. Few values of opposite signs take an additive state back to near 0; a delta
/// update with beta |k|^2 near 1 along the only key, or along one that all keys are near, removes nearly all of the state; that, too, is
/// rounded, for all tokens that are solved for together, and may be far larger than what is left.
double removed_size(const Inputs& inputs, Index head, Index together) {
  const Case& c = inputs.problem;
  Inputs decaying = inputs;
  const float ignored = c.beta_space == BetaSpace::value ? 0.0f : -std::numeric_limits<float>::infinity();
  if (!c.with_beta) {
    decaying.problem.with_beta = true;
    decaying.problem.beta_space = BetaSpace::value;
    decaying.beta = Array(DType::f32, {c.batch, c.tokens, c.value_heads}, 1.0f);
  }
  double largest = 0.0;
  for (Index removed = 1; removed <= std::min(together, c.tokens); ++removed) {
    for (Index n = 0; n < c.sequences(); ++n) {
      const bool packed = !c.cu_seqlens.empty();
      const Index end = packed ? c.cu_seqlens[static_cast<std::size_t>(n) + 1] : c.tokens;
      const Index begin = packed ? c.cu_seqlens[static_cast<std::size_t>(n)] : 0;
      if (end - removed < begin) continue;
      for (Index h = 0; h < c.value_heads; ++h) decaying.beta.set({packed ? 0 : n, end - removed, h}, ignored);
    }
    const std::vector<double> state = oracle(decaying).final_state;
    double sum = 0.0;
    const Index cells = c.key_dim * c.value_dim;
    for (Index n = 0; n < c.sequences(); ++n) {
      for (Index i = 0; i < cells; ++i) {
        sum += std::pow(state[static_cast<std::size_t>((n * c.value_heads + head) * cells + i)], 2);
      }
    }
    largest = std::max(largest, norm(sum));
  }
  return largest;
}

/// The largest |q| of a head, with the scale: what turns a state's error into an output's.
double read_size(const Inputs& inputs, Index head) {
  const Case& c = inputs.problem;
  double largest = 0.0;
  for (Index b = 0; b < c.batch; ++b) {
    for (Index t = 0; t < c.tokens; ++t) {
      double q = 0.0;
      for (Index i = 0; i < c.key_dim; ++i) {
        q += std::pow(inputs.q.get({b, t, head / (c.value_heads / c.heads), i}), 2);
      }
      largest = std::max(largest, c.qk_l2norm ? q / (q + 1e-6) : q);
    }
  }
  return (c.scale ? std::fabs(*c.scale) : 1 / std::sqrt(static_cast<double>(c.key_dim))) * norm(largest);
}

/// Error of one head's slice of a [outer, heads, inner] array. `least_size` and, where that is not enough, `removed` of a head are sizes
/// that errors may be relative to where the result itself is smaller.
void expect_heads_match(const Inputs& inputs, const Array& got, const std::vector<double>& truth, Index inner,
                        const std::function<double(Index)>& least_size, const std::function<double(Index)>& removed,
                        const std::string& what, int product_bits) {
  const Case& c = inputs.problem;
  const Index outer = got.size() / std::max<Index>(1, c.value_heads * inner);
  for (Index head = 0; head < c.value_heads; ++head) {
    double difference = 0, size = 0;
    std::vector<double> slice;
    for (Index o = 0; o < outer; ++o) {
      for (Index i = 0; i < inner; ++i) {
        const auto at = static_cast<std::size_t>((o * c.value_heads + head) * inner + i);
        difference += std::pow(got.values[at] - truth[at], 2);
        size += truth[at] * truth[at];
        slice.push_back(truth[at]);
      }
    }
    const double bar = bar_for(c, got.dtype, slice, product_bits);
    double allowed = bar * std::max(norm(size), least_size(head));
    if (norm(difference) > allowed) allowed = bar * std::max(allowed / bar, removed(head));
    // Written so that NaN fails.
    EXPECT_TRUE(norm(difference) <= allowed)
        << what << " of head " << head << ": error " << norm(difference) << ", allowed " << allowed << ", size "
        << norm(size) << "\n  " << c.describe();
  }
}

/// Every intermediate state is the final state of the tokens up to it, and is held to the same bar.
void expect_intermediate_states_match(const Inputs& inputs, const Outputs& got, const Truth& truth, int product_bits) {
  const Case& c = inputs.problem;
  const Index cells = c.value_heads * c.key_dim * c.value_dim;
  const auto state_of = [&](const auto& states, Index at) {
    return std::vector(states.begin() + at * cells, states.begin() + (at + 1) * cells);
  };
  Index at = 0;
  for (Index n = 0; n < c.sequences(); ++n) {
    for (Index i = 1; i <= c.intermediate_states_of(n); ++i, ++at) {
      Inputs until = first_tokens(inputs, n, i * c.state_interval);
      until.problem.state_interval = c.state_interval;  // that is how they were cut
      Array state(c.state_dtype, {1, c.value_heads, c.key_dim, c.value_dim});
      state.values = state_of(got.intermediate_states.values, at);
      expect_heads_match(
          until, state, state_of(truth.intermediate_states, at), c.key_dim * c.value_dim, [](Index) { return 0.0; },
          [&](Index head) { return removed_size(until, head, solved_together(product_bits)); },
          "state " + std::to_string(i) + " on the way of sequence " + std::to_string(n), product_bits);
    }
  }
}

}  // namespace

/// Where operands of products have fewer bits than f32, six roundings stand between inputs and result: of b k, b q, A T and T^T d k, of the
/// state S, and of R = V - (b k) S (docs/math.md). Rounding to 8 bits changes numbers of any size by 1.7e-3 (root mean square); the
/// result's own digits may be lucky, what it was made from is not. The six are independent: a factor of sqrt(6). What A T and T^T d k are
/// made from has 3 bits more, 1/64 of a square each. So is the rounding of the result itself independent: squares add. But a factor is
/// rounded for all columns alike, a key for all rows of values: of a single token, channel or column the largest rounding may come, 3.9e-3,
/// and of n the excess averages out as sqrt(n).
///
/// A delta update takes back what was written before it. The result is what is left; roundings of what was taken back stay.
///     Along the K directions that there are, a chunk's tokens take back what the state before it had there, and every output is without
///     it: n tokens, n / K times the squares.
///     Where keys are nearly one, what is along it is new every few tokens, but each chunk's rounded factors leave some of it beside it,
///     where nothing takes it back: squares add over chunks, and there are more of those where intermediate states cut them (the same 52
///     tokens in 2, 7 and 26 chunks: errors of a state of 0.03, 0.05 and 0.08).
double bar_for(const Case& c, DType storage, const std::vector<double>& truth, int product_bits) {
  const double arithmetic = f32_bar(c);
  const double stored = rounding_error(truth, storage);
  if (product_bits < kF32Bits) {
    const Index together = solved_together(product_bits);
    const auto few = static_cast<double>(std::max<Index>(1, std::min({c.tokens, c.key_dim, c.value_dim})));
    const double rounded = (1.7e-3 + (3.9e-3 - 1.7e-3) / std::sqrt(few)) * std::exp2(8 - product_bits);
    const double taken_back = static_cast<double>(std::min(together, c.tokens)) / static_cast<double>(c.key_dim);
    const double left_over = c.keys == Keys::near_parallel ? chunks_of(c, together) : 1.0;
    const double times = c.recurrence.update == Update::delta ? std::max({1.0, taken_back, left_over}) : 1.0;
    return std::min(1e-2 * std::sqrt(times), 1.2 * std::hypot(std::sqrt(6 * times) * rounded, stored) + arithmetic);
  }
  if (storage == DType::f32) return arithmetic;
  return std::min(1e-2, 1.2 * stored + arithmetic);
}

Truth oracle(const Inputs& inputs) {
  const Case& c = inputs.problem;
  ForwardArgs args;
  args.recurrence = c.recurrence;
  args.scale = c.scale;
  args.qk_l2norm = c.qk_l2norm;
  args.gate_space = c.gate_space;
  args.beta_space = c.beta_space;
  args.q = view(inputs.q);
  args.k = view(inputs.k);
  args.v = view(inputs.v);
  args.log_decay = view(inputs.log_decay);
  args.beta = view(inputs.beta);
  args.a_log = view(inputs.a_log);
  args.dt_bias = view(inputs.dt_bias);
  args.initial_state = view(inputs.initial_state);
  args.initial_normalizer = view(inputs.initial_normalizer);
  if (!c.cu_seqlens.empty()) args.cu_seqlens = tensor(c.cu_seqlens.data(), {static_cast<Index>(c.cu_seqlens.size())});

  Truth truth;
  truth.out.resize(static_cast<std::size_t>(c.batch * c.tokens * c.value_heads * c.value_dim));
  truth.final_state.resize(static_cast<std::size_t>(c.sequences() * c.value_heads * c.key_dim * c.value_dim));
  truth.final_normalizer.resize(static_cast<std::size_t>(c.sequences() * c.value_heads * c.key_dim));
  args.out = tensor(truth.out.data(), {c.batch, c.tokens, c.value_heads, c.value_dim});
  args.final_state = tensor(truth.final_state.data(), {c.sequences(), c.value_heads, c.key_dim, c.value_dim});
  args.final_normalizer = tensor(truth.final_normalizer.data(), {c.sequences(), c.value_heads, c.key_dim});
  if (c.state_interval != 0) {
    truth.intermediate_states.resize(
        static_cast<std::size_t>(c.intermediate_states() * c.value_heads * c.key_dim * c.value_dim));
    args.intermediate_states =
        tensor(truth.intermediate_states.data(), {c.intermediate_states(), c.value_heads, c.key_dim, c.value_dim});
    args.state_interval = c.state_interval;
  }
  reference::forward(args);
  return truth;
}

double relative_error(const std::vector<float>& got, const std::vector<double>& truth) {
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    difference += (got[i] - truth[i]) * (got[i] - truth[i]);
    size += truth[i] * truth[i];
  }
  if (difference == 0) return 0;
  return norm(difference / size);
}

void expect_matches(const Inputs& inputs, const Outputs& got, const Truth& truth, int product_bits) {
  const Case& c = inputs.problem;
  const auto none = [](Index) { return 0.0; };
  const auto removed = [&](Index head) { return removed_size(inputs, head, solved_together(product_bits)); };
  expect_heads_match(
      inputs, got.out, truth.out, c.value_dim, [&](Index head) { return natural_size(inputs, head); },
      [&](Index head) { return c.recurrence.normalize ? 0.0 : removed(head) * read_size(inputs, head); }, "out",
      product_bits);
  if (got.final_state.present()) {
    expect_heads_match(inputs, got.final_state, truth.final_state, c.key_dim * c.value_dim, none, removed, "final_state",
                       product_bits);
  }
  if (got.final_normalizer.present()) {
    expect_heads_match(inputs, got.final_normalizer, truth.final_normalizer, c.key_dim, none, none, "final_normalizer",
                       product_bits);
  }
  expect_intermediate_states_match(inputs, got, truth, product_bits);
}

void expect_near(const std::vector<float>& got, const std::vector<float>& expected, double absolute, double relative,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double allowed = absolute + relative * std::fabs(expected[i]);
    if (!(std::fabs(static_cast<double>(got[i]) - expected[i]) <= allowed)) {
      FAIL() << what << "[" << i << "] = " << got[i] << ", expected " << expected[i] << " within " << allowed;
    }
  }
}

}  // namespace delta_attention::test
