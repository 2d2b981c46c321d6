#include "growth_fit.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "error_growth_report.h"

namespace delta_attention::cli {
namespace {

// A fit of exact data recovers it but for f64 roundings (2^-53), which the solution of two equations multiplies by less than 1e4.
constexpr double kExact = 1e-12;

std::vector<double> lengths() {
  std::vector<double> tokens;
  for (double t = 512; t <= 131072; t *= 2) tokens.push_back(t);
  return tokens;
}

template <class Law>
std::vector<double> values_of(Law law) {
  std::vector<double> errors;
  for (double t : lengths()) errors.push_back(law(t));
  return errors;
}

TEST(GrowthFit, RecoversAPowerLaw) {
  for (double p : {-0.25, 0.5, 1.0, 1.7}) {
    const auto fit = fit_growth(lengths(), values_of([&](double t) { return 3e-8 * std::pow(t, p); }));
    ASSERT_TRUE(fit);
    EXPECT_NEAR(fit->power.p, p, kExact);
    EXPECT_NEAR(fit->power.c, 3e-8, 3e-8 * kExact);
    EXPECT_LT(fit->power.residual, kExact);
    EXPECT_GT(fit->logarithm.residual, 1e-3);
    EXPECT_STREQ(fit->better(), "power");
  }
}

TEST(GrowthFit, RecoversALogarithm) {
  const auto fit = fit_growth(lengths(), values_of([](double t) { return 2e-7 + 5e-8 * std::log(t); }));
  ASSERT_TRUE(fit);
  EXPECT_NEAR(fit->logarithm.a, 2e-7, 2e-7 * kExact);
  EXPECT_NEAR(fit->logarithm.b, 5e-8, 5e-8 * kExact);
  EXPECT_LT(fit->logarithm.residual, kExact);
  EXPECT_GT(fit->power.residual, 1e-4);
  EXPECT_STREQ(fit->better(), "logarithm");
}

TEST(GrowthFit, ResidualsOfBothLawsMeanTheSame) {
  // Deviations of +-10 % in turn, from a constant: both laws are the constant, and what remains is 10 % for both.
  const auto fit = fit_growth({1, 2, 4, 8, 8, 4, 2, 1}, {1.1, 0.9, 1.1, 0.9, 1.1, 0.9, 1.1, 0.9});
  ASSERT_TRUE(fit);
  EXPECT_NEAR(fit->power.p, 0.0, 0.1);
  EXPECT_NEAR(fit->power.residual, 0.1, 0.02);
  EXPECT_NEAR(fit->logarithm.residual, 0.1, 0.02);
  EXPECT_STREQ(fit->better(), "either");
}

TEST(GrowthFit, TellsTheLawsApartThroughNoise) {
  std::mt19937_64 random(std::random_device{}());
  std::uniform_real_distribution<double> noise(0.95, 1.05);
  // Over a factor of 256 in T the better logarithm misses sqrt(T) by tens of percent; 5 % of noise cannot hide that.
  const auto fit = fit_growth(lengths(), values_of([&](double t) { return std::sqrt(t) * noise(random); }));
  ASSERT_TRUE(fit);
  EXPECT_NEAR(fit->power.p, 0.5, 0.03);  // largest: noise of 0.05 at both ends, over ln 256
  EXPECT_STREQ(fit->better(), "power");
}

TEST(GrowthFit, RefusesWhatHasNoLaw) {
  EXPECT_FALSE(fit_growth({512, 1024}, {1, 2}));
  EXPECT_FALSE(fit_growth({512, 1024, 2048}, {1, 0, 2}));
  EXPECT_FALSE(fit_growth({512, 1024, 2048}, {1, std::numeric_limits<double>::infinity(), 2}));
  EXPECT_FALSE(fit_growth({512, 1024, 2048}, {1, std::nan(""), 2}));
}

TEST(MedianGrowth, TakesEachErrorOnItsOwn) {
  const auto growth = [](double a, double b, double c) {
    return Growth{"kernel", "cpu", {{512, {a, b, c}, {c, a, b}, std::nullopt}}};
  };
  const Growth median = median_growth({growth(1, 20, std::nan("")), growth(3, 10, 7), growth(2, 30, 5)});
  EXPECT_EQ(median.lengths[0].out.max_abs, 2);
  EXPECT_EQ(median.lengths[0].out.max_relative, 20);
  EXPECT_EQ(median.lengths[0].out.relative, 7);  // NaN is the largest
  EXPECT_EQ(median.lengths[0].state.max_relative, 2);
}

}  // namespace
}  // namespace delta_attention::cli
