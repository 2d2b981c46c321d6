#include "diagnostics/diagnostics.h"

#include "api/forward.h"

namespace delta_attention {

// One line a kernel.
extern const Kernel cpu_without_decay_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
extern const Kernel on_chip_without_decay_kernel;
#endif

namespace diagnostics {
namespace {

const std::vector<const Kernel*>& kernels() {
  static const std::vector<const Kernel*> list = {
      &cpu_without_decay_kernel,
#if defined(DELTA_ATTENTION_WITH_CUDA)
      &on_chip_without_decay_kernel,
#endif
  };
  return list;
}

}  // namespace

std::vector<Diagnostic> list() {
  std::vector<Diagnostic> result;
  for (const Kernel* kernel : kernels()) result.push_back({kernel->name, kernel->summary, kernel->device});
  return result;
}

void forward(const ForwardArgs& args, const Execution& execution) {
  for (const Kernel* kernel : kernels()) {
    if (execution.kernel == kernel->name) return forward_with(*kernel, args, execution);
  }
  throw Unsupported("'" + execution.kernel + "' is not a diagnostic kernel of this build");
}

}  // namespace diagnostics
}  // namespace delta_attention
