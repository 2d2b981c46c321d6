// Rows N* of the list of cases: what broke the arithmetic of published kernels. Expected values are closed forms.

#include <algorithm>
#include <cmath>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class Numerics : public KernelTest {};

/// k = q = e_(t mod K), v = 1, beta = 1, scale 1: every output is 1, whatever the gate.
Inputs orthogonal_keys(Recurrence recurrence, Index tokens, Index dim) {
  Case c;
  c.recurrence = recurrence;
  c.tokens = tokens;
  c.key_dim = c.value_dim = dim;
  c.scale = 1.0f;
  Inputs inputs = zero_inputs(c);
  for (Index t = 0; t < tokens; ++t) {
    inputs.q.set({0, t, 0, t % dim}, 1.0f);
    inputs.k.set({0, t, 0, t % dim}, 1.0f);
  }
  inputs.v.fill(1.0f);
  inputs.beta.fill(1.0f);
  return inputs;
}

void expect_all(const Array& got, float value, double tolerance, const char* what) {
  expect_near(got.values, std::vector<float>(got.values.size(), value), tolerance, 0.0, what);
}

/// Every column of row `row` of the state.
void expect_state_row(const Outputs& got, Index row, double value, double relative) {
  for (Index j = 0; j < got.final_state.shape[3]; ++j) {
    const double cell = got.final_state.get({0, 0, row, j});
    EXPECT_TRUE(std::fabs(cell - value) <= relative * std::fabs(value) || (value < 1e-37 && cell == 0.0))
        << "S[" << row << "][" << j << "] = " << cell << ", expected " << value;
  }
}

TEST_P(Numerics, N01_StrongDecayStaysFinite) {
  for (Index tokens : {64, 65}) {
    Inputs inputs = orthogonal_keys(gated_delta_net(), tokens, 16);
    inputs.log_decay.fill(-20.0f);
    const auto got = run(inputs);
    if (!got) continue;
    expect_all(got->out, 1.0f, 1e-6, "out");
    for (float cell : got->final_state.values) EXPECT_TRUE(std::isfinite(cell));
    if (tokens != 64) continue;
    expect_state_row(*got, 15, 1.0, 1e-4);
    expect_state_row(*got, 14, 2.0611536e-9, 1e-4);
    expect_state_row(*got, 13, 4.2483543e-18, 1e-4);
    expect_state_row(*got, 12, 8.7565108e-27, 1e-4);
    for (Index row = 0; row < 10; ++row) {
      expect_state_row(*got, row, std::exp(-20.0 * static_cast<double>(15 - row)), 1e-3);
    }
  }
}

TEST_P(Numerics, N02_LargestMeasuredDecay) {
  Inputs inputs = orthogonal_keys(gated_delta_net(), 64, 16);
  inputs.log_decay.fill(-316.0f);
  if (const auto got = run(inputs)) {
    expect_all(got->out, 1.0f, 0.0, "out");
    expect_state_row(*got, 15, 1.0, 0.0);
    for (Index row = 0; row < 15; ++row) expect_state_row(*got, row, 0.0, 0.0);
  }
}

TEST_P(Numerics, N02_StrongAndSlowChannelsSideBySide) {
  Inputs inputs = orthogonal_keys(kda(), 16, 16);
  for (Index t = 0; t < 16; ++t) {
    for (Index i = 0; i < 16; ++i) inputs.log_decay.set({0, t, 0, i}, i % 2 == 0 ? -316.0f : -1e-4f);
  }
  if (const auto got = run(inputs)) {
    expect_all(got->out, 1.0f, 1e-6, "out");
    for (Index row = 0; row < 16; ++row) {
      const double odd = std::exp(-1e-4 * static_cast<double>(15 - row));
      expect_state_row(*got, row, row % 2 == 1 ? odd : 0.0, 1e-6);
    }
  }
}

