// Rows L*: strides and alignment. Rows G*: which head reads what. Rows D*: head dimensions.

#include <cmath>
#include <cstring>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class Layouts : public KernelTest {};

TEST_P(Layouts, L01_ViewsOfOneFusedBuffer) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 37;
  c.heads = 2;
  c.value_heads = 4;
  c.key_dim = 16;
  c.value_dim = 24;
  const Inputs inputs = make_inputs(c, random);
  const auto packed = run(inputs);
  if (!packed) return;

  const Index qk = c.heads * c.key_dim, vs = c.value_heads * c.value_dim, row = 2 * qk + vs + 13;
  GuardedBuffer fused(device(), static_cast<std::size_t>(c.tokens * row) * sizeof(float));
  for (Index t = 0; t < c.tokens; ++t) {
    auto* target = reinterpret_cast<float*>(fused.image()) + t * row;
    std::memcpy(target, inputs.q.values.data() + t * qk, static_cast<std::size_t>(qk) * sizeof(float));
    std::memcpy(target + qk, inputs.k.values.data() + t * qk, static_cast<std::size_t>(qk) * sizeof(float));
    std::memcpy(target + 2 * qk, inputs.v.values.data() + t * vs, static_cast<std::size_t>(vs) * sizeof(float));
  }
  fused.upload();
  const auto* base = static_cast<const float*>(fused.data());
  Call call(inputs, device());
  const Index all = c.tokens * row;
  call.args.q = strided_tensor(base, c.dtype, {1, c.tokens, c.heads, c.key_dim}, {all, row, c.key_dim, 1}, device());
  call.args.k =
      strided_tensor(base + qk, c.dtype, {1, c.tokens, c.heads, c.key_dim}, {all, row, c.key_dim, 1}, device());
  call.args.v = strided_tensor(base + 2 * qk, c.dtype, {1, c.tokens, c.value_heads, c.value_dim},
                               {all, row, c.value_dim, 1}, device());
  ASSERT_TRUE(run(call));
  EXPECT_TRUE(call.outputs() == *packed);
  EXPECT_TRUE(fused.unchanged());
}

TEST_P(Layouts, L02_EachOperandPaddedAlone) {
  Case c;
  c.recurrence = kda();
  c.tokens = 33;
  c.heads = c.value_heads = 2;
  c.key_dim = c.value_dim = 128;
  c.with_initial_state = true;
  const Inputs inputs = make_inputs(c, random);
  const auto packed = run(inputs);
  if (!packed) return;
  const Placement padded{{}, {0, 0, 0, 128}, 0};  // rows of 256, the first 128 used
  for (Placement Placements::*operand : {&Placements::q, &Placements::k, &Placements::v, &Placements::log_decay,
                                         &Placements::out, &Placements::initial_state, &Placements::final_state}) {
    CallOptions options;
    options.placements.*operand = padded;
    const auto got = run(inputs, options);
    ASSERT_TRUE(got);
    EXPECT_TRUE(*got == *packed);
  }
  CallOptions options;
  options.placements.beta = {{}, {0, 1, 1}, 0};
  const auto got = run(inputs, options);
  ASSERT_TRUE(got);
  EXPECT_TRUE(*got == *packed);
}

TEST_P(Layouts, EveryLayoutGivesTheSameBits) {
  for (const Preset& preset : kPresets) {
    Case c;
    c.recurrence = preset.recurrence;
    c.batch = 2;
    c.tokens = 19;
    c.heads = 2;
    c.value_heads = 4;
    c.key_dim = 20;
    c.value_dim = 36;
    c.dtype = DType::bf16;
    c.with_initial_state = true;
    Inputs inputs = make_inputs(c, random);
    const auto packed = run(inputs);
    if (!packed) continue;
    for (Layout layout : {Layout::bhtd, Layout::padded}) {
      inputs.problem.layout = layout;
      const auto got = run(inputs);
      ASSERT_TRUE(got);
      EXPECT_TRUE(*got == *packed) << inputs.problem.describe();
    }
  }
}

