#include "api/softmax_kernel.h"

namespace delta_attention {

// One line a kernel.
extern const SoftmaxKernel softmax_reference_kernel;

const std::vector<const SoftmaxKernel*>& softmax_kernels() {
  static const std::vector<const SoftmaxKernel*> list = {
      &softmax_reference_kernel,
  };
  return list;
}

}  // namespace delta_attention