TEST_P(Numerics, N03_GatesBeyondARebasedSubChunk) {
  for (float gate : {-5.9f, -5.93f, -20.0f, -100.0f}) {
    Inputs inputs = orthogonal_keys(kda(), 16, 16);
    inputs.log_decay.fill(gate);
    if (const auto got = run(inputs)) expect_all(got->out, 1.0f, 1e-6, "out");

    Inputs drawn = make_inputs(inputs.problem, random);
    drawn.log_decay.fill(gate);
    expect_matches_oracle(drawn);
  }
}

TEST_P(Numerics, N04_PositiveGateIsRejectedWhenValuesAreChecked) {
  Case c;
  c.recurrence = kda();
  c.tokens = 4;
  Inputs inputs = make_inputs(c, random);
  inputs.log_decay.set({0, 2, 0, 5}, 0.5f);

  Call checked(inputs, device());
  Execution strict = execution();
  strict.check_values = true;
  try {
    if (run(checked, strict)) ADD_FAILURE() << "a positive log decay was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "log_decay[0,2,0,5]");
    EXPECT_NE(std::string(error.what()).find("0.5"), std::string::npos) << error.what();
    EXPECT_TRUE(checked.outputs_untouched());
  }
  expect_matches_oracle(inputs);  // unchecked: the recurrence, whatever it means
}

// The decays of RetNet, 1 - 2^-5 ... 1 - 2^-12, the same at every token: whatever a kernel's decay is off, thousands of tokens repeat it.
// An f32 decay is off by half an ulp at most; for each head here we know by how much.
TEST_P(Numerics, SlowConstantDecaysAreRoundedAtMostOncePerToken) {
  Case c;
  c.recurrence = retention();
  c.tokens = small_run() ? 256 : 2048;
  c.heads = c.value_heads = 8;
  Inputs inputs = make_inputs(c, random);
  std::vector<float> log_decays;
  for (Index head = 0; head < c.heads; ++head) {
    log_decays.push_back(static_cast<float>(std::log1p(-std::exp2(-5.0 - static_cast<double>(head)))));
    for (Index t = 0; t < c.tokens; ++t) inputs.log_decay.set({0, t, head}, log_decays.back());
  }
  const auto got = run(inputs);
  if (!got) return;
  const std::vector<double> truth = oracle(inputs).final_state;
  const Index size = c.key_dim * c.value_dim;
  for (Index head = 0; head < c.heads; ++head) {
    const double g = log_decays[static_cast<std::size_t>(head)], a = std::exp(g);
    const double decay_error = std::fabs(static_cast<float>(a) / a - 1);
    const double memory = std::min(static_cast<double>(c.tokens), 1 / (1 - a));  // tokens that the state remembers
    // Kernels that combine several tokens round once a combination: an eighth of half an ulp (2^-25) a token, or less.
    const double bar = 2e-6 * std::sqrt(static_cast<double>(c.key_dim)) + memory * std::max(decay_error, 0x1p-28);
    const auto begin = static_cast<std::size_t>(head * size), end = static_cast<std::size_t>((head + 1) * size);
    const std::vector<float> state(got->final_state.values.begin() + static_cast<std::ptrdiff_t>(begin),
                                   got->final_state.values.begin() + static_cast<std::ptrdiff_t>(end));
    const std::vector<double> expected(truth.begin() + static_cast<std::ptrdiff_t>(begin),
                                       truth.begin() + static_cast<std::ptrdiff_t>(end));
    EXPECT_LE(relative_error(state, expected), bar) << "head " << head;
  }
}

