#include "kernel_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#if defined(DELTA_ATTENTION_WITH_DIAGNOSTICS)
#include "diagnostics/diagnostics.h"
#endif

namespace delta_attention::cli {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// The kernels of this build, whatever they can run.
std::vector<std::string> kernel_names() {
  static const float nothing = 0.0f;
  ForwardArgs args;
  args.q = args.k = args.v = tensor(&nothing, {1, 1, 1, 1});
  float out = 0.0f;
  args.out = tensor(&out, {1, 1, 1, 1});
  std::vector<std::string> names;
  for (const KernelReport& kernel : dispatch_info(args).kernels) names.push_back(kernel.kernel);
  return names;
}

}  // namespace

std::vector<std::string> diagnostic_names() {
  std::vector<std::string> names;
#if defined(DELTA_ATTENTION_WITH_DIAGNOSTICS)
  for (const diagnostics::Diagnostic& each : diagnostics::list()) names.push_back(each.name);
#endif
  return names;
}

KernelChoice parse_kernel_choice(const std::string& text) {
  const std::size_t colon = text.find(':');
  KernelChoice choice;
  choice.kernel = text.substr(0, colon);
  if (colon != std::string::npos) choice.settings = text.substr(colon + 1);
  choice.diagnostic = contains(diagnostic_names(), choice.kernel);
  if (choice.diagnostic || choice.kernel == "automatic" || contains(kernel_names(), choice.kernel)) return choice;
  throw Unsupported(
      fmt::format("kernel '{}' is not in this build; these are: {}", choice.kernel, fmt::join(kernel_names(), ", ")));
}

void forward_on(const KernelChoice& choice, const ForwardArgs& args) {
  Execution execution;
  execution.kernel = choice.kernel;
  execution.settings = choice.settings;
#if defined(DELTA_ATTENTION_WITH_DIAGNOSTICS)
  if (choice.diagnostic) return diagnostics::forward(args, execution);
#endif
  delta_attention_forward(args, execution);
}

}  // namespace delta_attention::cli
