#include "api/softmax_kernel.h"

namespace delta_attention {

// One line a kernel.
extern const SoftmaxKernel softmax_reference_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
extern const SoftmaxKernel three_stage_softmax_kernel;
extern const SoftmaxKernel three_pass_softmax_kernel;
extern const SoftmaxKernel naive_softmax_kernel;
extern const SoftmaxKernel tiled_softmax_kernel;
extern const SoftmaxKernel vec_load_softmax_kernel;
extern const SoftmaxKernel vec_padded_softmax_kernel;
extern const SoftmaxKernel ping_pong_softmax_kernel;
extern const SoftmaxKernel rowmax_softmax_kernel;
extern const SoftmaxKernel vec_fused_softmax_kernel;
extern const SoftmaxKernel flash_tc_softmax_kernel;
extern const SoftmaxKernel decode_kernel;
#endif

const std::vector<const SoftmaxKernel*>& softmax_kernels() {
  static const std::vector<const SoftmaxKernel*> list = {
      &softmax_reference_kernel,
#if defined(DELTA_ATTENTION_WITH_CUDA)
      &three_stage_softmax_kernel,
      &three_pass_softmax_kernel,
      &naive_softmax_kernel,
      &tiled_softmax_kernel,
      &vec_load_softmax_kernel,
      &vec_padded_softmax_kernel,
      &ping_pong_softmax_kernel,
      &rowmax_softmax_kernel,
      &vec_fused_softmax_kernel,
      &flash_tc_softmax_kernel,
      &decode_kernel,
#endif
  };
  return list;
}

}  // namespace delta_attention