TEST_P(Numerics, N05_ParallelKeysUndecayed) {
  for (Recurrence recurrence : {delta_net(), gated_delta_net()}) {
    for (Index tokens : {64, 8192}) {
      if (small_run() && tokens > 64) continue;
      for (DType dtype : {DType::f32, DType::bf16}) {
        Case c;
        c.recurrence = recurrence;
        c.dtype = dtype;
        c.tokens = tokens;
        c.key_dim = c.value_dim = 4;
        c.scale = 1.0f;
        Inputs inputs = zero_inputs(c);
        inputs.q.fill(0.5f);
        inputs.k.fill(0.5f);
        inputs.beta.fill(1.0f);
        const float columns[] = {1, -1, 2, -2};
        for (Index t = 0; t < tokens; ++t) {
          for (Index j = 0; j < 4; ++j) inputs.v.set({0, t, 0, j}, static_cast<float>(t + 1) * columns[j]);
        }
        const auto got = run(inputs);
        if (!got) continue;
        expect_near(got->out.values, inputs.v.values, 0.0, dtype == DType::f32 ? 1e-4 : 2e-2, "out");
        std::vector<float> rows;  // S = k v_T^T: half of the last value in every row
        for (int row = 0; row < 4; ++row) {
          for (Index j = 0; j < 4; ++j) rows.push_back(0.5f * inputs.v.get({0, tokens - 1, 0, j}));
        }
        expect_near(got->final_state.values, rows, 0.0, 1e-4, "final_state");
      }
    }
  }
}

TEST_P(Numerics, N05_ParallelKeysSlowDecay) {
  for (Index tokens : {64, 8192}) {
    if (small_run() && tokens > 64) continue;
    Case c;
    c.recurrence = gated_delta_net();
    c.tokens = tokens;
    c.key_dim = c.value_dim = 4;
    c.scale = 1.0f;
    Inputs inputs = zero_inputs(c);
    inputs.q.fill(0.5f);
    inputs.k.fill(0.5f);
    inputs.v.fill(1.0f);
    inputs.beta.fill(0.835f);
    inputs.log_decay.fill(-1e-3f);
    const auto got = run(inputs);
    if (!got) continue;
    const double expected[][2] = {{0, 0.835}, {1, 0.9726373}, {63, 0.9998025}};
    for (const auto& [t, value] : expected) EXPECT_NEAR(got->out.get({0, static_cast<Index>(t), 0, 3}), value, 1e-5);
    EXPECT_NEAR(got->out.get({0, tokens - 1, 0, 0}), 0.9998025, 1e-5);
  }
}

TEST_P(Numerics, N06_OutputsDoNotDependOnTheFuture) {
  for (Recurrence recurrence : {kda(), gated_delta_net(), gla(), normalized_linear()}) {
    Case c;
    c.recurrence = recurrence;
    c.tokens = 64;
    c.key_dim = 32;
    c.value_dim = 24;
    const Inputs inputs = make_inputs(c, random);
    const auto whole = run(inputs);
    if (!whole) continue;
    for (Index from : {1, 7, 8, 15, 17, 33, 63}) {
      Inputs other = make_inputs(c, random);
      for (Array Inputs::*operand : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::log_decay, &Inputs::beta}) {
        const Array& before = inputs.*operand;
        if (!before.present()) continue;
        const Index kept = from * before.size() / c.tokens;
        std::copy_n(before.values.begin(), kept, (other.*operand).values.begin());
      }
      const auto got = run(other);
      ASSERT_TRUE(got);
      const auto kept = static_cast<std::size_t>(from * c.value_dim);
      EXPECT_TRUE(std::equal(got->out.values.begin(), got->out.values.begin() + static_cast<std::ptrdiff_t>(kept),
                             whole->out.values.begin()))
          << "outputs before token " << from << " changed with what comes after; " << c.describe();
    }
  }
}

TEST_P(Numerics, N07_SigmoidOfBetaStaysInF32) {
  Case c;
  c.recurrence = gated_delta_net();
  c.beta_dtype = DType::bf16;
  c.key_dim = c.value_dim = 1;
  c.beta_space = BetaSpace::sigmoid;
  Inputs inputs = zero_inputs(c);
  inputs.q.fill(1.0f);
  inputs.k.fill(1.0f);
  inputs.v.fill(1.0f);
  inputs.beta.fill(0.5f);
  if (const auto got = run(inputs)) {
    EXPECT_NEAR(got->final_state.values[0], 0.6224593, 1e-6);
  }
}

