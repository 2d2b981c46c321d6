#pragma once

// How fast each kernel was on the problems of bench/delta_forward, compiled in: what `automatic` goes by. For a problem the nearest
// measured one on a device of the same generation answers.

#include <vector>

#include "api/kernel.h"
#include "api/problem_features.h"

namespace delta_attention {

/// One measured problem. Rows are written by scripts/dispatch_table.py (api/tuned/*_kernels.inc).
struct KernelTimesRow {
  struct Time {
    const char* kernel;
    double microseconds;
  };
  const char* gpu;
  int capability;  // DeviceProperties::capability
  DType dtype;
  Update update;
  Gate gate;
  std::int64_t key_dim;
  std::int64_t value_dim;
  std::int64_t tokens;  // of a sequence
  std::int64_t chains;  // sequences times value heads
  std::vector<Time> times;
};

/// One measured problem with the kernels that dispatch may take.
struct MeasuredProblem {
  struct Time {
    const Kernel* kernel;
    double microseconds;
  };
  ProblemFeatures features;
  std::vector<Time> fastest_first;
  KernelTimesRow row;
};

class KernelTimes {
 public:
  /// Kernels that are not among `kernels`, or run by name only, are left out.
  KernelTimes(const std::vector<KernelTimesRow>& rows, const std::vector<const Kernel*>& kernels);

  /// The measured problem that says most about this one; null if there is none on a device of the same major compute capability.
  const MeasuredProblem* find(const Problem& problem, const DeviceProperties& device) const;

 private:
  std::vector<MeasuredProblem> problems_;
};

/// The table that this build carries.
const KernelTimes& kernel_times();

}  // namespace delta_attention
