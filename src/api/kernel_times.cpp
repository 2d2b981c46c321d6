#include "api/kernel_times.h"

#include <algorithm>
#include <cmath>
#include <string_view>

namespace delta_attention {
namespace {

/// How far a row is from a problem, in doublings. Which kernel is fastest changes gradually with every size, so that none of them decides
/// alone; a gate or an update more is as much work as a small part of a doubling, another dtype may use other units of the GPU. Every call
/// asks this of every row: no branches.
double distance(const ProblemFeatures& a, const ProblemFeatures& b) {
  const bool a_wide = a.dtype == DType::f32, b_wide = b.dtype == DType::f32;
  const double kinds = 4.0 * (a.capability != b.capability) + 2.0 * (a_wide != b_wide) + 1.0 * (a.dtype != b.dtype) +
                       0.5 * (a.gate != b.gate) + 0.25 * (a.update != b.update);
  const double tile = std::abs(a.key_dim - b.key_dim) + std::abs(a.value_dim - b.value_dim);
  const double length = std::abs(a.chains - b.chains) + std::abs(a.tokens - b.tokens);
  return kinds + (tile + length);
}

std::vector<MeasuredProblem::Time> sorted_times(const KernelTimesRow& row, const std::vector<const Kernel*>& kernels) {
  std::vector<MeasuredProblem::Time> times;
  for (const KernelTimesRow::Time& time : row.times) {
    const auto same = [&](const Kernel* kernel) { return std::string_view(kernel->name) == time.kernel; };
    const auto kernel = std::find_if(kernels.begin(), kernels.end(), same);
    if (kernel != kernels.end() && (*kernel)->priority >= 0) times.push_back({*kernel, time.microseconds});
  }
  std::stable_sort(times.begin(), times.end(), [](const auto& a, const auto& b) { return a.microseconds < b.microseconds; });
  return times;
}

}  // namespace

KernelTimes::KernelTimes(const std::vector<KernelTimesRow>& rows, const std::vector<const Kernel*>& kernels) {
  for (const KernelTimesRow& row : rows) {
    std::vector<MeasuredProblem::Time> times = sorted_times(row, kernels);
    if (times.empty()) continue;
    const ProblemFeatures features(row.capability, row.dtype, row.update, row.gate, row.key_dim, row.value_dim, row.chains, row.tokens);
    problems_.push_back({features, std::move(times), row});
  }
}

const MeasuredProblem* KernelTimes::find(const Problem& problem, const DeviceProperties& device) const {
  return nearest(problems_, ProblemFeatures(problem, device), distance);
}

const KernelTimes& kernel_times() {
  static const KernelTimes table(
      {
#include "api/tuned/nvidia_h200_kernels.inc"
      },
      kernels());
  return table;
}

}  // namespace delta_attention
