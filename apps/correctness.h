#pragma once

// The correctness part of `verify`: kernels against the float64 reference on random problems.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernel_choice.h"
#include "random_problem.h"

namespace delta_attention::cli {

/// One output of one kernel on one problem. Errors are those of the worst head.
struct CorrectnessCheck {
  KernelChoice choice;
  Device device;
  RandomProblem problem;
  std::string output;    // out, final_state or final_normalizer
  double error = 0.0;    // ||x - exact|| / ||exact||
  double allowed = 0.0;  // what the storage's rounding and f32 arithmetic explain
  double furthest =
      0.0;  // the largest |x - exact| / (1e-2 + 1e-2 |exact|): above 1 no element may be, whatever its format

  bool passed() const { return error <= allowed && furthest <= 1.0; }  // NaN fails
};

struct Refusal {
  KernelChoice choice;
  RandomProblem problem;
  std::string reason;
};

struct CorrectnessReport {
  std::uint64_t seed = 0;
  int problems = 0;
  std::vector<CorrectnessCheck> checks;
  std::vector<Refusal> refusals;  // of kernels that were asked for
};

/// Every recurrence in every storage type, on sizes drawn anew. Without `choices`, every kernel that takes the problem on one of
/// `devices`; otherwise those.
CorrectnessReport check_correctness(const std::vector<Device>& devices, const std::vector<KernelChoice>& choices,
                                    std::uint64_t seed, const std::function<void(double fraction)>& progress);

}  // namespace delta_attention::cli
