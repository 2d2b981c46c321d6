#include "api/dispatch.h"

#include <fmt/format.h>

#include "api/device.h"

namespace delta_attention {
namespace {

std::string refusal(const Kernel& kernel, const Problem& problem, const DeviceProperties& device,
                    const Execution& execution) {
  if (kernel.device != device.type) {
    return kernel.device == DeviceType::cpu ? "runs on CPU tensors" : "runs on CUDA tensors";
  }
  if (execution.deterministic && !kernel.repeatable) {
    return "its last bits may differ from run to run (deterministic was asked)";
  }
  return kernel.unsupported(problem, device);
}

bool is_automatic(const Execution& execution) { return execution.kernel.empty() || execution.kernel == "automatic"; }

}  // namespace

Choice choose(const Problem& problem, const DeviceProperties& device, const Execution& execution,
              const std::vector<const Kernel*>& candidates) {
  Choice choice;
  for (const Kernel* kernel : candidates) {
    const std::string reason = refusal(*kernel, problem, device, execution);
    choice.reports.push_back({kernel->name, kernel->summary, reason.empty(), reason});
    if (!reason.empty()) continue;
    if (is_automatic(execution)) {
      const bool better = choice.kernel == nullptr || kernel->priority > choice.kernel->priority;
      if (kernel->priority >= 0 && better) choice.kernel = kernel;
    } else if (execution.kernel == kernel->name) {
      choice.kernel = kernel;
    }
  }
  if (choice.kernel != nullptr) {
    choice.reason = is_automatic(execution) ? fmt::format("the preferred kernel for this problem on {}", device.name)
                                            : "asked for by name";
  } else {
    choice.reason = is_automatic(execution) ? "no kernel of this build can run this problem"
                                            : fmt::format("'{}' was asked for and cannot run", execution.kernel);
  }
  return choice;
}

const Kernel& require_kernel(const Problem& problem, const DeviceProperties& device, const Execution& execution) {
  const Choice choice = choose(problem, device, execution, kernels());
  if (choice.kernel != nullptr) return *choice.kernel;

  std::string able, reasons;
  bool known = is_automatic(execution);
  for (const KernelReport& report : choice.reports) {
    if (report.supported) able += (able.empty() ? "" : ", ") + report.kernel;
    if (is_automatic(execution)) {
      reasons += fmt::format("\n  {}: {}", report.kernel,
                             report.supported ? "can, but only when asked for by name" : report.reason);
    }
    if (report.kernel == execution.kernel) {
      known = true;
      reasons = ": " + report.reason;
    }
  }
  const std::string would_do = able.empty() ? "no kernel of this build" : able;
  if (!known) {
    throw Unsupported(
        fmt::format("kernel '{}' is not in this build; these can run the problem: {}", execution.kernel, would_do));
  }
  if (is_automatic(execution)) throw Unsupported("no kernel can run this problem on " + device.name + ":" + reasons);
  throw Unsupported(fmt::format("kernel '{}' cannot run this problem on {}{}; these can: {}", execution.kernel,
                                device.name, reasons, would_do));
}

}  // namespace delta_attention
