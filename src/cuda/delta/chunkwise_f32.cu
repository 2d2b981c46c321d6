// v5_chunkwise for f32 tensors. The story is told in chunkwise.cu.

#include "cuda/delta/chunkwise_kernels.cuh"

template struct delta_attention::chunkwise::Kernels<float>;
