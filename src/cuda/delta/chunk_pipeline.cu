// v1_chunk_pipeline: the chunk pipeline (chunk_pipeline_kernel.cuh tells its story) with the state in plain f32 sums.
//
// Wins against step_loop by its launches and by keeping the state on chip for a whole run. Loses where chains are few and
// long: blocks of one chain work one after another, so B * HV * V/16 chains must fill the GPU. Measured ratios:
// docs/performance.md.

#include "cuda/delta/chunk_pipeline_kernel.cuh"

namespace delta_attention {

extern const Kernel chunk_pipeline_kernel;

const Kernel chunk_pipeline_kernel = {
    "v1_chunk_pipeline",
    "one launch: blocks own runs of tokens and hand the state on, f32 micro-chunks (V1)",
    DeviceType::cuda,
    true,
    10,
    chunk_pipeline_stages::settings,
    chunk_pipeline_stages::unsupported<PlainSum>,
    chunk_pipeline_stages::workspace<PlainSum>,
    chunk_pipeline_stages::launch<PlainSum>,
};

}  // namespace delta_attention
