#pragma once

// What a kernel of the fused projection tells the rest of the library.

#include <cstddef>
#include <string>

#include "api/kernel.h"
#include "problem/fused_qkv_problem.h"

namespace delta_attention {

struct FusedQkvLaunch {
  const FusedQkvProblem& problem;
  const FusedQkvArgs& args;  // the caller's own words, for float64
  void* workspace = nullptr;
  void* stream = nullptr;
};

struct FusedQkvKernel {
  const char* name;
  DeviceType device;
  /// "" if the kernel can run this problem on this device, else the reason why not.
  std::string (*unsupported)(const FusedQkvProblem&, const DeviceProperties&);
  std::size_t (*workspace)(const FusedQkvProblem&);
  void (*launch)(const FusedQkvLaunch&);
};

/// Turns the caller's arguments into a problem, or throws InvalidArgument.
FusedQkvProblem check(const FusedQkvArgs& args);

}  // namespace delta_attention
