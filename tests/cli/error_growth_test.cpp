// The inputs and the measurement of error-growth, with what is known about them beforehand.

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "error_growth_measure.h"
#include "error_growth_regimes.h"
#include "errors.h"
#include "operands.h"
#include "tensor_values.h"

namespace delta_attention::cli {
namespace {

const SafetensorsFile& data() {
  static const SafetensorsFile file(shipped_data());
  return file;
}

std::uint64_t fresh_seed() {
  const std::uint64_t seed = std::random_device{}();
  ::testing::Test::RecordProperty("seed", std::to_string(seed));
  return seed;
}

const Growth& find(const std::vector<Growth>& all, const std::string& kernel) {
  for (const Growth& growth : all) {
    if (growth.kernel == kernel) return growth;
  }
  throw BadInput("no " + kernel);
}

TEST(ErrorGrowth, EveryRegimeStaysFiniteInEveryDType) {
  const std::uint64_t seed = fresh_seed();
  for (const Regime& regime : regimes()) {
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      SCOPED_TRACE(std::string(regime.name) + " " + name(dtype) + " seed " + std::to_string(seed));
      const RegimeInputs inputs = make_regime(regime.name, {1024, 2, 16}, dtype, seed, 0, data());
      const std::vector<Growth> all = measure_growth(inputs.args, {512, 1024}, std::nullopt);
      ASSERT_EQ(all.size(), 6u);
      const LengthErrors& least = find(all, "reference").lengths.back();
      for (const Growth& growth : all) {
        ASSERT_EQ(growth.lengths.size(), 2u);
        const LengthErrors& errors = growth.lengths.back();
        EXPECT_GT(errors.out.relative, 0) << growth.kernel;
        EXPECT_LT(errors.out.relative, 1e-2) << growth.kernel;  // the bar of 16-bit storage
        EXPECT_LT(errors.state.relative, 1e-3) << growth.kernel;
        EXPECT_EQ(errors.normalizer.has_value(), std::string(regime.name) == "additive");
        // Nothing is nearer than the nearest number. (Outputs are rounded to f32, then to 16 bits, which in the case of a tie
        // is off the nearest by one part in 2^13 of its error.)
        EXPECT_GE(errors.state.relative, least.state.relative) << growth.kernel;
        EXPECT_GE(errors.out.relative, least.out.relative * (1 - 0x1p-13)) << growth.kernel;
      }
    }
  }
}

TEST(ErrorGrowth, OneTruthServesEveryLength) {
  const RegimeInputs inputs = make_regime("kda", {1024, 1, 16}, DType::f32, fresh_seed(), 0, data());
  const std::vector<Growth> together = measure_growth(inputs.args, {512, 1024}, std::nullopt);
  ForwardArgs first_half = inputs.args;
  for (ConstTensor* x : {&first_half.q, &first_half.k, &first_half.v, &first_half.beta, &first_half.log_decay}) {
    x->shape[1] = 512;
  }
  const std::vector<Growth> alone = measure_growth(first_half, {512}, std::nullopt);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    const LengthErrors &a = together[i].lengths[0], &b = alone[i].lengths[0];
    EXPECT_EQ(a.out.max_abs, b.out.max_abs) << alone[i].kernel;
    EXPECT_EQ(a.out.relative, b.out.relative) << alone[i].kernel;
    EXPECT_EQ(a.state.max_abs, b.state.max_abs) << alone[i].kernel;
  }
}

TEST(ErrorGrowth, ReferenceIsTheRoundingOfTheResultAlone) {
  const RegimeInputs inputs = make_regime("delta", {512, 1, 16}, DType::bf16, fresh_seed(), 0, data());
  const Growth reference = find(measure_growth(inputs.args, {512}, std::nullopt), "reference");
  EXPECT_LE(reference.lengths[0].out.relative, 0x1p-8);     // half an ulp of bf16 is 2^-9 to 2^-8 of the number
  EXPECT_GT(reference.lengths[0].out.relative, 0x1p-11);    // and most numbers are off by more than an eighth of that
  EXPECT_LE(reference.lengths[0].state.relative, 0x1p-24);  // states are f32
}

TEST(Regimes, AreWhatTheySay) {
  const std::uint64_t seed = fresh_seed();
  const auto step = [](const ForwardArgs& args, std::int64_t t) {  // beta |k|^2
    const std::int64_t dim = args.k.shape[3];
    double sum = 0;
    for (std::int64_t i = 0; i < dim; ++i) sum += std::pow(value_at(args.k.data, args.k.dtype, t * dim + i), 2);
    return sum * value_at(args.beta.data, args.beta.dtype, t);
  };
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const RegimeInputs near = make_regime("delta_near_2", {256, 1, 32}, dtype, seed, 0, data());
    const RegimeInputs above = make_regime("delta_above_2", {256, 1, 32}, dtype, seed, 0, data());
    const RegimeInputs unit = make_regime("delta", {256, 1, 32}, dtype, seed, 0, data());
    for (std::int64_t t = 0; t < 256; ++t) {
      // Whatever the storage of k: beta is made from the rounded key, and is itself rounded by 2^-24.
      EXPECT_TRUE(step(near.args, t) > 1.98999 && step(near.args, t) < 2.00001) << step(near.args, t);
      EXPECT_TRUE(step(above.args, t) > 1.99999 && step(above.args, t) < 2.00513) << step(above.args, t);
      EXPECT_TRUE(step(unit.args, t) > 0 && step(unit.args, t) < 1) << step(unit.args, t);
    }
  }
}

TEST(Regimes, AreDrawnFromTheSeed) {
  const auto values = [](std::uint64_t seed, int repeat, DType dtype) {
    return delta_attention::cli::values_of(make_regime("kda", {64, 1, 8}, dtype, seed, repeat, data()).args.v);
  };
  EXPECT_EQ(values(1, 0, DType::f32), values(1, 0, DType::f32));
  EXPECT_NE(values(1, 0, DType::f32), values(1, 1, DType::f32));
  EXPECT_NE(values(1, 0, DType::f32), values(2, 0, DType::f32));
  const std::vector<double> wide = values(1, 0, DType::f32), narrow = values(1, 0, DType::bf16);
  for (std::size_t i = 0; i < wide.size(); ++i) EXPECT_NEAR(narrow[i], wide[i], std::fabs(wide[i]) * 0x1p-8);
}

TEST(Regimes, ActivationsRepeatTheFile) {
  const ForwardArgs args = make_regime("activations", {2048, 2, 64}, DType::f32, 0, 1, data()).args;
  const ConstTensor k = data().find("k");
  EXPECT_EQ(args.k.shape, (Extents{1, 2048, 2, 32}));  // the heads of the file
  for (std::int64_t t : {0, 7, 1023, 1024, 2047}) {
    const double expected = value_at(k.data, k.dtype, ((t % 1024) * 12 + 3) * 32 + 5);  // repeat 1, head 1 of 2
    EXPECT_EQ(value_at(args.k.data, args.k.dtype, (t * 2 + 1) * 32 + 5), expected);
  }
}

TEST(Regimes, AreKnownByName) { EXPECT_THROW(make_regime("calm", {512, 1, 8}, DType::f32, 0, 0, data()), BadInput); }

}  // namespace
}  // namespace delta_attention::cli
