#pragma once

// Two laws for how an error grows with the number of tokens T, fitted side by side; which one holds is for the reader to judge.

#include <optional>
#include <vector>

namespace delta_attention::cli {

/// err = c T^p, by least squares of log err.
struct PowerLaw {
  double c = 0.0, p = 0.0;
  double residual = 0.0;
};

/// err = a + b ln T, by least squares of the relative deviation from err.
struct LogarithmLaw {
  double a = 0.0, b = 0.0;
  double residual = 0.0;
};

/// Residuals are comparable: of either law the root mean square of law(T) / err - 1.
struct GrowthFit {
  PowerLaw power;
  LogarithmLaw logarithm;

  /// "power", "logarithm", or "either" where one residual is less than 10 % above the other (for a flat curve, both laws are the
  /// same constant).
  const char* better() const;
};

/// Nothing for fewer than three points, or where an error is 0 or not finite.
std::optional<GrowthFit> fit_growth(const std::vector<double>& tokens, const std::vector<double>& errors);

}  // namespace delta_attention::cli