TEST_P(Numerics, N09_EpsilonIsAddedToTheSumOfSquares) {
  Case c;
  c.recurrence = linear();
  c.key_dim = 128;
  c.value_dim = 1;
  c.scale = 1.0f;
  c.qk_l2norm = true;
  Inputs inputs = zero_inputs(c);
  inputs.k.fill(1e-4f);
  inputs.q.fill(1e-4f);
  inputs.v.fill(1.0f);
  inputs.beta.fill(1.0f);
  if (const auto got = run(inputs)) {
    expect_all(got->final_state, 0.06622662f, 1e-6, "normalised key");  // S = k v^T = k
    EXPECT_NEAR(got->out.values[0], 128 * 0.06622662 * 0.06622662, 1e-5);
  }
}

TEST_P(Numerics, N09_ZeroKeysStayZero) {
  Case c;
  c.recurrence = gated_delta_net();
  c.key_dim = c.value_dim = 16;
  c.tokens = 9;
  c.qk_l2norm = true;
  c.with_initial_state = true;
  Inputs inputs = make_inputs(c, random);
  inputs.q.fill(0.0f);
  inputs.k.fill(0.0f);
  inputs.log_decay.fill(-0.125f);
  if (const auto got = run(inputs)) {
    expect_all(got->out, 0.0f, 0.0, "out");
    std::vector<float> decayed;
    for (float x : inputs.initial_state.values) decayed.push_back(x * std::exp(-0.125f * 9));
    expect_near(got->final_state.values, decayed, 0.0, 1e-5, "final_state");
  }
}

TEST_P(Numerics, N10_StateBeyondTheRangeOfF16) {
  Case c;
  c.recurrence = linear();
  c.dtype = DType::f16;
  c.tokens = 1024;
  c.scale = 0.25f;
  Inputs inputs = zero_inputs(c);
  for (Index t = 0; t < c.tokens; ++t) {
    inputs.q.set({0, t, 0, 0}, 1.0f);
    inputs.k.set({0, t, 0, 0}, 1.0f);
  }
  inputs.v.fill(100.0f);
  inputs.beta.fill(1.0f);
  if (const auto got = run(inputs)) {
    for (Index t = 0; t < c.tokens; ++t) {
      EXPECT_EQ(got->out.get({0, t, 0, 7}), rounded(25.0f * static_cast<float>(t + 1), DType::f16)) << "token " << t;
    }
    EXPECT_EQ(got->out.get({0, 1023, 0, 0}), 25600.0f);
    for (Index j = 0; j < 16; ++j) EXPECT_EQ(got->final_state.get({0, 0, 0, j}), 102400.0f);
  }
}

TEST_P(Numerics, N11_DecayAtTheEndOfAPartialBlock) {
  const std::pair<Index, double> expected[] = {{64, 0.5309055}, {111, 0.3310331}, {192, 0.1466636}};
  for (const auto& [tokens, last] : expected) {
    for (DType dtype : {DType::f32, DType::f16}) {
      Case c;
      c.recurrence = gated_delta_net();
      c.dtype = dtype;
      c.tokens = tokens;
      c.key_dim = c.value_dim = 2;
      c.scale = 1.0f;
      Inputs inputs = zero_inputs(c);
      for (Index t = 0; t < tokens; ++t) {
        inputs.q.set({0, t, 0, 0}, 1.0f);
        inputs.log_decay.set({0, t, 0}, t == 0 ? 0.0f : static_cast<float>(std::log(0.99)));
      }
      inputs.k.set({0, 0, 0, 0}, 1.0f);
      inputs.v.fill(1.0f);
      inputs.beta.set({0, 0, 0}, 1.0f);
      const auto got = run(inputs);
      if (!got) continue;
      for (Index t = 0; t < tokens; ++t) {
        const double value = std::pow(0.99, static_cast<double>(t));
        // f16 output rounds by 2^-11.
        EXPECT_NEAR(got->out.get({0, t, 0, 1}), value, value * (1e-4 + (dtype == DType::f16 ? 0x1p-11 : 0)));
      }
      EXPECT_NEAR(got->final_state.get({0, 0, 0, 0}), last, 1e-4 * last);
    }
  }
}

