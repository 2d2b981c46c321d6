// Rows V*: sequence lengths, packed sequences, partial chunks.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class VariableLength : public KernelTest {};

/// K = V = 2, k = q = e_0, beta = 1, v_t = (t + 1, 0), scale 1, four sequences, two of them empty.
Inputs packed_with_empty_sequences(DType cu_dtype, bool with_initial_state) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 5;
  c.key_dim = c.value_dim = 2;
  c.cu_seqlens = {0, 0, 3, 3, 5};
  c.cu_dtype = cu_dtype;
  c.scale = 1.0f;
  c.with_initial_state = with_initial_state;
  Inputs inputs = zero_inputs(c);
  for (Index t = 0; t < c.tokens; ++t) {
    inputs.q.set({0, t, 0, 0}, 1.0f);
    inputs.k.set({0, t, 0, 0}, 1.0f);
    inputs.v.set({0, t, 0, 0}, static_cast<float>(t + 1));
  }
  inputs.beta.fill(1.0f);
  for (Index n = 0; with_initial_state && n < 4; ++n) {
    inputs.initial_state.set({n, 0, 0, 0}, static_cast<float>(10 + n));
    inputs.initial_state.set({n, 0, 1, 1}, static_cast<float>(20 + n));
  }
  return inputs;
}

TEST_P(VariableLength, V01_EmptySequencesPassTheirStateOn) {
  for (DType cu_dtype : {DType::i32, DType::i64}) {
    if (const auto got = run(packed_with_empty_sequences(cu_dtype, true))) {
      EXPECT_EQ(got->out.values, (std::vector<float>{1, 0, 2, 0, 3, 0, 4, 0, 5, 0}));
      EXPECT_EQ(got->final_state.values, (std::vector<float>{10, 0, 0, 20, 3, 0, 0, 21, 12, 0, 0, 22, 5, 0, 0, 23}));
    }
    if (const auto got = run(packed_with_empty_sequences(cu_dtype, false))) {
      EXPECT_EQ(got->final_state.values, (std::vector<float>{0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0}));
    }
  }
}

TEST_P(VariableLength, V01_NoTokensAtAll) {
  for (const Preset& preset : kPresets) {
    for (bool packed : {false, true}) {
      Case c;
      c.recurrence = preset.recurrence;
      c.batch = packed ? 1 : 2;
      c.tokens = 0;
      c.with_initial_state = true;
      if (packed) c.cu_seqlens = {0, 0, 0};
      const Inputs inputs = make_inputs(c, random);
      const auto got = run(inputs);
      if (!got) continue;
      EXPECT_EQ(got->final_state.values, inputs.initial_state.values) << c.describe();
      EXPECT_EQ(got->final_normalizer.values, inputs.initial_normalizer.values) << c.describe();
    }
  }
}

TEST_P(VariableLength, V01_NoSequencesAtAll) {
  Case c;
  c.recurrence = kda();
  c.batch = 0;
  c.tokens = 7;
  if (const auto got = run(make_inputs(c, random))) {
    EXPECT_TRUE(got->out.values.empty());
  }
  c.batch = 1;
  c.tokens = 0;
  c.cu_seqlens = {0};
  if (const auto got = run(make_inputs(c, random))) {
    EXPECT_TRUE(got->final_state.values.empty());
  }
}

double norm(const std::vector<double>& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

double distance(const std::vector<float>& a, std::vector<double> b) {
  for (std::size_t i = 0; i < b.size(); ++i) b[i] -= static_cast<double>(a[i]);
  return norm(b);
}

TEST_P(VariableLength, V04_PrefillThenDecodeEqualsPrefill) {
  for (DType dtype : {DType::f32, DType::bf16}) {
    for (Index tokens : {2, 6, 64, 65, 130}) {
      Case c;
      c.recurrence = pick(random, 0, 1) == 0 ? kda() : gated_delta_net();
      c.dtype = dtype;
      c.tokens = tokens;
      c.key_dim = 32;
      c.value_dim = 16;
      const Inputs inputs = make_inputs(c, random);
      const auto whole = run(inputs);
      if (!whole) continue;
      const auto prefill = run(slice_tokens(inputs, 0, tokens - 1, {}, {}));
      ASSERT_TRUE(prefill);
      const auto decode = run(slice_tokens(inputs, tokens - 1, tokens, prefill->final_state, {}));
      ASSERT_TRUE(decode);
      const std::vector<double> last(whole->out.values.end() - c.value_dim, whole->out.values.end());
      const std::vector<double> state(whole->final_state.values.begin(), whole->final_state.values.end());
      const int bits = GetParam().bits_of_products(dtype);
      if (bits < kF32Bits) {
        // Either way rounds what it multiplies, and is within its bar of the truth: of the state's size, and of the size that an output has
        // where q, of length 1, meets the state at a random angle, should q meet it at a worse one.
        const Truth truth = oracle(inputs);
        const std::vector<double> true_last(truth.out.end() - c.value_dim, truth.out.end());
        const double usual = norm(state) / static_cast<double>(c.key_dim);
        EXPECT_LE(distance(decode->out.values, last),
                  2 * bar_for(c, dtype, true_last, bits) * std::max(norm(last), usual));
        EXPECT_LE(distance(decode->final_state.values, state),
                  2 * bar_for(c, c.state_dtype, truth.final_state, bits) * norm(state));
        continue;
      }
      EXPECT_LT(relative_error(decode->out.values, last),
                dtype == DType::f32 ? 1e-5 : 4e-3);  // two bf16 roundings, 2^-9 each
      EXPECT_LT(relative_error(decode->final_state.values, state), 1e-5);
    }
  }
}

TEST_P(VariableLength, V05_LengthsAroundEveryChunk) {
  for (Index tokens : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129}) {
    for (const Preset& preset : kPresets) {
      if (tokens > 65 && small_run()) continue;
      Case c;
      c.recurrence = preset.recurrence;
      c.tokens = tokens;
      c.batch = 2;
      c.key_dim = 20;
      c.value_dim = 12;
      c.with_initial_state = true;
      expect_matches_oracle(make_inputs(c, random));
      if (HasFailure()) return;
    }
  }
}

