#include "api/softmax_kernel.h"

namespace delta_attention {

// One line a kernel.
extern const SoftmaxKernel softmax_reference_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
extern const SoftmaxKernel decode_kernel;
#endif

const std::vector<const SoftmaxKernel*>& softmax_kernels() {
  static const std::vector<const SoftmaxKernel*> list = {
      &softmax_reference_kernel,
#if defined(DELTA_ATTENTION_WITH_CUDA)
      &decode_kernel,
#endif
  };
  return list;
}

}  // namespace delta_attention
