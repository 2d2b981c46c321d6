// v2_chunk_pipeline_compensated: the chunk pipeline (chunk_pipeline_kernel.cuh tells its story) with state and normaliser in
// compensated sums (state/summation.h).
//
// A sum is a value and a compensation, what rounding has dropped from the value so far. Both stay in registers over a run and both
// are handed on, so that the error of a state that only accumulates does not grow with the number of tokens (docs/numerics.md). The
// caller's initial state is the value, with nothing dropped yet; the final state is the two parts added up.
//
// Same schedule as v1_chunk_pipeline, grid, roles and budget included. A state element costs a second register, a second float in the
// hand-off, and in `advance` 10 operations a token instead of one.
//
// Wins where rounding piles up: additive updates with little or no decay over long sequences. Buys nothing for contractive delta
// rules, whose error does not grow. Never faster than v1_chunk_pipeline; measured ratios: docs/performance.md.
//
// Source: the article's compensated chunk pipeline; the summation is Kahan's on two-sum (Knuth; Ogita, Rump and Oishi 2005).

#include "cuda/delta/chunk_pipeline_kernel.cuh"

namespace delta_attention {

extern const Kernel chunk_pipeline_compensated_kernel;

const Kernel chunk_pipeline_compensated_kernel = {
    "v2_chunk_pipeline_compensated",
    "V1 with compensated sums for state and normaliser: error does not grow with length (V2)",
    DeviceType::cuda,
    true,
    -1,
    chunk_pipeline_stages::settings,
    chunk_pipeline_stages::unsupported<CompensatedSum>,
    chunk_pipeline_stages::workspace<CompensatedSum>,
    chunk_pipeline_stages::launch<CompensatedSum>,
};

}  // namespace delta_attention
