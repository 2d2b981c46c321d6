#pragma once

// What a softmax kernel tells the rest of the library about itself: Kernel (api/kernel.h) for the other problem.

#include <cstddef>
#include <string>
#include <vector>

#include "api/kernel.h"
#include "problem/softmax_problem.h"

namespace delta_attention {

/// One launch: the checked problem and where it runs.
struct SoftmaxLaunch {
  const SoftmaxProblem& problem;
  const SoftmaxArgs& args;  // the caller's own words, for the float64 reference alone
  const DeviceProperties& device;
  void* workspace = nullptr;  // at least workspace(problem, device, settings) bytes
  void* stream = nullptr;
  Settings settings;  // what the caller chose
};

struct SoftmaxKernel {
  const char* name;
  const char* summary;
  DeviceType device;
  /// Results are the same to the last bit from run to run.
  bool repeatable;
  /// Dispatch takes the supported kernel with the highest priority; negative means only when asked for by name.
  int priority;
  /// What can be chosen: every setting with every value that it can take.
  std::vector<Setting> (*settings)();
  /// "" if the kernel can run this problem on this device with these settings, else the reason why not.
  std::string (*unsupported)(const SoftmaxProblem&, const DeviceProperties&, const Settings&);
  std::size_t (*workspace)(const SoftmaxProblem&, const DeviceProperties&, const Settings&);
  void (*launch)(const SoftmaxLaunch&);
  /// Weights are rounded to the operands' type before they multiply the values.
  bool rounds_weights = false;
};

/// Every softmax kernel of this build.
const std::vector<const SoftmaxKernel*>& softmax_kernels();

/// The reason that all f32-arithmetic kernels share.
inline std::string needs_f32(const SoftmaxProblem& problem) {
  return problem.has_f64 ? "f64 operands run on the kernel 'softmax_reference' only" : "";
}

inline std::size_t no_workspace(const SoftmaxProblem&, const DeviceProperties&, const Settings&) { return 0; }

}  // namespace delta_attention
