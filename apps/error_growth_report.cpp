#include "error_growth_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <thread>

#include "delta_attention/version.h"
#include "device_memory.h"
#include "errors.h"
#include "machine.h"

namespace delta_attention::cli {
namespace {

using nlohmann::ordered_json;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  // NaN counts as the largest error there is.
  std::nth_element(values.begin(), middle, values.end(),
                   [](double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; });
  return *middle;
}

template <class Select>
Error median_error(const std::vector<Growth>& repeats, std::size_t length, Select select) {
  const auto of = [&](double Error::*metric) {
    std::vector<double> values;
    for (const Growth& growth : repeats) values.push_back(select(growth.lengths[length]).*metric);
    return median(values);
  };
  return {of(&Error::max_abs), of(&Error::max_relative), of(&Error::relative)};
}

struct Quantity {
  const char* name;
  const Error* error;
};

/// The quantities that one length has.
std::vector<Quantity> quantities_of(const LengthErrors& length) {
  std::vector<Quantity> list = {{"out", &length.out}, {"state", &length.state}};
  if (length.normalizer) list.push_back({"normalizer", &*length.normalizer});
  return list;
}

CurveFit fit_curve(const GrowthCurve& curve, std::size_t quantity, const char* metric_name, double Error::*metric) {
  CurveFit result;
  result.metric = metric_name;
  for (const LengthErrors& length : curve.median.lengths) {
    const Quantity found = quantities_of(length)[quantity];
    result.quantity = found.name;
    result.tokens.push_back(static_cast<double>(length.tokens));
    result.errors.push_back(found.error->*metric);
  }
  result.fit = fit_growth(result.tokens, result.errors);
  return result;
}

/// Four digits: more are noise of the draw.
ordered_json short_number(double value) {
  if (!std::isfinite(value)) return nullptr;
  return std::strtod(fmt::format("{:.4g}", value).c_str(), nullptr);
}

ordered_json to_json(const Error& error) {
  return {{"max_abs", short_number(error.max_abs)},
          {"max_relative", short_number(error.max_relative)},
          {"relative", short_number(error.relative)}};
}

ordered_json curve_json(const GrowthCurve& curve) {
  return {{"regime", curve.regime},
          {"dtype", name(curve.dtype)},
          {"kernel", curve.median.kernel},
          {"how", curve.median.how}};
}

ordered_json row_json(const GrowthCurve& curve, const LengthErrors& length) {
  ordered_json row = curve_json(curve);
  row["tokens"] = length.tokens;
  for (const Quantity& quantity : quantities_of(length)) row[quantity.name] = to_json(*quantity.error);
  return row;
}

ordered_json fit_json(const GrowthCurve& curve, const CurveFit& fit) {
  ordered_json json = curve_json(curve);
  json["quantity"] = fit.quantity;
  json["metric"] = fit.metric;
  const PowerLaw& power = fit.fit->power;
  const LogarithmLaw& logarithm = fit.fit->logarithm;
  json["power"] = {
      {"c", short_number(power.c)}, {"p", short_number(power.p)}, {"residual", short_number(power.residual)}};
  json["logarithm"] = {{"a", short_number(logarithm.a)},
                       {"b", short_number(logarithm.b)},
                       {"residual", short_number(logarithm.residual)}};
  json["better"] = fit.fit->better();
  return json;
}

ordered_json context_json(const GrowthSettings& settings) {
  const GpuSoftware software = settings.gpu ? gpu_software() : GpuSoftware{};
  std::string reason;
  return {{"date", now()},
          {"program", "error_growth"},
          {"library_version", DELTA_ATTENTION_VERSION},
          {"commit", commit()},
          {"cpu", cpu_model()},
          {"threads", std::to_string(std::thread::hardware_concurrency())},
          {"gpu", settings.gpu ? list_gpus(reason).at(static_cast<std::size_t>(settings.gpu->index)).name : "none"},
          {"driver", software.driver},
          {"cuda", software.cuda},
          {"seed", std::to_string(settings.seed)},
          {"repeats", settings.repeats},
          {"heads", settings.size.heads},
          {"key_dim", settings.size.dim},
          {"value_dim", settings.size.dim},
          {"data", std::filesystem::path(settings.data).filename().string()}};
}

/// A JSON array with one entry a line.
std::string lines_of(const ordered_json& array) {
  std::string text = "[";
  for (const ordered_json& entry : array) text += (text.size() > 1 ? ",\n  " : "\n  ") + entry.dump();
  return text + "\n ]";
}

void write_file(const std::string& path, const std::string& text) {
  std::FILE* out = std::fopen(path.c_str(), "w");
  if (out == nullptr) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  const bool written = std::fwrite(text.data(), 1, text.size(), out) == text.size();
  if (std::fclose(out) != 0 || !written) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
}

std::string law_of(const CurveFit& fit) {
  if (!fit.fit) return fmt::format("{:>7}  {:<10}", "", "");
  const double p = std::round(100 * fit.fit->power.p) / 100 + 0.0;  // no "-0.00"
  return fmt::format("{:>7.2f}  {:<10}", p, fit.fit->better());
}

void print_curve(const GrowthCurve& curve) {
  const std::vector<CurveFit> fits = fits_of(curve);
  fmt::print("  {:<5} {:<31} {:<10}", name(curve.dtype), curve.median.kernel, curve.median.how);
  for (const CurveFit& fit : fits) {
    const bool shown = fit.metric == "relative" && fit.quantity != "normalizer";
    if (shown) fmt::print(" {:>9.1e} {:>9.1e}{}", fit.errors.front(), fit.errors.back(), law_of(fit));
  }
  fmt::print("\n");
}

}  // namespace

