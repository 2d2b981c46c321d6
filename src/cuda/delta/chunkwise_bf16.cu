// v5_chunkwise for bf16 tensors. The story is told in chunkwise.cu.

#include "cuda/delta/chunkwise_kernels.cuh"

template struct delta_attention::chunkwise::Kernels<delta_attention::BFloat16>;
