#pragma once

// Reading numbers of any dtype in CPU memory, for conversions and comparisons outside the library.

#include <vector>

#include "delta_attention/tensor.h"
#include "device_memory.h"

namespace delta_attention::cli {

/// Element `offset` of memory of this dtype; exact.
double value_at(const void* data, DType dtype, std::int64_t offset);

/// The elements of a contiguous tensor, in order.
std::vector<double> values_of(const ConstTensor& contiguous);

/// A contiguous floating tensor converted to f32 or f64.
OwnedTensor converted(const ConstTensor& contiguous, DType dtype);

}  // namespace delta_attention::cli
