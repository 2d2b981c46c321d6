// Problems drawn at random from everything the library takes, and a fixed core that crosses recurrences, types and lengths.

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class Sweep : public KernelTest {};

TEST_P(Sweep, MatchesReferenceOnSampledProblems) {
  const int samples = small_run() ? 25 : 250;
  for (int sample = 0; sample < samples && !HasFatalFailure(); ++sample) {
    SCOPED_TRACE("sample " + std::to_string(sample));
    expect_matches_oracle(make_inputs(random_case(random), random));
    if (HasFailure()) break;
  }
  EXPECT_GT(ran(), 0) << "the kernel refuses everything";
  RecordProperty("ran", ran());
  RecordProperty("refused", refused());
}

TEST_P(Sweep, MatchesReferenceOnEveryRecurrenceTypeAndGate) {
  for (const Preset& preset : kPresets) {
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (Index tokens : {1, 33}) {
        SCOPED_TRACE(preset.name);
        Case c;
        c.recurrence = preset.recurrence;
        c.dtype = c.gate_dtype = c.beta_dtype = dtype;
        c.tokens = tokens;
        c.heads = 2;
        c.value_heads = 4;
        c.key_dim = 32;
        c.value_dim = 48;
        c.with_initial_state = tokens == 33;
        expect_matches_oracle(make_inputs(c, random));
      }
    }
  }
}

EVERY_KERNEL(Sweep);

}  // namespace
}  // namespace delta_attention::test
