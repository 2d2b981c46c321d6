// Settings change speed, and rounding at most: every combination that a kernel takes gives the reference's answer.

#include <algorithm>
#include <optional>

#include "api/kernel.h"
#include "support/kernel_test.h"
#include "support/settings.h"

namespace delta_attention::test {
namespace {

std::vector<Setting> settings_of(const std::string& name) {
  const auto kernel = std::find_if(kernels().begin(), kernels().end(), [&](const Kernel* each) { return each->name == name; });
  return (*kernel)->settings();
}

class EverySetting : public KernelTest {
 protected:
  void SetUp() override {
    KernelTest::SetUp();
    if (IsSkipped()) return;
    texts_ = combinations(settings_of(GetParam().name));
    if (texts_.size() == 1) GTEST_SKIP() << GetParam().name << " has no settings";
    std::shuffle(texts_.begin(), texts_.end(), random);
    if (small_run()) texts_.resize(std::min<std::size_t>(texts_.size(), 60));
  }

  void expect_right(const Inputs& inputs, const Truth& truth, const std::string& settings) {
    SCOPED_TRACE(settings + " on " + inputs.problem.describe());
    Call call(inputs, device(), CallOptions{placements_of(inputs.problem)});
    Execution asked = execution();
    asked.settings = settings;
    if (run(call, asked)) expect_matches(inputs, call.outputs(), truth);
  }

  std::vector<std::string> texts_;
};

TEST_P(EverySetting, GivesTheReferencesAnswer) {
  Case delta;
  delta.recurrence = kda();
  delta.tokens = 75;
  delta.heads = 1;
  delta.value_heads = 2;
  delta.key_dim = 72;
  delta.value_dim = 136;
  delta.qk_l2norm = delta.beta_to_two = delta.with_initial_state = true;
  const Inputs delta_inputs = make_inputs(delta, random);
  Case normalized = delta;
  normalized.recurrence = linear();
  normalized.recurrence.normalize = true;
  normalized.cu_seqlens = {0, 40, 40, 75};
  normalized.dtype = DType::bf16;
  const Inputs normalized_inputs = make_inputs(normalized, random);
  const Truth delta_truth = oracle(delta_inputs), normalized_truth = oracle(normalized_inputs);
  for (const std::string& settings : texts_) {
    expect_right(delta_inputs, delta_truth, settings);
    expect_right(normalized_inputs, normalized_truth, settings);
    if (HasFailure()) break;
  }
  EXPECT_GT(ran(), 0);
}

TEST_P(EverySetting, GivesTheReferencesAnswerOnSampledProblems) {
  constexpr std::size_t kMost = 150;
  texts_.resize(std::min(texts_.size(), kMost));
  for (const std::string& settings : texts_) {
    const Inputs inputs = make_inputs(random_case(random), random);
    expect_right(inputs, oracle(inputs), settings);
    if (HasFailure()) break;
  }
  EXPECT_GT(ran(), 0);
}

TEST_P(EverySetting, GivesTheSameBitsUnlessItSplitsSums) {
  if (splits_sums(settings_of(GetParam().name))) GTEST_SKIP() << GetParam().name << " splits sums";
  for (DType dtype : {DType::f32, DType::bf16}) {
    Case c;
    c.recurrence = kda();
    c.dtype = dtype;
    c.cu_seqlens = {0, 40, 41, 115};
    c.tokens = 115;
    c.key_dim = 72;
    c.value_dim = 136;
    c.qk_l2norm = c.with_initial_state = true;
    const Inputs inputs = make_inputs(c, random);
    std::optional<Outputs> expected;
    for (const std::string& settings : texts_) {
      Call call(inputs, device());
      Execution asked = execution();
      asked.settings = settings;
      if (!run(call, asked)) continue;
      if (!expected) expected = call.outputs();
      EXPECT_TRUE(call.outputs() == *expected) << settings << ", " << c.describe();
      if (HasFailure()) return;
    }
  }
}

EVERY_KERNEL(EverySetting);

}  // namespace
}  // namespace delta_attention::test
