// Public failures of softmax kernels, each under its id, and the articles' hand checks.

#include <cmath>
#include <limits>

#include "support/softmax.h"

namespace delta_attention::test {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

class SoftmaxCases : public SoftmaxTest {};

TEST_P(SoftmaxCases, X01_AFullyMaskedRowIsZero) {
  SoftmaxInputs inputs = random_inputs(random, DType::f32, 2, 2, 3, 2, 1, 8);
  inputs.valid_len = {3, 0};
  expect_matches_oracle(inputs);
  const auto got = run(inputs);
  if (!got) return;
  for (Index i = 0; i < 2; ++i) {
    for (Index h = 0; h < 2; ++h) {
      EXPECT_EQ(got->lse.get({1, i, h}), -kInfinity);
      for (Index d = 0; d < 8; ++d) EXPECT_EQ(got->out.get({1, i, h, d}), 0.0f);
    }
  }
  SoftmaxInputs by_mask = inputs;
  by_mask.valid_len.clear();
  by_mask.mask = Array(DType::f32, {2, 1, 1, 3});
  for (Index j = 0; j < 3; ++j) by_mask.mask.set({1, 0, 0, j}, -kInfinity);
  expect_matches_oracle(by_mask);
  const auto masked = run(by_mask);
  if (masked) {
    EXPECT_EQ(masked->out.values, got->out.values);
  }
}

TEST_P(SoftmaxCases, X02_CausalAlignment) {
  SoftmaxInputs inputs = counting_inputs(1, 2, 5);
  inputs.causal = true;
  expect_rows(inputs, {1.5, 2.0});
  const auto got = run(inputs);
  if (got) {
    EXPECT_NEAR(got->lse.get({0, 0, 0}), std::log(4.0), 1e-6);
    EXPECT_NEAR(got->lse.get({0, 1, 0}), std::log(5.0), 1e-6);
  }
  inputs.alignment = Alignment::top_left;
  expect_rows(inputs, {0.0, 0.5});
}

TEST_P(SoftmaxCases, X03_MoreRowsThanKeys) {
  SoftmaxInputs inputs = counting_inputs(1, 4, 2);
  inputs.causal = true;
  expect_rows(inputs, {0.0, 0.0, 0.0, 0.5});
  const auto got = run(inputs);
  if (!got) return;
  EXPECT_EQ(got->lse.get({0, 0, 0}), -kInfinity);
  EXPECT_EQ(got->lse.get({0, 1, 0}), -kInfinity);
  EXPECT_NEAR(got->lse.get({0, 2, 0}), 0.0, 1e-6);
}

TEST_P(SoftmaxCases, X04_TheWindowCountsInclusively) {
  SoftmaxInputs inputs = counting_inputs(1, 5, 5);
  inputs.causal = true;
  inputs.window_left = 2;
  expect_rows(inputs, {0, .5, 1, 2, 3});
  inputs.window_left = 1;
  expect_rows(inputs, {0, .5, 1.5, 2.5, 3.5});
  inputs.window_left = 0;
  expect_rows(inputs, {0, 1, 2, 3, 4});
  inputs.window_left = 4;
  expect_rows(inputs, {0, .5, 1, 1.5, 2});
  inputs.window_left = -1;
  expect_rows(inputs, {0, .5, 1, 1.5, 2});
}

TEST_P(SoftmaxCases, X05_ScoresBeyondTheRangeOfF16) {
  SoftmaxInputs inputs = counting_inputs(1, 1, 4, 1, 1, 128);
  for (Array* array : {&inputs.q, &inputs.k, &inputs.v}) array->dtype = DType::f16;
  inputs.q.fill(300.0f);
  inputs.k.fill(300.0f);
  expect_rows(inputs, {1.5});
  for (Index d = 0; d < 128; ++d) inputs.k.set({0, 0, 0, d}, -300.0f);
  expect_rows(inputs, {2.0});
}

TEST_P(SoftmaxCases, X07_SoftcapBeforeTheMask) {
  SoftmaxInputs inputs = counting_inputs(1, 1, 2, 1, 1, 1);
  inputs.q.fill(1.0f);
  inputs.k.values = {1.0f, 0.0f};
  inputs.v.values = {1.0f, 0.0f};
  inputs.scale = 1.0f;
  inputs.softcap = 1.0f;
  expect_rows(inputs, {0.6816997});
  inputs.mask = Array(DType::f32, {1, 1, 1, 2});
  inputs.mask.set({0, 0, 0, 0}, 5.0f);  // a cap after it would flatten this
  expect_rows(inputs, {1.0 / (1.0 + std::exp(-std::tanh(1.0) - 5.0))});
}

TEST_P(SoftmaxCases, X10_NoKeys) {
  SoftmaxInputs inputs = counting_inputs(1, 3, 0);
  const auto got = run(inputs);
  if (!got) return;
  for (const float x : got->out.values) EXPECT_EQ(x, 0.0f);
  for (const float x : got->lse.values) EXPECT_EQ(x, -kInfinity);
}

TEST_P(SoftmaxCases, V03_SequencesWithoutRows) {
  SoftmaxInputs inputs = counting_inputs(1, 2, 8);
  inputs.cu_seqlens_q = {0, 0, 1, 1, 2};
  inputs.cu_seqlens_kv = {0, 0, 3, 3, 8};
  for (Index j = 0; j < 8; ++j) {
    for (Index d = 0; d < 4; ++d) inputs.v.set({0, j, 0, d}, static_cast<float>(j < 3 ? j : j - 3));
  }
  expect_rows(inputs, {1.0, 2.0});
}

TEST_P(SoftmaxCases, P01_EntriesPastTheLengthAreNotRead) {
  SoftmaxInputs inputs = counting_inputs(1, 1, 2);
  inputs.k = Array(DType::f32, {3, 2, 1, 4}, 1.0f);
  inputs.v = Array(DType::f32, {3, 2, 1, 4}, std::numeric_limits<float>::quiet_NaN());
  for (Index d = 0; d < 4; ++d) {
    inputs.v.set({2, 0, 0, d}, 1.0f);
    inputs.v.set({2, 1, 0, d}, 3.0f);
    inputs.v.set({0, 0, 0, d}, 5.0f);
  }
  inputs.block_table = {{2, 0, -1}};
  inputs.valid_len = {3};
  expect_rows(inputs, {3.0});
}

TEST_P(SoftmaxCases, P03_PagesOfAnySize) {
  const SoftmaxInputs inputs = random_inputs(random, DType::f32, 1, 3, 130, 4, 2, 256);
  const auto expected = run(inputs);
  for (const Index page_size : {1, 8, 16, 32, 64, 128}) {
    const SoftmaxInputs in_pages = paged(inputs, page_size, random);
    expect_matches_oracle(in_pages);
    const auto got = run(in_pages);
    if (!expected || !got) continue;
    for (std::size_t i = 0; i < got->out.values.size(); ++i) EXPECT_NEAR(got->out.values[i], expected->out.values[i], 1e-4);
  }
}

TEST_P(SoftmaxCases, P04_SeveralNewTokensAreCausalAmongThemselves) {
  SoftmaxInputs inputs = paged(counting_inputs(1, 3, 5), 2, random);
  inputs.causal = true;
  expect_rows(inputs, {1.0, 1.5, 2.0});
}

TEST_P(SoftmaxCases, G02_EveryHeadReadsItsKeyHead) {
  const std::pair<Index, Index> heads[] = {{48, 2}, {28, 4}, {80, 4}, {7, 1}, {5, 1}};
  for (const auto& [queries, keys] : heads) {
    SoftmaxInputs inputs = counting_inputs(1, 1, 6, queries, keys);
    for (Index j = 0; j < 6; ++j) {
      for (Index h = 0; h < keys; ++h) {
        for (Index d = 0; d < 4; ++d) inputs.v.set({0, j, h, d}, static_cast<float>(h + 1));
      }
    }
    const auto got = run(inputs);
    if (!got) continue;
    for (Index h = 0; h < queries; ++h) {
      EXPECT_NEAR(got->out.get({0, 0, h, 0}), static_cast<double>(h / (queries / keys) + 1), 1e-5) << queries << "/" << keys;
    }
  }
}

TEST_P(SoftmaxCases, AHugeLastValueMovesOnlyTheRowsThatSeeIt) {
  SoftmaxInputs inputs = random_inputs(random, DType::f32, 1, 4, 4, 1, 1, 8);
  inputs.causal = true;
  const auto before = run(inputs);
  for (Index d = 0; d < 8; ++d) inputs.v.set({0, 3, 0, d}, 1e6f);
  const auto after = run(inputs);
  if (!before || !after) return;
  for (Index d = 0; d < 8; ++d) {
    for (Index i = 0; i < 3; ++i) EXPECT_EQ(after->out.get({0, i, 0, d}), before->out.get({0, i, 0, d}));
    EXPECT_GT(after->out.get({0, 3, 0, d}), 1e2f);
  }
}

EVERY_SOFTMAX_KERNEL(SoftmaxCases);

}  // namespace
}  // namespace delta_attention::test
