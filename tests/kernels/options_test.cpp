// Rows A*: dtypes, gate domains and options do what they say, on every path.

#include <cmath>
#include <limits>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class Options : public KernelTest {
 protected:
  void expect_rejected(Call& call, const Execution& execution, const std::string& argument) {
    try {
      if (run(call, execution)) ADD_FAILURE() << "taken in spite of a bad " << argument;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
      EXPECT_TRUE(call.outputs_untouched());
    }
  }
};

TEST_P(Options, A02_SixteenBitInputsAreReadAsWhatTheyAre) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    for (Index tokens : {1, 70}) {
      Case c;
      c.recurrence = kda();
      c.dtype = c.gate_dtype = c.beta_dtype = dtype;
      c.tokens = tokens;
      c.key_dim = c.value_dim = 64;
      expect_matches_oracle(make_inputs(c, random));
    }
  }
}

TEST_P(Options, A02_MixedDtypesAreRejected) {
  Case c;
  c.recurrence = kda();
  c.dtype = DType::f16;
  c.tokens = 5;
  const Inputs inputs = make_inputs(c, random);
  Call k(inputs, device()), v(inputs, device()), out(inputs, device());
  k.args.k.dtype = DType::bf16;
  v.args.v.dtype = DType::bf16;
  out.args.out.dtype = DType::bf16;
  expect_rejected(k, execution(), "k");
  expect_rejected(v, execution(), "v");
  expect_rejected(out, execution(), "out");
}

TEST_P(Options, A03_GateSpaces) {
  const auto gate = [&](GateSpace space, float x) {
    Case c;
    c.recurrence = gated_delta_net();
    c.with_initial_state = true;
    c.gate_space = space;
    Inputs inputs = make_inputs(c, random);
    inputs.beta.fill(0.0f);
    inputs.initial_state.fill(1.0f);
    inputs.log_decay.fill(x);
    return inputs;
  };
  const std::pair<Inputs, float> cases[] = {{gate(GateSpace::log, static_cast<float>(std::log(0.5))), 0.5f},
                                            {gate(GateSpace::linear, 0.5f), 0.5f},
                                            {gate(GateSpace::log2, -1.0f), 0.5f},
                                            {gate(GateSpace::linear, 0.0f), 0.0f},
                                            {gate(GateSpace::log, -std::numeric_limits<float>::infinity()), 0.0f}};
  for (const auto& [inputs, expected] : cases) {
    if (const auto got = run(inputs)) {
      expect_near(got->final_state.values, std::vector<float>(got->final_state.values.size(), expected), 1e-7, 0,
                  "final_state");
    }
  }
  Execution strict = execution();
  strict.check_values = true;
  for (float bad : {-1.0f, 1.5f}) {
    Call call(gate(GateSpace::linear, bad), device());
    expect_rejected(call, strict, "log_decay[0,0,0]");
  }
}

/// A05 (and A04: each option is a named field of one struct, and toggling it alone has its own effect): the result changes, and
/// changes into what the oracle says.
TEST_P(Options, A05_EveryOptionHasItsEffect) {
  struct Toggle {
    const char* name;
    void (*apply)(Case&);
  };
  const Toggle toggles[] = {
      {"qk_l2norm", [](Case& c) { c.qk_l2norm = true; }},
      {"scale", [](Case& c) { c.scale = 0.75f; }},
      {"normalize", [](Case& c) { c.recurrence.normalize = true; }},
      {"update", [](Case& c) { c.recurrence.update = Update::additive; }},
      {"beta sigmoid", [](Case& c) { c.beta_space = BetaSpace::sigmoid; }},
      {"beta twice_sigmoid", [](Case& c) { c.beta_space = BetaSpace::twice_sigmoid; }},
      {"gate log2", [](Case& c) { c.gate_space = GateSpace::log2; }},
      {"no beta", [](Case& c) { c.with_beta = false; }},
      {"no log_decay", [](Case& c) { c.with_gate = false; }},
  };
  enum Path { prefill, decode, packed };
  for (Path path : {prefill, decode, packed}) {
    for (Recurrence recurrence : {kda(), gated_delta_net()}) {
      Case plain;
      plain.recurrence = recurrence;
      plain.tokens = path == decode ? 1 : 40;
      plain.key_dim = 32;
      plain.gate_regime = GateRegime::slow;
      plain.with_initial_state = true;
      if (path == packed) plain.cu_seqlens = {0, 9, 40};
      Inputs base = make_inputs(plain, random);
      for (float& x : base.q.values) x = std::fabs(x) * 1.5f;  // not of unit length; positive, for `normalize`
      for (float& x : base.k.values) x = std::fabs(x) * 1.2f;
      const auto before = run(base);
      if (!before) continue;
      for (const Toggle& toggle : toggles) {
        SCOPED_TRACE(std::string(toggle.name) + ", path " + std::to_string(path));
        Inputs inputs = base;
        toggle.apply(inputs.problem);
        if (!inputs.problem.with_beta) inputs.beta = {};
        if (!inputs.problem.with_gate) inputs.log_decay = {};
        if (inputs.problem.recurrence.normalize) {
          inputs.initial_normalizer = Array(DType::f32, {plain.sequences(), 1, plain.key_dim}, 0.5f);
        }
        const auto after = run(inputs);
        if (!after) continue;
        EXPECT_FALSE(after->out.values == before->out.values) << "no effect";
        expect_matches(inputs, *after, oracle(inputs));
      }
    }
  }
}

