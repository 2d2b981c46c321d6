// Gates, summations and the state update: the policies that kernels are made of, against float64.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "state/gate.h"
#include "state/state_update.h"
#include "support/cases.h"

namespace delta_attention {
namespace {

using test::Random;
using test::random_for;
using test::uniform;

/// |got - expected| in units of the last place of the result.
double ulps(float got, double expected) {
  const float nearest = std::fabs(static_cast<float>(expected));
  const double ulp = static_cast<double>(std::nextafter(nearest, INFINITY)) - static_cast<double>(nearest);
  return std::fabs(got - expected) / ulp;
}

TEST(GateFunctions, MatchFloat64) {
  Random random = random_for("GateFunctions");
  for (int i = 0; i < 20000; ++i) {
    const auto x = static_cast<float>(uniform(random, -40, 40));
    const double sigmoid_truth = 1 / (1 + std::exp(-static_cast<double>(x)));
    const double softplus_truth = std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(static_cast<double>(x))));
    // exp, add and divide (or log1p and add), each within an ulp or two.
    EXPECT_LT(ulps(sigmoid(x), sigmoid_truth), 4) << x;
    EXPECT_LT(ulps(softplus(x), softplus_truth), 4) << x;
    EXPECT_EQ(activate_beta(x, BetaSpace::value), x);
    EXPECT_EQ(activate_beta(x, BetaSpace::sigmoid), sigmoid(x));
    EXPECT_EQ(activate_beta(x, BetaSpace::twice_sigmoid), 2 * sigmoid(x));
  }
}

TEST(GateFunctions, ExtremesStayFinite) {
  EXPECT_EQ(sigmoid(-1e30f), 0.0f);
  EXPECT_EQ(sigmoid(1e30f), 1.0f);
  EXPECT_EQ(softplus(1e30f), 1e30f);
  EXPECT_EQ(softplus(-1e30f), 0.0f);
  EXPECT_GT(softplus(-80.0f), 0.0f);
  EXPECT_EQ(decay_factor(-INFINITY, GateSpace::log, 1, 0, 0), 0.0f);
  EXPECT_EQ(decay_factor(0.0f, GateSpace::linear, 1, 0, 0), 0.0f);
  EXPECT_EQ(decay_factor(0.0f, GateSpace::log, 1, 0, 0), 1.0f);
  EXPECT_EQ(l2norm_factor(0.0f), 1.0f / std::sqrt(1e-6f));
}

TEST(GateFunctions, DecayFactorsMatchFloat64) {
  Random random = random_for("DecayFactors");
  for (int i = 0; i < 20000; ++i) {
    const auto x = static_cast<float>(uniform(random, -80, 0)), raw = static_cast<float>(uniform(random, -6, 6));
    const auto rate = static_cast<float>(std::exp(uniform(random, -2, 2))),
               bias = static_cast<float>(uniform(random, -2, 2));
    EXPECT_LT(ulps(decay_factor(x, GateSpace::log, 1, 0, 0), std::exp(static_cast<double>(x))), 2);
    EXPECT_LT(ulps(decay_factor(x, GateSpace::log2, 1, 0, 0), std::exp2(static_cast<double>(x))), 2);
    // The argument of exp carries a few roundings, and exp turns an absolute error e of its argument into a relative error e:
    // 6 roundings of an argument of size g, plus exp's own.
    const double s = static_cast<double>(raw) + bias;
    const double g = -rate * (std::fmax(s, 0.0) + std::log1p(std::exp(-std::fabs(s))));
    EXPECT_NEAR(decay_factor(raw, GateSpace::softplus, rate, bias, 0), std::exp(g),
                (6 * std::fabs(g) + 4) * 0x1p-24 * std::exp(g));
    const double bounded = -5.0 / (1 + std::exp(-rate * s));
    const double slope = std::fabs(rate * s) + 6;  // error of the sigmoid's own argument
    EXPECT_NEAR(decay_factor(raw, GateSpace::lower_bound, rate, bias, -5.0f), std::exp(bounded),
                (slope * std::fabs(bounded) + 4) * 0x1p-24 * std::exp(bounded));
  }
}

TEST(GateFunctions, SlowDecaysAreRoundedOnce) {
  Random random = random_for("SlowDecays");
  for (int i = 0; i < 20000; ++i) {
    const auto g = static_cast<float>(-std::exp(uniform(random, std::log(1e-6), std::log(0.1))));
    // Half an ulp, and what expm1 itself is off: an ulp of a number at most a tenth of the result.
    EXPECT_LT(ulps(exp_decay(g), std::exp(static_cast<double>(g))), 0.7) << g;
    EXPECT_EQ(decay_factor(g, GateSpace::log, 1, 0, 0), exp_decay(g));
  }
}

TEST(Summation, TwoSumIsExact) {
  Random random = random_for("TwoSum");
  for (int i = 0; i < 20000; ++i) {
    CompensatedSum s;
    const auto a = static_cast<float>(uniform(random, -1, 1) * std::exp(uniform(random, -15, 15)));
    const auto b = static_cast<float>(uniform(random, -1, 1) * std::exp(uniform(random, -15, 15)));
    s.set(a);
    s.add(b);
    // |exponent difference| < 53 - 24: the float64 sum is exact.
    EXPECT_EQ(static_cast<double>(s.sum) + s.compensation, static_cast<double>(a) + b);
  }
}

TEST(Summation, ScaleCarriesTheProductsRoundingError) {
  Random random = random_for("Scale");
  for (int i = 0; i < 20000; ++i) {
    CompensatedSum s;
    const auto a = static_cast<float>(uniform(random, -100, 100)),
               factor = static_cast<float>(uniform(random, 0.01, 1));
    s.set(a);
    s.scale(factor);
    EXPECT_EQ(static_cast<double>(s.sum) + s.compensation, static_cast<double>(a) * factor);
  }
}