TEST_P(Numerics, N12_LowPrecisionGatesAreAccumulatedInF32) {
  Case c;
  c.recurrence = gated_delta_net();
  c.gate_dtype = DType::bf16;
  c.tokens = 64;
  c.with_initial_state = true;
  Inputs inputs = make_inputs(c, random);
  inputs.log_decay.fill(-0.69921875f);
  inputs.beta.fill(0.0f);
  inputs.initial_state.fill(1.0f);
  if (const auto got = run(inputs)) {
    for (float cell : got->final_state.values) EXPECT_NEAR(cell, 3.6755466e-20, 3.6755466e-23);
  }
}

/// Relative errors of outputs and final states.
struct Errors {
  double out, state;
};

/// Of the sequences of a batch, the median.
double median_error(const std::vector<float>& got, const std::vector<double>& truth, Index batch) {
  std::vector<double> errors;
  const auto size = static_cast<std::ptrdiff_t>(truth.size()) / batch;
  for (std::ptrdiff_t n = 0; n < batch; ++n) {
    errors.push_back(relative_error(std::vector<float>(got.begin() + n * size, got.begin() + (n + 1) * size),
                                    std::vector<double>(truth.begin() + n * size, truth.begin() + (n + 1) * size)));
  }
  std::sort(errors.begin(), errors.end());
  return errors[errors.size() / 2];
}
Errors median_errors(const Outputs& got, const Truth& truth, Index batch) {
  return {median_error(got.out.values, truth.out, batch), median_error(got.final_state.values, truth.final_state, batch)};
}

/// What the recurrence itself makes of q, k, v and beta that are off by a little, each number by the same relative size at most.
Errors median_errors_of_rounded_inputs(const Inputs& inputs, const Truth& truth, Random& random) {
  std::uniform_real_distribution<float> off(-0x1p-12f, 0x1p-12f);
  Inputs other = inputs;
  for (Array Inputs::*operand : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::beta}) {
    for (float& x : (other.*operand).values) x *= 1 + off(random);
  }
  const Truth got = oracle(other);
  const Index batch = inputs.problem.batch;
  return {median_error(std::vector<float>(got.out.begin(), got.out.end()), truth.out, batch),
          median_error(std::vector<float>(got.final_state.begin(), got.final_state.end()), truth.final_state, batch)};
}

// Keys that are nearly one, with beta to 2: updates turn the state over and over along it, and what a chunk sums up cancels. What that adds
// to errors, with random keys as the measure:
//
// Products of 8 bits. Scores and the solution are more exact and cancel before anything is rounded to 8 bits, so outputs lose little: twice
// is too much. Of a state that nothing decays, what is along the common key is new every few tokens, but what each chunk's roundings leave
// beside it stays: squares add over 8 chunks, sqrt(8) = 2.8.
//
// Products of 24 bits. Scores are rounded like all else, and those of parallel keys are sqrt(K) = 8 times as large as random ones, so their
// roundings are; they are one kind among others: half of that. And as much more as the recurrence itself, in float64, makes of inputs that
// are off, should it make more of them than with random keys: then it does so with what a kernel rounds on the way, too.
//
// The median of sixteen sequences: of one, the last state may happen to be small.
TEST_P(Numerics, NearParallelKeysStayNearTheErrorOfRandomOnes) {
  for (Recurrence recurrence : {delta_net(), gated_delta_net(), kda()}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      Case c;
      c.recurrence = recurrence;
      c.dtype = dtype;
      c.tokens = 256;
      c.batch = 16;
      c.key_dim = 64;
      c.value_dim = 32;
      c.beta_to_two = true;
      c.gate_regime = GateRegime::slow;
      const Inputs usual = make_inputs(c, random);
      c.keys = Keys::near_parallel;
      const Inputs parallel = make_inputs(c, random);
      const auto got_usual = run(usual), got_parallel = run(parallel);
      if (!got_usual || !got_parallel) continue;
      const Truth of_usual = oracle(usual), of_parallel = oracle(parallel);
      Errors times = {2, 3};
      if (GetParam().bits_of_products(dtype) == kF32Bits) {
        const Errors a = median_errors_of_rounded_inputs(usual, of_usual, random);
        const Errors b = median_errors_of_rounded_inputs(parallel, of_parallel, random);
        times = {4 * std::max(1.0, b.out / a.out), 4 * std::max(1.0, b.state / a.state)};
      }
      const Errors measure = median_errors(*got_usual, of_usual, c.batch), errors = median_errors(*got_parallel, of_parallel, c.batch);
      EXPECT_LE(errors.out, times.out * measure.out) << c.describe();
      EXPECT_LE(errors.state, times.state * measure.state) << c.describe();
    }
  }
}

