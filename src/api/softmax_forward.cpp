#include <fmt/format.h>

#include "api/check_softmax.h"
#include "api/device.h"
#include "api/dispatch.h"
#include "api/softmax_kernel.h"
#include "delta_attention/softmax_attention.h"

namespace delta_attention {
namespace {

/// What the caller chose for this kernel.
Settings settings_for(const SoftmaxKernel& kernel, const Execution& execution) {
  if (execution.settings.empty() || execution.kernel != kernel.name) return {};
  return parse_settings(execution.settings, kernel.name, kernel.settings());
}

std::string refusal_of(const SoftmaxKernel& kernel, const SoftmaxProblem& problem, const DeviceProperties& device,
                       const Execution& execution) {
  const std::string refusal = refusal_by_kind(kernel.device, kernel.repeatable, device, execution);
  return refusal.empty() ? kernel.unsupported(problem, device, settings_for(kernel, execution)) : refusal;
}

DispatchInfo explain(const SoftmaxProblem& problem, const DeviceProperties& device, const Execution& execution) {
  check_settings_have_a_kernel(execution);
  DispatchInfo info;
  int priority = -1;
  for (const SoftmaxKernel* kernel : softmax_kernels()) {
    const std::string refusal = refusal_of(*kernel, problem, device, execution);
    info.kernels.push_back({kernel->name, kernel->summary, refusal.empty(), refusal, kernel->settings()});
    if (!refusal.empty()) continue;
    const bool chosen = is_automatic(execution) ? kernel->priority > priority : execution.kernel == kernel->name;
    if (!chosen) continue;
    info.kernel = kernel->name;
    info.settings = settings_for(*kernel, execution).text();
    priority = kernel->priority;
  }
  info.reason = reason_of_choice(!info.kernel.empty(), device, execution);
  return info;
}

struct SoftmaxChoice {
  const SoftmaxKernel& kernel;
  Settings settings;
};

/// The kernel of that choice, or Unsupported with every kernel's reason.
SoftmaxChoice require_kernel(const SoftmaxProblem& problem, const DeviceProperties& device, const Execution& execution) {
  const DispatchInfo info = explain(problem, device, execution);
  for (const SoftmaxKernel* kernel : softmax_kernels()) {
    if (info.kernel == kernel->name) return {*kernel, settings_for(*kernel, execution)};
  }
  std::string reasons;
  for (const KernelReport& report : info.kernels) {
    reasons += fmt::format("\n  {}: {}", report.kernel, report.supported ? "can, when asked for by name" : report.reason);
  }
  const std::string asked = is_automatic(execution) ? "no softmax kernel" : fmt::format("softmax kernel '{}'", execution.kernel);
  throw Unsupported(fmt::format("{} can run this problem on {}:{}", asked, device.name, reasons));
}

}  // namespace

void softmax_attention_forward(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  const auto [kernel, settings] = require_kernel(problem, device, execution);
  if (problem.sequences == 0 || problem.queries == 0) return;
  const DeviceGuard guard(problem.device);
  const Workspace workspace(kernel.workspace(problem, device, settings), execution, problem.device);
  kernel.launch({problem, args, device, workspace.data(), execution.stream, settings});
}

std::size_t softmax_attention_workspace(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  const auto [kernel, settings] = require_kernel(problem, device, execution);
  return kernel.workspace(problem, device, settings);
}

DispatchInfo softmax_dispatch_info(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  return explain(problem, device_properties(problem.device), execution);
}

}  // namespace delta_attention
