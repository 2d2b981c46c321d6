#include "api/kernel.h"

namespace delta_attention {

// One line a kernel. The CPU kernels first, then the CUDA family in the order of its stages.
extern const Kernel reference_kernel;
extern const Kernel cpu_sequential_kernel;
extern const Kernel cpu_chunkwise_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
extern const Kernel step_loop_kernel;
extern const Kernel chunked_baseline_kernel;
extern const Kernel chunk_pipeline_kernel;
extern const Kernel chunk_pipeline_compensated_kernel;
extern const Kernel on_chip_kernel;
extern const Kernel on_chip_compensated_kernel;
extern const Kernel chunkwise_kernel;
#endif

const std::vector<const Kernel*>& kernels() {
  static const std::vector<const Kernel*> list = {
    &reference_kernel,
    &cpu_sequential_kernel,
    &cpu_chunkwise_kernel,
#if defined(DELTA_ATTENTION_WITH_CUDA)
    &step_loop_kernel,
    &chunked_baseline_kernel,
    &chunk_pipeline_kernel,
    &chunk_pipeline_compensated_kernel,
    &on_chip_kernel,
    &on_chip_compensated_kernel,
    &chunkwise_kernel,
#endif
  };
  return list;
}

}  // namespace delta_attention