TEST_P(Numerics, N14_LongPrefillWithF32State) {
  Case c;
  c.recurrence = gated_delta_net();
  c.dtype = DType::bf16;
  c.tokens = small_run() ? 512 : 4096;
  c.key_dim = c.value_dim = 32;
  const Inputs inputs = make_inputs(c, random);
  if (const auto got = run(inputs)) {
    const Truth truth = oracle(inputs);
    // The state stays f32. Products of 8 bits round b k, S as it is read, V - (b k) S and T^T d k, a chunk at a time; each costs 1.7e-3,
    // and they are independent: a factor of 2. With a state that is kept in bf16, errors reach 5e-3.
    const double bar = GetParam().bits_of_products(c.dtype) == 8 ? 3.4e-3 : 1e-3;
    EXPECT_LT(relative_error(got->final_state.values, truth.final_state), bar);
    expect_matches(inputs, *got, truth);
  }
}

TEST_P(Numerics, N14_DecodeWithBf16StateStorage) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 256;
  c.key_dim = c.value_dim = 32;
  c.state_dtype = DType::bf16;
  c.with_initial_state = true;
  c.gate_regime = GateRegime::mixed;
  const Inputs inputs = make_inputs(c, random);
  const Truth truth = oracle(inputs);
  Array state = inputs.initial_state;
  std::vector<float> out;
  for (Index t = 0; t < c.tokens; ++t) {
    const auto got = run(slice_tokens(inputs, t, t + 1, state, {}));
    if (!got) return;
    out.insert(out.end(), got->out.values.begin(), got->out.values.end());
    state = got->final_state;
  }
  for (float x : out) ASSERT_TRUE(std::isfinite(x));
  // One rounding of the state to 8 bits a token, 2^-9 at most, at random (rms 2^-9 / sqrt(3) = 1.1e-3); a contraction forgets
  // the old ones.
  EXPECT_LT(relative_error(out, truth.out), 5e-3);
}

TEST_P(Numerics, N15_EveryHeadDimension) {
  for (Index dim : {16, 32, 48, 64, 80, 96, 128, 256}) {
    for (DType dtype : {DType::f32, DType::bf16}) {
      Case c;
      c.recurrence = gated_delta_net();
      c.dtype = dtype;
      c.tokens = 130;
      c.key_dim = c.value_dim = dim;
      if (dim > 128 && small_run()) continue;
      expect_matches_oracle(make_inputs(c, random));
    }
  }
}

TEST_P(Numerics, N17_NegativeEigenvalues) {
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 65;
  c.key_dim = c.value_dim = 2;
  c.scale = 1.0f;
  c.with_initial_state = true;
  Inputs inputs = zero_inputs(c);
  for (Index t = 0; t < c.tokens; ++t) {
    inputs.q.set({0, t, 0, 0}, 1.0f);
    inputs.k.set({0, t, 0, 0}, 1.0f);
  }
  inputs.beta.fill(2.0f);
  inputs.initial_state.values = {1, 2, 3, 4};
  if (const auto got = run(inputs)) {
    for (Index t = 0; t < c.tokens; ++t) {
      const float sign = t % 2 == 0 ? -1.0f : 1.0f;
      EXPECT_EQ(got->out.get({0, t, 0, 0}), sign * 1.0f) << "token " << t;
      EXPECT_EQ(got->out.get({0, t, 0, 1}), sign * 2.0f) << "token " << t;
    }
    EXPECT_EQ(got->final_state.values, (std::vector<float>{-1, -2, 3, 4}));
  }
  const Inputs five = [&] {
    Inputs x = slice_tokens(inputs, 0, 5, Array(DType::f32, {1, 1, 2, 2}), {});
    for (Index t = 0; t < 5; ++t) x.v.set({0, t, 0, 0}, 1.0f);
    return x;
  }();
  if (const auto got = run(five)) {
    for (Index t = 0; t < 5; ++t) EXPECT_EQ(got->out.get({0, t, 0, 0}), t % 2 == 0 ? 2.0f : 0.0f);
  }
}

