// The oracle itself, against numbers worked out by hand: everything else is judged by it.

#include <gtest/gtest.h>

#include <cmath>

#include "support/run.h"

namespace delta_attention::test {
namespace {

Case scalar_case(Recurrence recurrence, Index tokens) {
  Case c;
  c.recurrence = recurrence;
  c.tokens = tokens;
  c.key_dim = c.value_dim = 1;
  c.scale = 1.0f;
  return c;
}

Inputs ones(const Case& c) {
  Inputs inputs = zero_inputs(c);
  inputs.q.fill(1);
  inputs.k.fill(1);
  inputs.v.fill(1);
  inputs.beta.fill(1);
  return inputs;
}

TEST(Reference, LinearCountsAndDecayIsAGeometricSum) {
  Inputs inputs = ones(scalar_case(retention(), 4));
  EXPECT_EQ(oracle(ones(scalar_case(linear(), 4))).out, (std::vector<double>{1, 2, 3, 4}));
  inputs.log_decay.fill(static_cast<float>(std::log(0.5)));
  const Truth truth = oracle(inputs);
  const double expected[] = {1, 1.5, 1.75, 1.875};
  for (int t = 0; t < 4; ++t) EXPECT_NEAR(truth.out[static_cast<std::size_t>(t)], expected[t], 1e-7);
}

TEST(Reference, NormalisedOutputIsTheWeightedMean) {
  Inputs inputs = ones(scalar_case(normalized_linear(), 3));
  inputs.k.values = {1, 2, 3};
  inputs.v.values = {10, 20, 30};
  inputs.q.values = {5, 5, 5};
  const Truth truth = oracle(inputs);  // (sum k v) / (sum k)
  EXPECT_EQ(truth.out, (std::vector<double>{10, 50.0 / 3, 140.0 / 6}));
  EXPECT_EQ(truth.final_normalizer, (std::vector<double>{6}));
}

TEST(Reference, DeltaUpdateReplacesWhatTheKeyHeld) {
  Inputs inputs = ones(scalar_case(delta_net(), 3));
  inputs.v.values = {4, 7, -2};
  EXPECT_EQ(oracle(inputs).out, (std::vector<double>{4, 7, -2}));
  inputs.beta.fill(0.5f);
  EXPECT_EQ(oracle(inputs).out, (std::vector<double>{2, 4.5, 1.25}));
}

TEST(Reference, V11_OneTokenByHand) {
  const Inputs inputs = v11_inputs();
  const Truth truth = oracle(inputs);
  const double out[] = {7, 13}, state[] = {1, 2, 6.5, 12};
  for (std::size_t i = 0; i < 2; ++i) EXPECT_NEAR(truth.out[i], out[i], 1e-6);
  for (std::size_t i = 0; i < 4; ++i) EXPECT_NEAR(truth.final_state[i], state[i], 1e-6);
}

TEST(Reference, N01_StrongDecayInClosedForm) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 64;
  c.scale = 1.0f;
  Inputs inputs = zero_inputs(c);
  for (Index t = 0; t < 64; ++t) {
    inputs.q.set({0, t, 0, t % 16}, 1);
    inputs.k.set({0, t, 0, t % 16}, 1);
  }
  inputs.v.fill(1);
  inputs.beta.fill(1);
  inputs.log_decay.fill(-20);
  const Truth truth = oracle(inputs);
  for (double x : truth.out) EXPECT_NEAR(x, 1, 1e-15);
  for (int row = 0; row < 16; ++row) {
    const double expected = std::exp(-20.0 * (15 - row));
    EXPECT_NEAR(truth.final_state[static_cast<std::size_t>(row) * 16 + 3], expected, 1e-12 * expected);
  }
}

TEST(Reference, N17_ReflectionAtBetaTwo) {
  Case c = scalar_case(delta_net(), 5);
  Inputs inputs = ones(c);
  inputs.beta.fill(2);
  EXPECT_EQ(oracle(inputs).out, (std::vector<double>{2, 0, 2, 0, 2}));
}

TEST(Reference, G01_GroupedHeads) {
  Case c = scalar_case(linear(), 1);
  c.heads = 2;
  c.value_heads = 4;
  c.key_dim = 2;
  Inputs inputs = ones(c);
  inputs.q.values = {1, 0, 0, 10};
  inputs.k.values = {1, 0, 0, 1};
  inputs.v.values = {1, 2, 3, 4};
  EXPECT_EQ(oracle(inputs).out, (std::vector<double>{1, 2, 30, 40}));
}

TEST(Reference, ChannelGatesActOnTheirChannel) {
  Case c = scalar_case(gla(), 1);
  c.key_dim = 2;
  c.with_initial_state = true;
  Inputs inputs = ones(c);
  inputs.beta.fill(0);
  inputs.initial_state.fill(1);
  inputs.log_decay.values = {0, -1};
  const Truth truth = oracle(inputs);
  EXPECT_EQ(truth.final_state[0], 1.0);
  EXPECT_NEAR(truth.final_state[1], std::exp(-1.0), 1e-15);
}

TEST(Reference, FusionsInClosedForm) {
  Case c = scalar_case(kda(), 1);
  c.key_dim = 2;
  c.qk_l2norm = true;
  c.beta_space = BetaSpace::twice_sigmoid;
  Inputs inputs = ones(c);
  inputs.q.values = {3, 4};
  inputs.k.values = {3, 4};
  inputs.beta.fill(0);  // 2 sigmoid(0) = 1
  EXPECT_NEAR(oracle(inputs).out[0], 25 / (25 + 1e-6), 1e-14);

  Case gate = scalar_case(gated_delta_net(), 1);
  gate.with_initial_state = true;
  gate.gate_space = GateSpace::softplus;
  Inputs raw = ones(gate);
  raw.beta.fill(0);
  raw.initial_state.fill(1);
  raw.a_log.fill(static_cast<float>(std::log(2.0)));
  raw.log_decay.fill(1);
  raw.dt_bias.fill(-1);
  EXPECT_NEAR(oracle(raw).final_state[0], std::exp(-2 * std::log(2.0)), 1e-7);  // softplus(0) = ln 2
  raw.problem.gate_space = GateSpace::lower_bound;
  EXPECT_NEAR(oracle(raw).final_state[0], std::exp(-2.5), 1e-7);  // -5 sigmoid(0)
}

TEST(Reference, PackedSequencesKeepApart) {
  Case c = scalar_case(linear(), 5);
  c.cu_seqlens = {0, 2, 2, 5};
  EXPECT_EQ(oracle(ones(c)).out, (std::vector<double>{1, 2, 1, 2, 3}));
  EXPECT_EQ(oracle(ones(c)).final_state, (std::vector<double>{2, 0, 3}));
}

// Guarded memory: what the comparisons rely on to see a stray write.
TEST(Guards, SeeStrayWritesAndModifiedInputs) {
  const Array array(DType::bf16, {2, 3}, 1.0f);
  Stored padded(array, {{}, {0, 2}, 1}, cpu(), kNanByte);
  padded.put(array);
  EXPECT_EQ(padded.get().values, array.values);
  EXPECT_TRUE(padded.gaps_intact());
  EXPECT_TRUE(padded.unchanged());
  auto* data = static_cast<std::uint16_t*>(padded.writable().data);
  data[1] = 0;  // an element
  EXPECT_TRUE(padded.gaps_intact());
  EXPECT_FALSE(padded.unchanged());
  for (std::ptrdiff_t stray : {-1, 3, 10}) {  // before, between rows, after
    const std::uint16_t before = data[stray];
    data[stray] = 0;
    EXPECT_FALSE(padded.gaps_intact()) << stray;
    data[stray] = before;
  }
  EXPECT_TRUE(padded.gaps_intact());
}

TEST(Guards, ATransposedPlacementIsTransposedMemory) {
  Array array(DType::f32, {2, 3});
  array.values = {0, 1, 2, 3, 4, 5};
  Stored stored(array, {{1, 0}, {}, 0}, cpu(), kNanByte);
  stored.put(array);
  const float expected[] = {0, 3, 1, 4, 2, 5};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(static_cast<const float*>(stored.view().data)[i], expected[i]);
  EXPECT_EQ(stored.get().values, array.values);
}

TEST(Reference, IntermediateStatesAreTheFinalStatesOfWhatCameBefore) {
  Random random = random_for("Reference.IntermediateStates");
  for (bool packed : {false, true}) {
    Case c;
    c.recurrence = kda();
    c.batch = packed ? 1 : 3;
    c.tokens = 14;
    if (packed) c.cu_seqlens = {0, 2, 9, 9, 14};
    c.value_heads = 2;
    c.key_dim = 3;
    c.value_dim = 5;
    c.with_initial_state = true;
    c.state_interval = 3;
    const Inputs inputs = make_inputs(c, random);
    const std::vector<double> states = oracle(inputs).intermediate_states;
    std::vector<double> expected;
    for (Index n = 0; n < c.sequences(); ++n) {
      for (Index tokens = 3; tokens <= c.length(n); tokens += 3) {
        const std::vector<double> state = oracle(first_tokens(inputs, n, tokens)).final_state;
        expected.insert(expected.end(), state.begin(), state.end());
      }
    }
    ASSERT_EQ(states.size(), (packed ? 4u : 12u) * 2 * 3 * 5);
    expected.resize(states.size(), 0.0);  // packed: room for 4, and 0 + 2 + 0 + 1 written
    EXPECT_EQ(states, expected);
  }
}

}  // namespace
}  // namespace delta_attention::test
