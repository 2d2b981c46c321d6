#pragma once

// What a kernel of absorbed multi-head latent attention tells the rest of the library: SoftmaxKernel without what one kernel a device
// has no use for.

#include <cstddef>
#include <string>

#include "api/kernel.h"
#include "problem/mla_problem.h"

namespace delta_attention {

struct MlaLaunch {
  const MlaProblem& problem;
  const MlaArgs& args;  // the caller's own words, for float64
  const DeviceProperties& device;
  void* workspace = nullptr;
  void* stream = nullptr;
};

struct MlaKernel {
  const char* name;
  DeviceType device;
  /// "" if the kernel can run this problem on this device, else the reason why not.
  std::string (*unsupported)(const MlaProblem&, const DeviceProperties&);
  std::size_t (*workspace)(const MlaProblem&, const DeviceProperties&);
  void (*launch)(const MlaLaunch&);
};

/// Turns the caller's arguments into a problem, or throws InvalidArgument.
MlaProblem check(const MlaArgs& args);

}  // namespace delta_attention
