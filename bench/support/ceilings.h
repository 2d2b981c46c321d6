#pragma once

#include "support/traffic.h"

namespace bench {

/// Measures the GPU, once: the bytes that a large copy reads and writes per second, f32 multiply-adds and bf16 products by mma.sync from
/// registers, both as operations per second. Also puts them into the context of the results.
const Ceilings& measured_ceilings();

}  // namespace bench