TEST_P(Options, A05_RawGates) {
  for (GateSpace space : {GateSpace::softplus, GateSpace::lower_bound}) {
    for (Recurrence recurrence : {kda(), gated_delta_net()}) {
      for (bool with_dt_bias : {false, true}) {
        Case c;
        c.recurrence = recurrence;
        c.tokens = 40;
        c.heads = 2;
        c.value_heads = 4;
        c.gate_space = space;
        c.with_dt_bias = with_dt_bias;
        c.with_initial_state = true;
        const Inputs inputs = make_inputs(c, random);
        const auto got = run(inputs);
        if (!got) continue;
        expect_matches(inputs, *got, oracle(inputs));
        for (Array Inputs::*operand : {&Inputs::a_log, &Inputs::dt_bias}) {
          Inputs other = inputs;
          if (!(other.*operand).present()) continue;
          for (float& x : (other.*operand).values) x += 1.0f;
          const auto changed = run(other);
          ASSERT_TRUE(changed);
          EXPECT_FALSE(changed->out.values == got->out.values) << "a raw gate's parameter has no effect";
        }
      }
    }
  }
}

TEST_P(Options, A05_GateLowerBound) {
  Case c;
  c.recurrence = kda();
  c.with_initial_state = true;
  c.gate_space = GateSpace::lower_bound;
  c.with_dt_bias = false;
  Inputs inputs = make_inputs(c, random);
  inputs.beta.fill(0.0f);
  inputs.log_decay.fill(0.0f);  // sigmoid(0) = 1/2
  inputs.initial_state.fill(1.0f);
  Call call(inputs, device());
  call.args.gate_lower_bound = -2.0f;
  if (!run(call)) return;
  for (float cell : call.outputs().final_state.values) EXPECT_NEAR(cell, std::exp(-1.0), 1e-6);
}

TEST_P(Options, ThreadCountChangesNothing) {
  Case c;
  c.recurrence = kda();
  c.batch = 3;
  c.tokens = 70;
  c.heads = 1;
  c.value_heads = 5;
  c.key_dim = c.value_dim = 32;
  Call call(make_inputs(c, random), device());
  Execution one = execution();
  one.threads = 1;
  if (!run(call, one)) return;
  const Outputs expected = call.outputs();
  for (int threads : {0, 2, 3, 16, 100}) {
    Execution many = execution();
    many.threads = threads;
    call.poison_outputs();
    ASSERT_TRUE(run(call, many));
    EXPECT_TRUE(call.outputs() == expected) << threads << " threads";
  }
  Execution negative = execution();
  negative.threads = -1;
  call.poison_outputs();
  expect_rejected(call, negative, "threads");
}

/// NaN comes out where the mathematics puts it, and nowhere else.
TEST_P(Options, NanStaysWhereItBelongs) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (Recurrence recurrence : {kda(), gated_delta_net(), gla(), linear()}) {
    for (Array Inputs::*operand : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::log_decay, &Inputs::beta}) {
      Case c;
      c.recurrence = recurrence;
      c.batch = 2;
      c.tokens = 90;
      c.heads = c.value_heads = 2;
      c.key_dim = 16;
      c.value_dim = 20;
      Inputs inputs = make_inputs(c, random);
      Array& array = inputs.*operand;
      if (!array.present()) continue;
      // Token 37 of batch 0, its first head and channel.
      array.values[static_cast<std::size_t>(37 * (array.size() / (c.batch * c.tokens)))] = nan;
      const auto got = run(inputs);
      if (!got) continue;
      const Truth truth = oracle(inputs);
      std::size_t wrong = 0;
      for (std::size_t i = 0; i < truth.out.size(); ++i) {
        wrong += std::isnan(got->out.values[i]) != std::isnan(truth.out[i]);
      }
      EXPECT_EQ(wrong, 0u) << "outputs that are NaN where the oracle is not, or the reverse; operand "
                           << (operand == &Inputs::q   ? "q"
                               : operand == &Inputs::k ? "k"
                               : operand == &Inputs::v ? "v"
                                                       : "gate or beta")
                           << " " << c.describe();
      for (std::size_t i = 0; i < truth.final_state.size(); ++i) {
        ASSERT_EQ(std::isnan(got->final_state.values[i]), std::isnan(truth.final_state[i])) << "state element " << i;
      }
    }
  }
}

EVERY_KERNEL(Options);

}  // namespace
}  // namespace delta_attention::test
