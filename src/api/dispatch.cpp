#include "api/dispatch.h"

#include <fmt/format.h>

#include <algorithm>

#include "api/device.h"

namespace delta_attention {
namespace {

/// What a kernel would do with a problem.
struct Verdict {
  std::string refusal;  // empty: it runs
  Settings asked, settings;
};

Settings asked_settings(const Kernel& kernel, const Execution& execution) {
  if (execution.settings.empty() || execution.kernel != kernel.name) return {};
  return parse_settings(execution.settings, kernel.name, kernel.settings());
}

std::string refusal_of(const Kernel& kernel, const Problem& problem, const DeviceProperties& device,
                       const Execution& execution, const Settings& settings) {
  if (execution.deterministic && kernel.unrepeatable != nullptr && kernel.unrepeatable(settings)) {
    return fmt::format("with {} its last bits may differ from run to run (deterministic was asked)", settings.text());
  }
  return kernel.unsupported(problem, device, settings);
}

/// Tuned settings come from a similar problem. Where they do not fit this one, the kernel's own rule takes their place.
Verdict judge(const Kernel& kernel, const Problem& problem, const DeviceProperties& device, const Execution& execution,
              const TunedTable& table) {
  Verdict verdict;
  verdict.asked = asked_settings(kernel, execution);
  verdict.refusal = refusal_by_kind(kernel.device, kernel.repeatable, device, execution);
  if (!verdict.refusal.empty()) return verdict;
  verdict.settings = table.find(kernel, problem, device);
  const bool tuned = !verdict.settings.empty();
  verdict.settings.override_with(verdict.asked);
  verdict.refusal = refusal_of(kernel, problem, device, execution, verdict.settings);
  if (tuned && !verdict.refusal.empty()) {
    verdict.settings = verdict.asked;
    verdict.refusal = refusal_of(kernel, problem, device, execution, verdict.settings);
  }
  return verdict;
}

/// Whether this kernel, if it can run the problem, takes the place of `best`.
bool is_candidate(const Kernel& kernel, const Execution& execution, const Kernel* best) {
  if (!is_automatic(execution)) return execution.kernel == kernel.name;
  return kernel.priority >= 0 && (best == nullptr || kernel.priority > best->priority);
}

bool contains(const std::vector<const Kernel*>& kernels, const Kernel* kernel) {
  return std::find(kernels.begin(), kernels.end(), kernel) != kernels.end();
}

/// "fastest of the kernels measured at B*HV=8 T=2048 K=128 V=128 bf16 on NVIDIA H200 (250 us; next v1_chunk_pipeline 410 us)", of those
/// that can run the problem. "" if `kernel` was not measured there.
std::string measured_reason(const MeasuredProblem& measured, const Kernel* kernel, const std::vector<KernelReport>& reports) {
  const auto can_run = [&](const MeasuredProblem::Time& time) {
    return std::any_of(reports.begin(), reports.end(), [&](const KernelReport& r) { return r.supported && r.kernel == time.kernel->name; });
  };
  const auto& times = measured.fastest_first;
  const auto own = std::find_if(times.begin(), times.end(), [&](const auto& time) { return time.kernel == kernel; });
  if (own == times.end()) return "";
  const KernelTimesRow& row = measured.row;
  const std::string where = fmt::format("fastest of the kernels measured at B*HV={} T={} K={} V={} {} on {}", row.chains, row.tokens,
                                        row.key_dim, row.value_dim, name(row.dtype), row.gpu);
  const auto next = std::find_if(own + 1, times.end(), can_run);
  if (next == times.end()) return fmt::format("{} ({:.4g} us)", where, own->microseconds);
  return fmt::format("{} ({:.4g} us; next {} {:.4g} us)", where, own->microseconds, next->kernel->name, next->microseconds);
}

std::string settings_origin(const Choice& choice, const Settings& asked) {
  if (choice.settings.empty()) return "";
  const bool tuned = choice.settings.size() > asked.size();
  return asked.empty() ? ", with tuned settings"
         : tuned       ? ", with the caller's settings over tuned ones"
                       : ", with the caller's settings";
}

}  // namespace

bool is_automatic(const Execution& execution) { return execution.kernel.empty() || execution.kernel == "automatic"; }

void check_settings_have_a_kernel(const Execution& execution) {
  if (execution.settings.empty() || !is_automatic(execution)) return;
  throw InvalidArgument("settings", "\"\" unless a kernel is asked for by name: settings belong to one kernel",
                        fmt::format("\"{}\" with the kernel 'automatic'", execution.settings));
}

std::string refusal_by_kind(DeviceType kernel_device, bool repeatable, const DeviceProperties& device,
                            const Execution& execution) {
  if (kernel_device != device.type) {
    return kernel_device == DeviceType::cpu ? "runs on CPU tensors" : "runs on CUDA tensors";
  }
  if (execution.deterministic && !repeatable) return "its last bits may differ from run to run (deterministic was asked)";
  return "";
}

std::string refusal_of_only_kernel(const char* kernel, DeviceType kernel_device, const DeviceProperties& device,
                                   const Execution& execution) {
  check_settings_have_a_kernel(execution);
  const std::string refusal = refusal_by_kind(kernel_device, true, device, execution);
  if (!refusal.empty()) return refusal;
  if (!is_automatic(execution) && execution.kernel != kernel) return fmt::format("kernel '{}' was asked for", execution.kernel);
  parse_settings(execution.settings, kernel, {});
  return "";
}

std::string reason_of_choice(bool found, const DeviceProperties& device, const Execution& execution) {
  if (!found) {
    return is_automatic(execution) ? "no kernel of this build can run this problem"
                                   : fmt::format("'{}' was asked for and cannot run", execution.kernel);
  }
  return is_automatic(execution) ? fmt::format("the preferred kernel for this problem on {}", device.name)
                                 : "asked for by name";
}

Choice choose(const Problem& problem, const DeviceProperties& device, const Execution& execution,
              const std::vector<const Kernel*>& candidates, const TunedTable& tuned, const KernelTimes& times) {
  check_settings_have_a_kernel(execution);
  Choice choice;
  const auto take_if_it_can = [&](const Kernel* kernel) {
    const Verdict verdict = judge(*kernel, problem, device, execution, tuned);
    if (verdict.refusal.empty()) choice = {kernel, verdict.settings};
  };
  const MeasuredProblem* measured = is_automatic(execution) ? times.find(problem, device) : nullptr;
  if (measured != nullptr) {
    for (const MeasuredProblem::Time& time : measured->fastest_first) {
      if (contains(candidates, time.kernel)) take_if_it_can(time.kernel);
      if (choice.kernel != nullptr) return choice;
    }
  }
  for (const Kernel* kernel : candidates) {
    if (is_candidate(*kernel, execution, choice.kernel)) take_if_it_can(kernel);
  }
  return choice;
}

DispatchInfo explain(const Problem& problem, const DeviceProperties& device, const Execution& execution,
                     const std::vector<const Kernel*>& candidates, const TunedTable& tuned, const KernelTimes& times) {
  const Choice choice = choose(problem, device, execution, candidates, tuned, times);
  DispatchInfo info;
  Settings asked;
  for (const Kernel* kernel : candidates) {
    const Verdict verdict = judge(*kernel, problem, device, execution, tuned);
    if (kernel == choice.kernel) asked = verdict.asked;
    info.kernels.push_back(
        {kernel->name, kernel->summary, verdict.refusal.empty(), verdict.refusal, kernel->settings()});
  }
  if (choice.kernel != nullptr) info.kernel = choice.kernel->name;
  const MeasuredProblem* measured = is_automatic(execution) ? times.find(problem, device) : nullptr;
  if (measured != nullptr) info.reason = measured_reason(*measured, choice.kernel, info.kernels);
  if (info.reason.empty()) info.reason = reason_of_choice(choice.kernel != nullptr, device, execution);
  info.reason += settings_origin(choice, asked);
  info.settings = choice.settings.text();
  return info;
}

Choice require_kernel(const Problem& problem, const DeviceProperties& device, const Execution& execution) {
  const Choice choice = choose(problem, device, execution, kernels());
  if (choice.kernel != nullptr) return choice;

  std::string able, reasons;
  bool known = is_automatic(execution);
  for (const KernelReport& report : explain(problem, device, execution, kernels()).kernels) {
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
