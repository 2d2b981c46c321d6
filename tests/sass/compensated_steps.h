#pragma once

// The operations of CompensatedSum (state/summation.h), one a kernel, compiled three ways: through the library's intrinsics, as
// inline PTX, and with plain operators that the compiler may contract. tests/sass looks at their machine code, tests/cuda at the
// bits that they compute.

namespace compensated_steps {

enum class Operation { add, scale, add_product, step };

/// A sum with its compensation, and the operands of one operation on it.
struct Operands {
  float sum, compensation, x, y;
};

struct Result {
  float sum, compensation;
};

/// Applies the operation to n elements in device memory, on the default stream.
void launch_intrinsics(Operation operation, const Operands* operands, Result* results, int n);
void launch_ptx(Operation operation, const Operands* operands, Result* results, int n);
void launch_contracted(Operation operation, const Operands* operands, Result* results, int n);

}  // namespace compensated_steps
