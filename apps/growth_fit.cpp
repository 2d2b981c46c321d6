#include "growth_fit.h"

#include <cmath>
#include <cstddef>

namespace delta_attention::cli {
namespace {

constexpr std::size_t kFewestPoints = 3;
constexpr double kClose = 1.1;

struct Line {
  double intercept, slope;
};

/// The line through (x, y) with the least sum of weight * deviation^2.
Line weighted_line(const std::vector<double>& x, const std::vector<double>& y, const std::vector<double>& weights) {
  double total = 0, mean_x = 0, mean_y = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    total += weights[i];
    mean_x += weights[i] * x[i];
    mean_y += weights[i] * y[i];
  }
  mean_x /= total;
  mean_y /= total;
  double xx = 0, xy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    xx += weights[i] * (x[i] - mean_x) * (x[i] - mean_x);
    xy += weights[i] * (x[i] - mean_x) * (y[i] - mean_y);
  }
  return {mean_y - xy / xx * mean_x, xy / xx};
}

std::vector<double> logarithms(std::vector<double> values) {
  for (double& value : values) value = std::log(value);
  return values;
}

template <class Law>
double relative_residual(const std::vector<double>& tokens, const std::vector<double>& errors, Law law) {
  double sum = 0;
  for (std::size_t i = 0; i < tokens.size(); ++i) sum += std::pow(law(tokens[i]) / errors[i] - 1, 2);
  return std::sqrt(sum / static_cast<double>(tokens.size()));
}

PowerLaw fit_power(const std::vector<double>& tokens, const std::vector<double>& errors) {
  const Line line = weighted_line(logarithms(tokens), logarithms(errors), std::vector<double>(tokens.size(), 1.0));
  PowerLaw law{std::exp(line.intercept), line.slope, 0.0};
  law.residual = relative_residual(tokens, errors, [&](double t) { return law.c * std::pow(t, law.p); });
  return law;
}

LogarithmLaw fit_logarithm(const std::vector<double>& tokens, const std::vector<double>& errors) {
  std::vector<double> weights;
  for (double error : errors) weights.push_back(1 / (error * error));
  const Line line = weighted_line(logarithms(tokens), errors, weights);
  LogarithmLaw law{line.intercept, line.slope, 0.0};
  law.residual = relative_residual(tokens, errors, [&](double t) { return law.a + law.b * std::log(t); });
  return law;
}

}  // namespace

const char* GrowthFit::better() const {
  if (power.residual > kClose * logarithm.residual) return "logarithm";
  if (logarithm.residual > kClose * power.residual) return "power";
  return "either";
}

std::optional<GrowthFit> fit_growth(const std::vector<double>& tokens, const std::vector<double>& errors) {
  if (tokens.size() < kFewestPoints) return std::nullopt;
  for (double error : errors) {
    if (!(error > 0) || !std::isfinite(error)) return std::nullopt;
  }
  return GrowthFit{fit_power(tokens, errors), fit_logarithm(tokens, errors)};
}

}  // namespace delta_attention::cli
