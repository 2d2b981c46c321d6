#pragma once

#include "problem/softmax_problem.h"

namespace delta_attention {

/// Turns the caller's arguments into a problem, or throws InvalidArgument. Looks at shapes, strides, dtypes and devices, and at the
/// values of lengths, offsets and block tables where the CPU can read them.
SoftmaxProblem check(const SoftmaxArgs& args);

}  // namespace delta_attention
