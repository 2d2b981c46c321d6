#include <algorithm>
#include <thread>

#include "api/check.h"
#include "api/device.h"
#include "api/dispatch.h"
#include "api/forward.h"
#include "delta_attention/delta_attention.h"

namespace delta_attention {
namespace {

/// All cores are counted where they are wanted: the system takes microseconds to count them.
int thread_count(const Execution& execution, Device device) {
  if (execution.threads < 0) {
    throw InvalidArgument("threads", "0 (all cores) or more", std::to_string(execution.threads));
  }
  if (device.type != DeviceType::cpu) return 1;
  return execution.threads > 0 ? execution.threads : std::max(1u, std::thread::hardware_concurrency());
}

void run(const Kernel& kernel, const Settings& settings, const Problem& problem, const DeviceProperties& device,
         const ForwardArgs& args, const Execution& execution) {
  const int threads = thread_count(execution, problem.device);
  const DeviceGuard guard(problem.device);
  if (execution.check_values) check_values(args, problem);
  if (problem.sequences == 0) return;
  const Workspace workspace(kernel.workspace(problem, device, settings), execution, problem.device);
  kernel.launch({problem, args, device, workspace.data(), execution.stream, threads, settings});
}

}  // namespace

void delta_attention_forward(const ForwardArgs& args, const Execution& execution) {
  const Problem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  const auto [kernel, settings] = require_kernel(problem, device, execution);
  run(*kernel, settings, problem, device, args, execution);
}

void forward_with(const Kernel& kernel, const ForwardArgs& args, const Execution& execution) {
  const Problem problem = check(args);
  const Settings settings = parse_settings(execution.settings, kernel.name, kernel.settings());
  const DeviceProperties& device = device_properties(problem.device);
  const std::string reason = kernel.device == problem.device.type ? kernel.unsupported(problem, device, settings)
                                                                  : "the tensors are on another device";
  if (!reason.empty())
    throw Unsupported(std::string("kernel '") + kernel.name + "' cannot run this problem: " + reason);
  run(kernel, settings, problem, device, args, execution);
}

std::size_t delta_attention_workspace(const ForwardArgs& args, const Execution& execution) {
  const Problem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  const auto [kernel, settings] = require_kernel(problem, device, execution);
  return kernel->workspace(problem, device, settings);
}

DispatchInfo dispatch_info(const ForwardArgs& args, const Execution& execution) {
  const Problem problem = check(args);
  return explain(problem, device_properties(problem.device), execution, kernels());
}

}  // namespace delta_attention