TEST_P(Layouts, OneDecayPerHeadServesEveryTokenWithStrideZero) {
  Case c;
  c.recurrence = retention();
  c.batch = 2;
  c.tokens = 40;
  c.heads = c.value_heads = 3;
  Inputs inputs = make_inputs(c, random);
  for (Index b = 0; b < 2; ++b) {
    for (Index t = 0; t < c.tokens; ++t) {
      for (Index h = 0; h < 3; ++h) {
        inputs.log_decay.set({b, t, h}, std::log1p(-std::exp2(-5.0f - static_cast<float>(h))));
      }
    }
  }
  const auto full = run(inputs);
  if (!full) return;
  Call call(inputs, device());
  call.args.log_decay.strides = {0, 0, 1, 0};
  ASSERT_TRUE(run(call));
  EXPECT_TRUE(call.outputs() == *full);
}

TEST_P(Layouts, L04_AnyNumberOfHeads) {
  for (Index heads : {1, 3, 5, 7, 12, 13}) {
    for (Index tokens : {32, 33}) {
      Case c;
      c.recurrence = gated_delta_net();
      c.dtype = c.beta_dtype = DType::bf16;
      c.tokens = tokens;
      c.heads = c.value_heads = heads;
      c.key_dim = c.value_dim = 32;
      expect_matches_oracle(make_inputs(c, random));
    }
  }
}

TEST_P(Layouts, L05_BasePointersOffTheVectorGrid) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Case c;
    c.recurrence = kda();
    c.dtype = c.gate_dtype = dtype;
    c.tokens = 33;
    c.key_dim = c.value_dim = 64;
    c.with_initial_state = true;
    const Inputs inputs = make_inputs(c, random);
    const auto aligned = run(inputs);
    if (!aligned) continue;
    for (Placement Placements::*operand :
         {&Placements::q, &Placements::k, &Placements::v, &Placements::log_decay, &Placements::beta,
          &Placements::initial_state, &Placements::out, &Placements::final_state}) {
      for (Index offset : {1, 3, 7}) {
        CallOptions options;
        (options.placements.*operand).offset = offset;
        const auto got = run(inputs, options);
        ASSERT_TRUE(got);
        EXPECT_TRUE(*got == *aligned) << "offset " << offset << " " << c.describe();
      }
    }
  }
}

TEST_P(Layouts, G01_GroupedValueHeads) {
  Case c;
  c.recurrence = gated_delta_net();
  c.heads = 2;
  c.value_heads = 4;
  c.key_dim = 2;
  c.value_dim = 1;
  c.scale = 1.0f;
  Inputs inputs = zero_inputs(c);
  inputs.q.values = {1, 0, 0, 10};
  inputs.k.values = {1, 0, 0, 1};
  inputs.v.values = {1, 2, 3, 4};
  inputs.beta.fill(1.0f);
  if (const auto got = run(inputs)) {
    EXPECT_EQ(got->out.values, (std::vector<float>{1, 2, 30, 40}));
  }
}

TEST_P(Layouts, G01_GroupsEqualRepeatedHeads) {
  for (Index group : {2, 3, 8}) {
    Case c;
    c.recurrence = kda();
    c.tokens = 40;
    c.heads = 2;
    c.value_heads = 2 * group;
    c.key_dim = 32;
    c.value_dim = 16;
    const Inputs grouped = make_inputs(c, random);
    const auto a = run(grouped);
    if (!a) continue;
    Case repeated = c;
    repeated.heads = c.value_heads;
    Inputs inputs = make_inputs(repeated, random);
    inputs.v = grouped.v;
    inputs.beta = grouped.beta;
    inputs.log_decay = grouped.log_decay;
    for (Index t = 0; t < c.tokens; ++t) {
      for (Index head = 0; head < c.value_heads; ++head) {
        for (Index i = 0; i < c.key_dim; ++i) {
          inputs.q.set({0, t, head, i}, grouped.q.get({0, t, head / group, i}));
          inputs.k.set({0, t, head, i}, grouped.k.get({0, t, head / group, i}));
        }
      }
    }
    const auto b = run(inputs);
    ASSERT_TRUE(b);
    expect_near(a->out.values, b->out.values, 1e-6, 1e-5, "out");
    expect_matches(grouped, *a, oracle(grouped));
  }
}