TEST_P(VariableLength, MatchesReferenceOnPackedSequences) {
  const std::vector<std::vector<Index>> packings = {{0, 1, 2, 3},           // single tokens
                                                    {0, 0, 0, 7, 7, 8, 8},  // empty ones at both ends and between
                                                    {0, 5, 69, 70, 135, 200, 200},  // lengths 5, 64, 1, 65, 65, 0
                                                    {0, 8, 24, 25, 57, 121}};       // lengths on chunk boundaries
  for (const std::vector<Index>& cu : packings) {
    for (Recurrence recurrence : {kda(), gated_delta_net(), normalized_linear(), gla()}) {
      Case c;
      c.recurrence = recurrence;
      c.cu_seqlens = cu;
      c.cu_dtype = pick(random, 0, 1) == 0 ? DType::i32 : DType::i64;
      c.tokens = cu.back();
      c.heads = 2;
      c.value_heads = 4;
      c.key_dim = 24;
      c.value_dim = 33;
      c.with_initial_state = pick(random, 0, 1) == 0;
      expect_matches_oracle(make_inputs(c, random));
    }
  }
}

TEST_P(VariableLength, PackedSequencesEqualSeparateCalls) {
  Case c;
  c.recurrence = kda();
  c.cu_seqlens = {0, 5, 5, 38, 39, 103};
  c.tokens = 103;
  c.key_dim = 16;
  c.value_dim = 16;
  const Inputs inputs = make_inputs(c, random);
  const auto packed = run(inputs);
  if (!packed) return;
  for (std::size_t n = 0; n + 1 < c.cu_seqlens.size(); ++n) {
    Inputs alone = slice_tokens(inputs, c.cu_seqlens[n], c.cu_seqlens[n + 1], {}, {});
    alone.problem.cu_seqlens.clear();
    const auto got = run(alone);
    ASSERT_TRUE(got);
    const auto begin = packed->out.values.begin() + c.cu_seqlens[n] * c.value_dim;
    expect_near(got->out.values, {begin, begin + got->out.size()}, 1e-6, 1e-5, "out");
  }
}

TEST_P(VariableLength, V09_BadOffsetsAreRejected) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 10;
  c.cu_seqlens = {0, 4, 10};
  const Inputs good = make_inputs(c, random);
  const std::vector<std::vector<Index>> bad = {{1, 4, 10}, {0, 4, 9}, {0, 4, 11}, {0, 12, 10}, {0, -3, 10}};
  for (DType dtype : {DType::i32, DType::i64}) {
    for (const std::vector<Index>& cu : bad) {
      Inputs inputs = good;
      inputs.problem.cu_seqlens = cu;
      inputs.problem.cu_dtype = dtype;
      Call call(inputs, device());
      Execution strict = execution();
      strict.check_values = true;
      try {
        if (run(call, strict)) ADD_FAILURE() << "bad cu_seqlens were taken";
      } catch (const InvalidArgument& error) {
        EXPECT_EQ(error.argument(), "cu_seqlens");
        EXPECT_TRUE(call.outputs_untouched());
      }
    }
  }
}

TEST_P(VariableLength, V09_OffsetsAgainstTheOtherOperands) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 10;
  c.cu_seqlens = {0, 4, 10};
  c.with_initial_state = true;
  const auto expect_rejected = [&](Call& call, const char* argument) {
    try {
      if (run(call)) ADD_FAILURE() << "taken in spite of a bad " << argument;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), argument) << error.what();
      EXPECT_TRUE(call.outputs_untouched());
    }
  };
  {
    Call call(make_inputs(c, random), device());
    call.args.initial_state.shape[0] = 1;
    expect_rejected(call, "initial_state");
  }
  {
    Call call(make_inputs(c, random), device());
    call.args.cu_seqlens.dtype = DType::f32;
    expect_rejected(call, "cu_seqlens");
  }
  {
    Case batched = c;
    batched.cu_seqlens.clear();
    batched.batch = 2;
    Call call(make_inputs(batched, random), device()), offsets(make_inputs(c, random), device());
    call.args.cu_seqlens = offsets.args.cu_seqlens;
    expect_rejected(call, "cu_seqlens");
  }
}

TEST_P(VariableLength, V11_OneToken) {
  const Inputs inputs = v11_inputs();
  if (const auto got = run(inputs)) {
    expect_near(got->out.values, {7, 13}, 1e-5, 1e-6, "out");
    expect_near(got->final_state.values, {1, 2, 6.5, 12}, 1e-5, 1e-6, "final_state");
  }
}

EVERY_KERNEL(VariableLength);

}  // namespace
}  // namespace delta_attention::test
