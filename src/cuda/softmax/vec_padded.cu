// vec_padded: vec_load with rows of keys D + 4 floats apart (tile_kernel.cuh): neighbouring keys start four banks apart, and the eight
// lanes that share an access phase read all 32 banks once. Values need no padding: there, neighbouring lanes read neighbouring channels.
//
// Wins against vec_load by the conflicts, for 4 floats a key of shared memory. Measured: docs/performance.md.

#include "cuda/softmax/tile_kernel.cuh"

namespace delta_attention {

extern const SoftmaxKernel vec_padded_softmax_kernel;
const SoftmaxKernel vec_padded_softmax_kernel = tile::kernel_of<tile::Family<tile::Always<32>::Keys, tile::Loads::vectors, 4, 1>>(
    "vec_padded", "tiles of 32 keys, four channels an access, padded rows");

}  // namespace delta_attention
