#include <fmt/format.h>

#include "api/check_softmax.h"
#include "api/device.h"
#include "api/softmax_kernel.h"
#include "delta_attention/softmax_attention.h"

namespace delta_attention {
namespace {

bool is_automatic(const Execution& execution) { return execution.kernel.empty() || execution.kernel == "automatic"; }

std::string refusal_of(const SoftmaxKernel& kernel, const SoftmaxProblem& problem, const DeviceProperties& device,
                       const Execution& execution) {
  if (kernel.device != device.type) {
    return kernel.device == DeviceType::cpu ? "runs on CPU tensors" : "runs on CUDA tensors";
  }
  if (execution.deterministic && !kernel.repeatable) {
    return "its last bits may differ from run to run (deterministic was asked)";
  }
  return kernel.unsupported(problem, device);
}

DispatchInfo explain(const SoftmaxProblem& problem, const DeviceProperties& device, const Execution& execution) {
  DispatchInfo info;
  int priority = -1;
  for (const SoftmaxKernel* kernel : softmax_kernels()) {
    const std::string refusal = refusal_of(*kernel, problem, device, execution);
    info.kernels.push_back({kernel->name, kernel->summary, refusal.empty(), refusal, {}});
    if (!refusal.empty()) continue;
    const bool chosen = is_automatic(execution) ? kernel->priority > priority : execution.kernel == kernel->name;
    if (!chosen) continue;
    info.kernel = kernel->name;
    priority = kernel->priority;
  }
  if (info.kernel.empty()) {
    info.reason = is_automatic(execution) ? "no kernel of this build can run this problem"
                                          : fmt::format("'{}' was asked for and cannot run", execution.kernel);
  } else {
    info.reason = is_automatic(execution) ? fmt::format("the preferred kernel for this problem on {}", device.name)
                                          : "asked for by name";
  }
  return info;
}

/// The kernel of that choice, or Unsupported with every kernel's reason.
const SoftmaxKernel& require_kernel(const SoftmaxProblem& problem, const DeviceProperties& device,
                                    const Execution& execution) {
  if (!execution.settings.empty()) {
    throw InvalidArgument("settings", "none (softmax kernels have no settings)", "'" + execution.settings + "'");
  }
  const DispatchInfo info = explain(problem, device, execution);
  for (const SoftmaxKernel* kernel : softmax_kernels()) {
    if (info.kernel == kernel->name) return *kernel;
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
  const SoftmaxKernel& kernel = require_kernel(problem, device, execution);
  if (problem.sequences == 0 || problem.queries == 0) return;
  const DeviceGuard guard(problem.device);
  const Workspace workspace(kernel.workspace(problem, device), execution, problem.device);
  kernel.launch({problem, args, device, workspace.data(), execution.stream});
}

std::size_t softmax_attention_workspace(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  return require_kernel(problem, device, execution).workspace(problem, device);
}

DispatchInfo softmax_dispatch_info(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  return explain(problem, device_properties(problem.device), execution);
}

}  // namespace delta_attention
