#pragma once

#include "api/kernel.h"

namespace delta_attention {

/// delta_attention_forward with this kernel, in kernels() or not; execution.kernel is not looked at.
void forward_with(const Kernel& kernel, const ForwardArgs& args, const Execution& execution);

}  // namespace delta_attention
