// state/summation.h as it would be without intrinsics: the very same header, with operators that the compiler may contract. The
// checks of tests/sass must reject this, and tests/cuda must see other bits. Only ever compiled into tests.

#include "compensated_steps.cuh"

#define delta_attention contracted  // the namespace: this is another CompensatedSum than the library's
#define __fadd_rn(a, b) ((a) + (b))
#define __fsub_rn(a, b) ((a) - (b))
#define __fmul_rn(a, b) ((a) * (b))
#include "state/summation.h"

namespace compensated_steps {

void launch_contracted(Operation operation, const Operands* operands, Result* results, int n) {
  launch<contracted::CompensatedSum>(operation, operands, results, n);
}

}  // namespace compensated_steps
