#pragma once

#include <string>
#include <vector>

#include "api/kernel.h"
#include "api/kernel_times.h"
#include "api/tuned_table.h"

namespace delta_attention {

struct Choice {
  const Kernel* kernel = nullptr;  // null if none can run the problem
  Settings settings;
};

/// Whether dispatch is to choose the kernel.
bool is_automatic(const Execution& execution);

/// Throws InvalidArgument for settings without a kernel's name: they belong to one kernel.
void check_settings_have_a_kernel(const Execution& execution);

/// Why a kernel of this kind cannot run on this device as asked, whatever the problem; "" if it may.
std::string refusal_by_kind(DeviceType kernel_device, bool repeatable, const DeviceProperties& device,
                            const Execution& execution);

/// The same for a call that has one kernel a device, without settings: also if another kernel was asked for.
std::string refusal_of_only_kernel(const char* kernel, DeviceType kernel_device, const DeviceProperties& device,
                                   const Execution& execution);

/// Why this kernel, or why none.
std::string reason_of_choice(bool found, const DeviceProperties& device, const Execution& execution);

/// Which of `candidates` runs the problem on this device, and with which settings: the caller's over the tuned ones. Unless one is asked
/// for by name, the fastest of those measured on the nearest problem, or else the one with the highest priority. Throws InvalidArgument
/// for settings that the kernel asked for does not have; what else cannot run gives no kernel.
Choice choose(const Problem& problem, const DeviceProperties& device, const Execution& execution,
              const std::vector<const Kernel*>& candidates, const TunedTable& tuned = tuned_table(),
              const KernelTimes& times = kernel_times());

/// The same choice in words, with what every candidate says.
DispatchInfo explain(const Problem& problem, const DeviceProperties& device, const Execution& execution,
                     const std::vector<const Kernel*>& candidates, const TunedTable& tuned = tuned_table(),
                     const KernelTimes& times = kernel_times());

/// The choice among all kernels, or Unsupported with every kernel's reason.
Choice require_kernel(const Problem& problem, const DeviceProperties& device, const Execution& execution);

}  // namespace delta_attention
