// Intermediate states: those of every sequence after its own first interval, 2 interval, ... tokens, one after another.

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class IntermediateStates : public KernelTest {
 protected:
  /// Runs and compares with the oracle; what lies past the last state must be what it was.
  void expect_right(const Inputs& inputs) {
    const Case& c = inputs.problem;
    constexpr float kBefore = 7.0f;
    Call call(inputs, device());
    call.fill_outputs(kBefore);
    if (!run(call)) return;
    const Outputs got = call.outputs();
    expect_matches(inputs, got, oracle(inputs));
    Index states = 0;
    for (Index n = 0; n < c.sequences(); ++n) states += c.intermediate_states_of(n);
    for (Index i = states * c.value_heads * c.key_dim * c.value_dim; i < got.intermediate_states.size(); ++i) {
      ASSERT_EQ(got.intermediate_states.values[static_cast<std::size_t>(i)], kBefore) << c.describe();
    }
  }
};

TEST_P(IntermediateStates, MatchReferenceAtEveryInterval) {
  for (Index interval : {1, 4, 7, 32, 40, 64, 200}) {
    for (bool packed : {false, true}) {
      for (StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
        Case c;
        c.recurrence = pick_from(random, std::vector<Recurrence>{kda(), gated_delta_net(), delta_net(), gla(), linear(),
                                                                 normalized_linear()});
        c.batch = packed ? 1 : 2;
        if (packed) c.cu_seqlens = {0, 0, 5, 69, 70, 135, 199, 199};  // lengths 0, 5, 64, 1, 65, 64, 0
        c.tokens = packed ? 199 : 129;
        c.heads = 1;
        c.value_heads = 2;
        c.key_dim = 24;
        c.value_dim = 20;
        c.with_initial_state = pick(random, 0, 1) == 0;
        c.state_interval = interval;
        c.state_layout = layout;
        expect_right(make_inputs(c, random));
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(IntermediateStates, MatchReferenceOnSampledProblems) {
  const int samples = small_run() ? 10 : 60;
  const std::vector<Index> small_dims = {1, 2, 5, 16, 33, 48};
  for (int sample = 0; sample < samples; ++sample) {
    SCOPED_TRACE("sample " + std::to_string(sample));
    Case c = random_case(random);
    c.state_interval = pick_from(random, std::vector<Index>{1, 4, 7, 32, 40, 64, 1000});
    if (c.state_interval < 32) {  // many states: small ones
      c.key_dim = pick_from(random, small_dims);
      c.value_dim = pick_from(random, small_dims);
    }
    expect_right(make_inputs(c, random));
    if (HasFailure()) return;
  }
}

/// S <- e^-0.5 S + 0.5, one head of one channel and column.
Inputs leaking_sum(std::vector<Index> cu_seqlens, Index interval) {
  Case c;
  c.recurrence = mamba2();
  c.tokens = cu_seqlens.back();
  c.cu_seqlens = std::move(cu_seqlens);
  c.key_dim = c.value_dim = 1;
  c.state_interval = interval;
  Inputs inputs = zero_inputs(c);
  for (Array* ones : {&inputs.q, &inputs.k, &inputs.v}) ones->fill(1.0f);
  inputs.beta.fill(0.5f);
  inputs.log_decay.fill(-0.5f);
  return inputs;
}

TEST_P(IntermediateStates, V08_SequencesCountTheirOwnTokens) {
  // Two states have room, and one is written: that of the second sequence after its token 4. At token 4 of all, its first, the state
  // is 0.5, and at token 8 of all 1.1664378.
  const auto got = run(leaking_sum({0, 3, 10}, 4));
  if (!got) return;
  const auto alone = run(leaking_sum({0, 4}, 4));
  ASSERT_TRUE(alone);
  ASSERT_EQ(got->intermediate_states.size(), 2);
  EXPECT_NEAR(got->intermediate_states.values[0], 1.0987701, 1e-6);  // a few roundings of 2^-24
  EXPECT_NEAR(got->intermediate_states.values[0], alone->intermediate_states.values[0], 1e-6);
  EXPECT_NEAR(alone->final_state.values[0], alone->intermediate_states.values[0], 1e-6);
}

TEST_P(IntermediateStates, V08_LongSequences) { expect_right(leaking_sum({0, 500, 1200, 2100}, 128)); }

/// Offsets in device memory are not checked before the launch; wrong ones ask for more states than there is room for.
TEST_P(IntermediateStates, V09_WrongOffsetsWriteNothingPastTheEnd) {
  if (device().type == DeviceType::cpu) GTEST_SKIP() << "the CPU reads the offsets first and refuses them";
  Inputs inputs = leaking_sum({0, 64}, 8);
  inputs.problem.cu_seqlens = {0, 64, 0, 64, 0, 64};
  Call call(inputs, device());
  if (run(call)) call.outputs();  // looks at the memory around every output
}

EVERY_KERNEL(IntermediateStates);

}  // namespace
}  // namespace delta_attention::test
