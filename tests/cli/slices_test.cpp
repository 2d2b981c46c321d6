// A call made in parts gives what one call gives.

#include "slices.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace delta_attention::cli {
namespace {

/// Random operands for every axis that a slice can cut: grouped value heads, raw channel gates, initial and final state.
struct RandomCall {
  static constexpr std::int64_t B = 2, T = 70, H = 3, HV = 6, K = 8, V = 5;
  std::mt19937 random;
  std::vector<float> q, k, v, log_decay, beta, a_log, dt_bias, initial_state, out, final_state;

  explicit RandomCall(unsigned seed)
      : random(seed),
        q(numbers(B * T * H * K)),
        k(numbers(B * T * H * K)),
        v(numbers(B * T * HV * V)),
        log_decay(numbers(B * T * HV * K)),
        beta(numbers(B * T * HV)),
        a_log(numbers(HV)),
        dt_bias(numbers(HV * K)),
        initial_state(numbers(B * HV * K * V)),
        out(B * T * HV * V, -7.0f),
        final_state(B * HV * K * V, -7.0f) {}

  std::vector<float> numbers(std::int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(random);
    return values;
  }

  ForwardArgs args() {
    ForwardArgs args;
    args.q = tensor(q.data(), {B, T, H, K});
    args.k = tensor(k.data(), {B, T, H, K});
    args.v = tensor(v.data(), {B, T, HV, V});
    args.log_decay = tensor(log_decay.data(), {B, T, HV, K});
    args.beta = tensor(beta.data(), {B, T, HV});
    args.a_log = tensor(a_log.data(), {HV});
    args.dt_bias = tensor(dt_bias.data(), {HV, K});
    args.initial_state = tensor(initial_state.data(), {B, HV, K, V});
    args.out = tensor(out.data(), {B, T, HV, V});
    args.final_state = tensor(final_state.data(), {B, HV, K, V});
    args.recurrence = kda();
    args.qk_l2norm = true;
    args.beta_space = BetaSpace::sigmoid;
    args.gate_space = GateSpace::softplus;
    return args;
  }
};

std::vector<std::string> cpu_kernels(const ForwardArgs& args) {
  std::vector<std::string> names;
  for (const KernelReport& report : dispatch_info(args).kernels) {
    if (report.supported) names.push_back(report.kernel);
  }
  return names;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST(HeadSlices, GiveTheSameBitsOnEveryKernel) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  for (const std::string& kernel : cpu_kernels(RandomCall(seed).args())) {
    SCOPED_TRACE(kernel);
    Execution execution;
    execution.kernel = kernel;
    RandomCall whole(seed), parts(seed);
    delta_attention_forward(whole.args(), execution);
    delta_attention_forward(head_slice(parts.args(), 0, 2), execution);
    EXPECT_FALSE(same_bits(whole.out, parts.out));
    delta_attention_forward(head_slice(parts.args(), 2, 1), execution);
    EXPECT_TRUE(same_bits(whole.out, parts.out));
    EXPECT_TRUE(same_bits(whole.final_state, parts.final_state));
  }
}

/// The state is handed on in f32, where the one call keeps it in f64: each hand-over rounds it once, by 2^-24.
TEST(TokenSlices, HandTheStateOn) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  Execution execution;
  execution.kernel = "reference";
  RandomCall whole(seed), parts(seed);
  delta_attention_forward(whole.args(), execution);
  ForwardArgs args = parts.args();
  delta_attention_forward(token_slice(args, 0, 64), execution);
  args.initial_state = args.final_state;
  delta_attention_forward(token_slice(args, 64, 6), execution);
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < whole.out.size(); ++i) {
    difference += std::pow(static_cast<double>(whole.out[i]) - parts.out[i], 2);
    norm += std::pow(static_cast<double>(whole.out[i]), 2);
  }
  EXPECT_LE(std::sqrt(difference / norm), 4 * std::ldexp(1.0, -24));
}

}  // namespace
}  // namespace delta_attention::cli