void require_writable(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "a");
  if (file == nullptr) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  std::fclose(file);
}

Growth median_growth(const std::vector<Growth>& repeats) {
  Growth result = repeats.front();
  for (std::size_t n = 0; n < result.lengths.size(); ++n) {
    LengthErrors& length = result.lengths[n];
    length.out = median_error(repeats, n, [](const LengthErrors& e) { return e.out; });
    length.state = median_error(repeats, n, [](const LengthErrors& e) { return e.state; });
    if (length.normalizer) {
      length.normalizer = median_error(repeats, n, [](const LengthErrors& e) { return *e.normalizer; });
    }
  }
  return result;
}

std::vector<CurveFit> fits_of(const GrowthCurve& curve) {
  std::vector<CurveFit> fits;
  for (std::size_t quantity = 0; quantity < quantities_of(curve.median.lengths.front()).size(); ++quantity) {
    fits.push_back(fit_curve(curve, quantity, "max_abs", &Error::max_abs));
    fits.push_back(fit_curve(curve, quantity, "relative", &Error::relative));
  }
  return fits;
}

void print_growth(const std::vector<GrowthCurve>& curves) {
  std::string regime;
  for (const GrowthCurve& curve : curves) {
    if (curve.regime != regime) {
      regime = curve.regime;
      const auto found =
          std::find_if(regimes().begin(), regimes().end(), [&](const Regime& each) { return regime == each.name; });
      const auto tokens = [](const LengthErrors& length) { return fmt::format("T={}", length.tokens); };
      fmt::print("\n{} ({}): {}\n", regime, found->preset, found->description);
      fmt::print("  {:<47}  {:<39}  {}\n", "", "error of the output", "error of the final state");
      fmt::print("  {:<5} {:<31} {:<10}", "dtype", "kernel", "how");
      for (int i = 0; i < 2; ++i) {
        fmt::print(" {:>9} {:>9}{:>7}  {:<10}", tokens(curve.median.lengths.front()),
                   tokens(curve.median.lengths.back()), "p", "better law");
      }
      fmt::print("\n");
    }
    print_curve(curve);
  }
}

void write_growth_csv(const std::string& path, const std::vector<GrowthCurve>& curves) {
  std::string text = "regime,dtype,kernel,how,tokens,quantity,max_abs,max_relative,relative\n";
  for (const GrowthCurve& curve : curves) {
    for (const LengthErrors& length : curve.median.lengths) {
      for (const Quantity& quantity : quantities_of(length)) {
        const Error& error = *quantity.error;
        text += fmt::format("{},{},{},{},{},{},{:.4g},{:.4g},{:.4g}\n", curve.regime, name(curve.dtype),
                            curve.median.kernel, curve.median.how, length.tokens, quantity.name, error.max_abs,
                            error.max_relative, error.relative);
      }
    }
  }
  write_file(path, text);
}

void write_growth_json(const std::string& path, const GrowthSettings& settings,
                       const std::vector<GrowthCurve>& curves) {
  ordered_json list = ordered_json::array(), rows = ordered_json::array(), fits = ordered_json::array();
  for (const Regime& regime : regimes()) {
    list.push_back({{"name", regime.name}, {"recurrence", regime.preset}, {"description", regime.description}});
  }
  for (const GrowthCurve& curve : curves) {
    for (const LengthErrors& length : curve.median.lengths) rows.push_back(row_json(curve, length));
    for (const CurveFit& fit : fits_of(curve)) {
      if (fit.fit) fits.push_back(fit_json(curve, fit));
    }
  }
  write_file(path, fmt::format("{{\n \"context\": {},\n \"regimes\": {},\n \"rows\": {},\n \"fits\": {}\n}}\n",
                               context_json(settings).dump(), lines_of(list), lines_of(rows), lines_of(fits)));
}

}  // namespace delta_attention::cli
