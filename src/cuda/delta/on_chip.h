#pragma once

#include "api/kernel.h"

namespace delta_attention {

extern const Kernel on_chip_kernel;

/// v3_on_chip with every decay taken for 1: wrong for gated recurrences, for the diagnostic kernel alone.
void launch_on_chip_without_decay(const Launch& call);

}  // namespace delta_attention
