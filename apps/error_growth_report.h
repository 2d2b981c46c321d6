#pragma once

// What `delta-attention error-growth` found, as a table, CSV and JSON.

#include <cstdint>
#include <string>
#include <vector>

#include "error_growth_measure.h"
#include "error_growth_regimes.h"
#include "growth_fit.h"

namespace delta_attention::cli {

/// The medians of one kernel in one regime and storage type.
struct GrowthCurve {
  std::string regime;
  DType dtype = DType::f32;
  Growth median;  // of each error on its own, over the repeats
};

/// One of the errors that a curve follows, with its fitted laws.
struct CurveFit {
  std::string quantity;  // "out", "state", "normalizer"
  std::string metric;    // "max_abs", "relative"
  std::vector<double> tokens, errors;
  std::optional<GrowthFit> fit;
};
std::vector<CurveFit> fits_of(const GrowthCurve& curve);

/// The median of each error over repeats of one kernel.
Growth median_growth(const std::vector<Growth>& repeats);

struct GrowthSettings {
  std::uint64_t seed = 0;
  int repeats = 1;
  RegimeSize size;
  std::string data;  // the file of the regime `activations`
  std::optional<Device> gpu;
};

void print_growth(const std::vector<GrowthCurve>& curves);

/// All three throw IoError. require_writable() is for before the work.
void require_writable(const std::string& path);
void write_growth_csv(const std::string& path, const std::vector<GrowthCurve>& curves);
void write_growth_json(const std::string& path, const GrowthSettings& settings, const std::vector<GrowthCurve>& curves);

}  // namespace delta_attention::cli
