#pragma once

#include <vector>

#include "problem/problem.h"

namespace delta_attention {

/// One operand with the name that messages use.
struct NamedOperand {
  const char* name;
  ConstTensor view;
  bool is_output;
};

/// Every operand of a call, present or not.
std::vector<NamedOperand> operands(const ForwardArgs& args);

/// Turns the caller's arguments into a problem, or throws InvalidArgument. Looks at shapes, strides, dtypes and devices, and at
/// the values of cu_seqlens where the CPU can read them.
Problem check(const ForwardArgs& args);

/// The checks that read tensor contents (Execution::check_values). Synchronises for CUDA tensors.
void check_values(const ForwardArgs& args, const Problem& problem);

}  // namespace delta_attention