TEST_P(Layouts, G03_EveryHeadHasItsOwnGate) {
  Case c;
  c.recurrence = kda();
  c.heads = c.value_heads = 3;
  c.with_initial_state = true;
  Inputs inputs = make_inputs(c, random);
  inputs.beta.fill(0.0f);
  inputs.initial_state.fill(1.0f);
  for (Index head = 0; head < 3; ++head) {
    for (Index i = 0; i < c.key_dim; ++i) inputs.log_decay.set({0, 0, head, i}, head == 0 ? 0.0f : -10.0f);
  }
  const auto got = run(inputs);
  if (!got) return;
  for (Index head = 0; head < 3; ++head) {
    const double expected = head == 0 ? 1.0 : std::exp(-10.0);
    for (Index i = 0; i < c.key_dim; ++i) {
      for (Index j = 0; j < c.value_dim; ++j) {
        EXPECT_NEAR(got->final_state.get({0, head, i, j}), expected, 1e-5 * expected);
      }
    }
  }
}

TEST_P(Layouts, G03_HeadsTogetherEqualHeadsAlone) {
  Case c;
  c.recurrence = kda();
  c.tokens = 40;
  c.heads = c.value_heads = 3;
  const Inputs together = make_inputs(c, random);
  const auto all = run(together);
  if (!all) return;
  for (Index head = 0; head < 3; ++head) {
    Case one = c;
    one.heads = one.value_heads = 1;
    Inputs alone = zero_inputs(one);
    for (Index t = 0; t < c.tokens; ++t) {
      alone.beta.set({0, t, 0}, together.beta.get({0, t, head}));
      for (Index i = 0; i < c.key_dim; ++i) {
        alone.q.set({0, t, 0, i}, together.q.get({0, t, head, i}));
        alone.k.set({0, t, 0, i}, together.k.get({0, t, head, i}));
        alone.log_decay.set({0, t, 0, i}, together.log_decay.get({0, t, head, i}));
      }
      for (Index j = 0; j < c.value_dim; ++j) alone.v.set({0, t, 0, j}, together.v.get({0, t, head, j}));
    }
    const auto got = run(alone);
    ASSERT_TRUE(got);
    for (Index t = 0; t < c.tokens; ++t) {
      for (Index j = 0; j < c.value_dim; ++j) {
        const float expected = all->out.get({0, t, head, j});
        EXPECT_NEAR(got->out.get({0, t, 0, j}), expected, 1e-6 + 1e-5 * std::fabs(expected));
      }
    }
  }
}

TEST_P(Layouts, D01_DimensionsThatAreNoPowerOfTwo) {
  for (Recurrence recurrence : {kda(), gated_delta_net(), gla(), normalized_linear()}) {
    for (Index key_dim : {48, 60, 100}) {
      for (Index value_dim : {48, 60, 100}) {
        for (unsigned char guard : {kNanByte, kHugeByte}) {
          Case c;
          c.recurrence = recurrence;
          c.dtype = pick(random, 0, 1) == 0 ? DType::f32 : DType::bf16;
          c.gate_dtype = c.dtype;
          c.tokens = 19;
          c.key_dim = key_dim;
          c.value_dim = value_dim;
          c.with_initial_state = true;
          CallOptions options;
          options.guard = guard;
          expect_matches_oracle(make_inputs(c, random), options);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_P(Layouts, D02_DimensionsMatchOrAreRefused) {
  for (Index key_dim : {16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 256}) {
    for (int sample = 0; sample < (small_run() ? 1 : 3); ++sample) {
      Case c;
      c.recurrence = pick(random, 0, 1) == 0 ? kda() : gated_delta_net();
      c.dtype = pick(random, 0, 1) == 0 ? DType::f32 : DType::f16;
      c.tokens = 21;
      c.key_dim = key_dim;
      c.value_dim = 32 * pick(random, 1, 8);
      expect_matches_oracle(make_inputs(c, random));  // counts a refusal, fails on anything else
    }
  }
}

TEST_P(Layouts, D02_OddDimensions) {
  for (Index key_dim : {1, 2, 3, 5, 7, 17, 31, 33, 65, 127, 129, 255}) {
    Case c;
    c.recurrence = kda();
    c.tokens = 18;
    c.key_dim = key_dim;
    c.value_dim = pick(random, 1, 40);
    c.with_initial_state = true;
    expect_matches_oracle(make_inputs(c, random));
  }
}

EVERY_KERNEL(Layouts);

}  // namespace
}  // namespace delta_attention::test
