// What compensated sums are for: states that only accumulate, over many tokens.

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

/// The kernels with compensated sums, and the same schedules with plain ones.
const std::pair<const char*, const char*> kTwins[] = {{"v2_chunk_pipeline_compensated", "v1_chunk_pipeline"},
                                                      {"v4_on_chip_compensated", "v3_on_chip"}};

std::string plain_twin(const std::string& name) {
  for (const auto& [compensated, plain] : kTwins) {
    if (name == compensated) return plain;
  }
  return "";
}

std::vector<KernelInfo> compensated_kernels() {
  std::vector<KernelInfo> list;
  for (const KernelInfo& kernel : cuda_kernels()) {
    if (!plain_twin(kernel.name).empty()) list.push_back(kernel);
  }
  return list;
}

class ErrorGrowth : public KernelTest {
 protected:
  /// Positive numbers, no decay: sums of positive terms, each exact to a product's rounding.
  Inputs positive_inputs(Index tokens) {
    Case c;
    c.recurrence = normalized_linear();
    c.tokens = tokens;
    c.key_dim = 40;
    c.value_dim = 20;
    c.with_beta = false;
    Inputs inputs = make_inputs(c, random);
    for (Array Inputs::*operand : {&Inputs::q, &Inputs::k, &Inputs::v}) {
      for (float& x : (inputs.*operand).values) x = static_cast<float>(uniform(random, 0, 1));
    }
    return inputs;
  }
};

double worst_relative_error(const std::vector<float>& got, const std::vector<double>& truth) {
  double worst = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) worst = std::max(worst, std::fabs(got[i] / truth[i] - 1));
  return worst;
}

// A compensated sum of T positive terms: each step rounds term and compensation to one number, T roundings of 2^-24 of the terms and of
// 2^-24 of compensations, which are 2^-24 of the sum at most; and value() rounds once. T enters with 2^-48 only.
TEST_P(ErrorGrowth, SumsAreRoundedLikeOneNumberHoweverManyTokens) {
  for (Index tokens : {small_run() ? 1024 : 4096, small_run() ? 2048 : 65536}) {
    const Inputs inputs = positive_inputs(tokens);
    const Truth truth = oracle(inputs);
    const double bound = 0x1p-24 * (2 + 0x1p-24 * static_cast<double>(tokens));
    const auto got = run(inputs);
    ASSERT_TRUE(got);
    EXPECT_LE(worst_relative_error(got->final_normalizer.values, truth.final_normalizer), bound) << tokens;
    EXPECT_LE(worst_relative_error(got->final_state.values, truth.final_state), bound) << tokens;
    expect_matches(inputs, *got, truth);
  }
}

// The same numbers in plain sums, or the test above would prove nothing.
TEST_P(ErrorGrowth, PlainSumsDriftFurther) {
  const Inputs inputs = positive_inputs(small_run() ? 2048 : 65536);
  Call call(inputs, device());
  Execution plain = execution();
  plain.kernel = plain_twin(GetParam().name);
  ASSERT_TRUE(run(call, plain));
  const Truth truth = oracle(inputs);
  EXPECT_GT(worst_relative_error(call.outputs().final_normalizer.values, truth.final_normalizer), 4 * 0x1p-24);
  EXPECT_GT(worst_relative_error(call.outputs().final_state.values, truth.final_state), 4 * 0x1p-24);
}

INSTANTIATE_TEST_SUITE_P(CompensatedKernels, ErrorGrowth, ::testing::ValuesIn(compensated_kernels()), kernel_test_name);

}  // namespace
}  // namespace delta_attention::test
