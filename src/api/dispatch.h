#pragma once

#include <vector>

#include "api/kernel.h"

namespace delta_attention {

struct Choice {
  const Kernel* kernel = nullptr;  // null if none can run the problem
  std::string reason;
  std::vector<KernelReport> reports;
};

/// Which of `candidates` runs the problem on this device. Never throws: what cannot run is in the reports.
Choice choose(const Problem& problem, const DeviceProperties& device, const Execution& execution,
              const std::vector<const Kernel*>& candidates);

/// The chosen kernel, or Unsupported with every kernel's reason.
const Kernel& require_kernel(const Problem& problem, const DeviceProperties& device, const Execution& execution);

}  // namespace delta_attention
