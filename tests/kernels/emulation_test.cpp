// The emulations of the staged kernels' rounding (reference/emulation.h): right, as exact as the kernels must be, flat in T where
// sums are compensated, and, where there is a GPU, as far from float64 as the kernels themselves.

#include "emulation.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/kernel_test.h"

namespace delta_attention::emulation {
static void PrintTo(const StagedKernel& kernel, std::ostream* stream) { *stream << kernel.name; }
}  // namespace delta_attention::emulation

namespace delta_attention::test {
namespace {

using emulation::kStagedKernels;
using emulation::Schedule;
using emulation::StagedKernel;

constexpr double kUnit = 0x1p-24;  // of f32: the most that one rounding adds, relatively

std::string stage_name(const ::testing::TestParamInfo<StagedKernel>& info) { return info.param.stage; }

Outputs emulate(const Inputs& inputs, const StagedKernel& kernel) {
  Call call(inputs, cpu());
  emulation::forward(call.args, kernel);
  return call.outputs();
}

double largest_relative_error(const Array& got, const std::vector<double>& truth) {
  double largest = 0;
  for (std::size_t i = 0; i < truth.size(); ++i) largest = std::max(largest, std::fabs(got.values[i] / truth[i] - 1));
  return largest;
}

class Emulation : public ::testing::TestWithParam<StagedKernel> {
 protected:
  Random random = random_for("Emulation");
};

TEST_P(Emulation, MatchesFloat64OnRandomProblems) {
  for (int i = 0; i < 40; ++i) {
    const Inputs inputs = make_inputs(random_case(random), random);
    expect_matches(inputs, emulate(inputs, GetParam()), oracle(inputs));
  }
}

TEST_P(Emulation, MatchesFloat64WithAnyMicroChunkAndRowGroups) {
  for (int micro_chunk : {1, 4, 8, 16}) {
    for (int row_groups : {1, 2, 7, 16}) {
      StagedKernel kernel = GetParam();
      kernel.schedule.micro_chunk = micro_chunk;
      kernel.schedule.row_groups = row_groups;
      Case c;
      c.recurrence = kda();
      c.tokens = 37;
      c.key_dim = 20;
      c.value_dim = 12;
      c.with_initial_state = true;
      const Inputs inputs = make_inputs(c, random);
      expect_matches(inputs, emulate(inputs, kernel), oracle(inputs));
    }
  }
}

TEST_P(Emulation, KeepsRoundingsOnlyWithCompensation) {
  Case c;
  c.recurrence = linear();
  c.tokens = 4096;
  c.key_dim = c.value_dim = 1;
  c.scale = 1.0f;
  Inputs inputs = zero_inputs(c);
  inputs.q.fill(1.0f);
  inputs.k.fill(1.0f);
  inputs.v.fill(0x1p-25f);  // half an ulp of what lies below 1: a plain sum never moves
  inputs.beta.fill(1.0f);
  inputs.v.values[0] = 1.0f;
  const Outputs got = emulate(inputs, GetParam());
  EXPECT_EQ(got.final_state.values[0], GetParam().compensated ? 1.0f + 4095 * 0x1p-25f : 1.0f);
}

TEST_P(Emulation, GivesTheSameBitsInParts) {
  Case c;
  c.recurrence = kda();
  c.tokens = 64;
  c.key_dim = 24;
  c.value_dim = 20;
  const Inputs inputs = make_inputs(c, random);
  const Outputs whole = emulate(inputs, GetParam());
  Call call(inputs, cpu());
  const auto in_parts = [&](auto emulation) {
    for (Index begin = 0; begin < c.tokens; begin += 16) emulation.run(0, begin, begin + 16);
    emulation.store_final();
  };
  if (GetParam().compensated) {
    in_parts(emulation::HeadEmulation<CompensatedSum>(call.args, GetParam().schedule, 0, 0));
  } else {
    in_parts(emulation::HeadEmulation<PlainSum>(call.args, GetParam().schedule, 0, 0));
  }
  EXPECT_TRUE(call.outputs() == whole);
}

// Sums of positive terms: keys, values and features above 0, no decay, a normaliser. Rounding has no cancellation to hide behind.
//
// A compensated sum of T positive terms is within (u + 4 T u^2) of the truth, relatively: value() rounds once; every step drops
// no more than the rounding of the compensation, which is at most u times the sum, so u^2 of the sum a step, and there are
// up to four such roundings in one (the term, the product's error, the decay, the addition).
// A plain one makes T roundings of random sign, each of the size of the sum so far: about 0.3 u sqrt(T) of the truth, 150 u here
// for T = 2^18. That it exceeds 16 u in the largest of 16 channels is as good as certain.
TEST_P(Emulation, CompensationKeepsTheErrorOfSumsFlat) {
  Case c;
  c.recurrence = normalized_linear();
  c.tokens = Index{1} << (small_run() ? 12 : 18);
  c.key_dim = 16;
  c.value_dim = 4;
  Inputs inputs = make_inputs(c, random);
  for (float& v : inputs.v.values) v = static_cast<float>(uniform(random, 0.5, 1.5));
  Call call(inputs, cpu());
  emulation::forward(call.args, GetParam());
  const Outputs got = call.outputs();
  const Truth truth = oracle(inputs);
  const double flat = kUnit + 4 * static_cast<double>(c.tokens) * kUnit * kUnit;
  const double of_normalizer = largest_relative_error(got.final_normalizer, truth.final_normalizer);
  const double of_state = largest_relative_error(got.final_state, truth.final_state);
  if (GetParam().compensated) {
    EXPECT_LE(of_normalizer, flat);
    EXPECT_LE(of_state, flat + kUnit);  // u = beta v is rounded before it is summed, which no summation can undo
  } else if (!small_run()) {
    EXPECT_GT(of_normalizer, 16 * kUnit);
    EXPECT_GT(of_state, 16 * kUnit);
  }
}

INSTANTIATE_TEST_SUITE_P(Staged, Emulation, ::testing::ValuesIn(kStagedKernels), stage_name);

/// Two programs for the same schedule and summation make the same roundings but for two things.
///  - Dots of K are added in another order. Two orders of one dot differ by u sqrt(K) of it, as the bar of run.cpp counts roundings
///    (a random walk over the channels); an output passes through four dots in a row (prediction, Gram products, solve, read),
///    each of two orders: 8 u sqrt(K).
///  - The exponential of a micro-chunk's decay may be an ulp off, either way, and a state that decays slowly remembers all of them:
///    u sqrt(T / F).
void expect_agreement(const Inputs& inputs, const Array& a, const Array& b, const std::vector<double>& truth,
                      const char* what) {
  constexpr double kMicroChunk = 8;
  const Case& c = inputs.problem;
  SCOPED_TRACE(std::string(what) + "; " + c.describe());
  EXPECT_LE(
      relative_error(a.values, {b.values.begin(), b.values.end()}),
      kUnit * (8 * std::sqrt(static_cast<double>(c.key_dim)) + std::sqrt(static_cast<double>(c.tokens) / kMicroChunk)));

  // Root mean squares over thousands of elements, of as many roundings each. The sizes of what is rounded depend on the order of
  // the dots: one running sum of K against a tree is a factor sqrt((K / 2) / log2 K) = 2.3 at K = 64, the largest there is.
  // Where next to nothing is rounded, the rounding of the result itself remains.
  const double of_a = relative_error(a.values, truth), of_b = relative_error(b.values, truth);
  EXPECT_LE(of_a, 3 * of_b + kUnit);
  EXPECT_LE(of_b, 3 * of_a + kUnit);
}

void expect_agreement(const Inputs& inputs, const Outputs& a, const Outputs& b) {
  const Truth truth = oracle(inputs);
  expect_agreement(inputs, a.out, b.out, truth.out, "out");
  expect_agreement(inputs, a.final_state, b.final_state, truth.final_state, "final_state");
  if (!inputs.problem.recurrence.normalize) return;
  expect_agreement(inputs, a.final_normalizer, b.final_normalizer, truth.final_normalizer, "final_normalizer");
}

/// Problems on which errors of all kinds show: none forgotten, slowly forgotten, forgotten at once.
std::vector<Inputs> telling_problems(Random& random) {
  std::vector<Inputs> problems;
  for (Recurrence recurrence : {normalized_linear(), retention(), gla(), delta_net(), gated_delta_net(), kda()}) {
    for (GateRegime regime : {GateRegime::slow, GateRegime::mixed}) {
      Case c;
      c.recurrence = recurrence;
      c.tokens = small_run() ? 256 : 2048;
      c.key_dim = c.value_dim = 64;
      c.gate_regime = regime;
      problems.push_back(make_inputs(c, random));
    }
  }
  return problems;
}

/// The tolerance holds for two orders of the same sums on one machine, or it would say nothing about two machines.
TEST(EmulationAgreement, HoldsBetweenTheTwoSchedules) {
  Random random = random_for("EmulationAgreement");
  for (const Inputs& inputs : telling_problems(random)) {
    expect_agreement(inputs, emulate(inputs, kStagedKernels[0]), emulate(inputs, kStagedKernels[2]));
    expect_agreement(inputs, emulate(inputs, kStagedKernels[1]), emulate(inputs, kStagedKernels[3]));
  }
}

/// The kernels of this build by name, where there is a GPU.
class StagedKernels : public ::testing::TestWithParam<StagedKernel> {
 protected:
  void SetUp() override {
    const std::string reason = cuda_skip_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
    bool built = false;
    for (const KernelInfo& kernel : cuda_kernels()) built = built || kernel.name == GetParam().name;
    if (!built) GTEST_SKIP() << "this build has no kernel " << GetParam().name;
  }

  Outputs run_on_gpu(const Inputs& inputs) {
    Call call(inputs, cuda(0));
    Execution execution;
    execution.kernel = GetParam().name;
    execution.settings = GetParam().settings;
    call.run(execution);
    return call.outputs();
  }
};

TEST_P(StagedKernels, AgreeWithTheirEmulation) {
  Random random = random_for("StagedKernels");
  for (const Inputs& inputs : telling_problems(random)) {
    expect_agreement(inputs, run_on_gpu(inputs), emulate(inputs, GetParam()));
  }
}

INSTANTIATE_TEST_SUITE_P(Staged, StagedKernels, ::testing::ValuesIn(kStagedKernels), stage_name);

}  // namespace
}  // namespace delta_attention::test