TEST(Summation, AddProductCarriesTheProductsRoundingError) {
  Random random = random_for("AddProduct");
  for (int i = 0; i < 20000; ++i) {
    CompensatedSum s;
    const auto x = static_cast<float>(uniform(random, -10, 10)), y = static_cast<float>(uniform(random, -10, 10));
    s.set(static_cast<float>(uniform(random, -10, 10)));
    const double expected = static_cast<double>(s.sum) + static_cast<double>(x) * y;
    s.add_product(x, y);
    // The sum of two errors is rounded once: 2^-24 of an error of 2^-24 of the operands, 100 at most.
    EXPECT_NEAR(static_cast<double>(s.sum) + s.compensation, expected, 200 * 0x1p-48);
    PlainSum plain;
    plain.set(1.0f);
    plain.add_product(x, y);
    EXPECT_EQ(plain.value(), std::fma(x, y, 1.0f));
  }
}

template <class Sum>
double error_of_sum(const std::vector<float>& terms) {
  Sum sum;
  double truth = 0;
  for (float x : terms) {
    sum.add(x);
    truth += x;
  }
  return std::fabs(sum.value() - truth) / truth;
}

TEST(Summation, AMillionTerms) {
  Random random = random_for("AMillionTerms");
  std::vector<float> terms(1000000);
  for (float& x : terms) x = static_cast<float>(uniform(random, 0, 1));
  // Kahan's bound: two roundings (2^-23) whatever the number of terms, plus n 2^-48 of second order, 4e-9 here.
  constexpr double kTerms = 1e6;
  EXPECT_LT(error_of_sum<CompensatedSum>(terms), 0x1p-23 + kTerms * 0x1p-48);
  // Equal terms round the same way for long stretches: the worst case of the plain sum.
  const std::vector<float> equal(1000000, 0.1f);
  EXPECT_LT(error_of_sum<CompensatedSum>(equal), 0x1p-23 + kTerms * 0x1p-48);
  EXPECT_LT(100 * error_of_sum<CompensatedSum>(equal), error_of_sum<PlainSum>(equal));
  EXPECT_LT(error_of_sum<PlainSum>(equal), kTerms * 0x1p-24);
}

TEST(Summation, DecayedSumsForgetTheirErrors) {
  // s <- 0.999 s + x, a gated state's cell: compensated stays at rounding level.
  Random random = random_for("DecayedSums");
  CompensatedSum sum;
  double truth = 0;
  const float factor = 0.999f;
  for (int i = 0; i < 100000; ++i) {
    const auto x = static_cast<float>(uniform(random, 0, 1));
    sum.scale(factor);
    sum.add(x);
    truth = truth * factor + x;
  }
  EXPECT_NEAR(sum.value(), truth, truth * 0x1p-23);
}

template <class Sum>
class StateUpdate : public ::testing::Test {};
using Sums = ::testing::Types<PlainSum, CompensatedSum>;
TYPED_TEST_SUITE(StateUpdate, Sums);

TYPED_TEST(StateUpdate, OneTokenAfterAnotherMatchesFloat64) {
  constexpr int kRows = 4, kColumns = 3, kTokens = 100;
  Random random = random_for("StateUpdate");
  StateTile<TypeParam, kRows, kColumns> state;
  double truth[kRows][kColumns] = {};
  for (int t = 0; t < kTokens; ++t) {
    float k[kRows], q[kRows], a[kRows], v[kColumns];
    double length = 0;
    for (int i = 0; i < kRows; ++i) {
      k[i] = static_cast<float>(uniform(random, -1, 1));
      length += static_cast<double>(k[i]) * k[i];
      q[i] = static_cast<float>(uniform(random, -1, 1));
      a[i] = static_cast<float>(uniform(random, 0, 1));
    }
    for (float& x : k) x /= static_cast<float>(std::sqrt(length));
    for (float& x : v) x = static_cast<float>(uniform(random, -5, 5));
    const auto beta = static_cast<float>(uniform(random, 0, 1));

    float predicted[kColumns] = {}, out[kColumns] = {}, u[kColumns];
    for (int i = 0; i < kRows; ++i) {
      decay(state, i, a[i]);
      predict(state, i, k[i], predicted);
    }
    for (int j = 0; j < kColumns; ++j) u[j] = correct<Update::delta>(v[j], predicted[j], beta);
    for (int i = 0; i < kRows; ++i) {
      accumulate(state, i, k[i], u);
      read(state, i, q[i], out);
    }

    for (int j = 0; j < kColumns; ++j) {
      double p = 0, o = 0;
      for (int i = 0; i < kRows; ++i) {
        truth[i][j] *= a[i];
        p += truth[i][j] * k[i];
      }
      const double update = beta * (v[j] - p);
      for (int i = 0; i < kRows; ++i) {
        truth[i][j] += k[i] * update;
        o += truth[i][j] * q[i];
      }
      // Numbers up to about 10, a contraction, some 20 roundings on the way.
      EXPECT_NEAR(out[j], o, 20 * 10 * 0x1p-24) << "token " << t;
    }
  }
}

TEST(StateUpdatePolicy, AdditiveIgnoresThePrediction) {
  EXPECT_EQ(correct<Update::additive>(3.0f, 100.0f, 0.5f), 1.5f);
  EXPECT_EQ(correct<Update::delta>(3.0f, 1.0f, 0.5f), 1.0f);
}

}  // namespace
}  // namespace delta_attention