TEST_P(Numerics, N18_NoGateEqualsZeroGate) {
  for (Recurrence recurrence : {gated_delta_net(), kda(), gla(), retention()}) {
    for (Index tokens : {1, 63, 64, 65}) {
      Case c;
      c.recurrence = recurrence;
      c.tokens = tokens;
      c.key_dim = 32;
      c.value_dim = 17;
      Inputs with = make_inputs(c, random);
      with.log_decay.fill(0.0f);
      Inputs without = with;
      without.problem.with_gate = false;
      without.log_decay = {};
      const auto a = run(with), b = run(without);
      if (!a || !b) continue;
      // "Equal or 1e-6": a gate of 1 may take another path, but not another rounding worth the name.
      expect_near(a->out.values, b->out.values, 1e-6, 1e-6, "out");
      expect_near(a->final_state.values, b->final_state.values, 1e-6, 1e-6, "final_state");
    }
  }
}

TEST_P(Numerics, N19_SplitCallsEqualOneCall) {
  for (const Preset& preset : kPresets) {
    SCOPED_TRACE(preset.name);
    Case c;
    c.recurrence = preset.recurrence;
    c.tokens = 130;
    c.heads = 2;
    c.value_heads = 2;
    c.key_dim = 24;
    c.value_dim = 20;
    const Inputs inputs = make_inputs(c, random);
    const auto whole = run(inputs);
    if (!whole) continue;
    Array state, normalizer;
    std::vector<float> out;
    Index begin = 0;
    for (Index length : {1, 63, 64, 2}) {
      const auto part = run(slice_tokens(inputs, begin, begin + length, state, normalizer));
      ASSERT_TRUE(part);
      out.insert(out.end(), part->out.values.begin(), part->out.values.end());
      state = part->final_state;
      normalizer = part->final_normalizer;
      begin += length;
    }
    const std::vector<double> expected(whole->out.values.begin(), whole->out.values.end());
    const std::vector<double> expected_state(whole->final_state.values.begin(), whole->final_state.values.end());
    EXPECT_LT(relative_error(out, expected), 1e-5);
    EXPECT_LT(relative_error(state.values, expected_state), 1e-5);
  }
}

EVERY_KERNEL(Numerics);

// N16: the generator itself stays in the ranges of real models, or every comparison above would prove nothing.
TEST(Inputs, N16_GeneratorStaysInRealRanges) {
  Random random = random_for("N16");
  Case c;
  c.recurrence = gated_delta_net();
  c.tokens = 4096;
  const Inputs inputs = make_inputs(c, random);
  for (float g : inputs.log_decay.values) ASSERT_TRUE(g <= 0 && g >= -316.01f) << g;
  for (float b : inputs.beta.values) ASSERT_TRUE(b > 0 && b < 1) << b;
  for (float v : inputs.v.values) ASSERT_TRUE(v >= -0.3f && v <= 25.0f) << v;
  for (Index t = 0; t < c.tokens; ++t) {
    double sum = 0;
    for (Index i = 0; i < c.key_dim; ++i) sum += std::pow(inputs.k.get({0, t, 0, i}), 2);
    ASSERT_NEAR(std::sqrt(sum), 1.0, 1e-3);
  }
  const Truth truth = oracle(inputs);
  for (double x : truth.out) ASSERT_TRUE(std::isfinite(x));
  for (double x : truth.final_state) ASSERT_TRUE(std::isfinite(x));
}

}  // namespace
}  // namespace delta_attention::test
