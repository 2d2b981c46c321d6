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

struct SoftmaxChoice {
  const SoftmaxKernel* kernel = nullptr;  // null if none can run the problem
  Settings settings;
};

/// Whether this kernel, if it can run the problem, takes the place of `best`.
bool is_candidate(const SoftmaxKernel& kernel, const Execution& execution, const SoftmaxKernel* best) {
  if (!is_automatic(execution)) return execution.kernel == kernel.name;
  return kernel.priority >= 0 && (best == nullptr || kernel.priority > best->priority);
}

SoftmaxChoice choose(const SoftmaxProblem& problem, const DeviceProperties& device, const Execution& execution) {
  check_settings_have_a_kernel(execution);
  SoftmaxChoice choice;
  for (const SoftmaxKernel* kernel : softmax_kernels()) {
    if (!is_candidate(*kernel, execution, choice.kernel)) continue;
    if (refusal_of(*kernel, problem, device, execution).empty()) choice = {kernel, settings_for(*kernel, execution)};
  }
  return choice;
}

/// The same choice in words, with what every kernel says.
DispatchInfo explain(const SoftmaxProblem& problem, const DeviceProperties& device, const Execution& execution) {
  const SoftmaxChoice choice = choose(problem, device, execution);
  DispatchInfo info;
  for (const SoftmaxKernel* kernel : softmax_kernels()) {
    const std::string refusal = refusal_of(*kernel, problem, device, execution);
    info.kernels.push_back({kernel->name, kernel->summary, refusal.empty(), refusal, kernel->settings()});
  }
  if (choice.kernel != nullptr) info.kernel = choice.kernel->name;
  info.settings = choice.settings.text();
  info.reason = reason_of_choice(choice.kernel != nullptr, device, execution);
  return info;
}

/// The choice, or Unsupported with every kernel's reason.
SoftmaxChoice require_kernel(const SoftmaxProblem& problem, const DeviceProperties& device, const Execution& execution) {
  const SoftmaxChoice choice = choose(problem, device, execution);
  if (choice.kernel != nullptr) return choice;
  std::string reasons;
  for (const KernelReport& report : explain(problem, device, execution).kernels) {
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
  const Workspace workspace(kernel->workspace(problem, device, settings), execution, problem.device);
  kernel->launch({problem, args, device, workspace.data(), execution.stream, settings});
}

std::size_t softmax_attention_workspace(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  const auto [kernel, settings] = require_kernel(problem, device, execution);
  return kernel->workspace(problem, device, settings);
}

DispatchInfo softmax_dispatch_info(const SoftmaxArgs& args, const Execution& execution) {
  const SoftmaxProblem problem = check(args);
  return explain(problem, device_properties(problem.device), execution);
}

}  // namespace delta_attention
