// vec_load: `tiled` with four channels an access, from global and from shared memory (tile_kernel.cuh). A quarter of the instructions;
// but rows of 32, 64 or 128 channels all start in the same bank, so that the eight lanes of an access phase still wait for each other.
//
// Wins against `tiled` everywhere; loses to vec_padded by its bank conflicts. Measured: docs/performance.md.

#include "cuda/softmax/tile_kernel.cuh"

namespace delta_attention {

extern const SoftmaxKernel vec_load_softmax_kernel;
const SoftmaxKernel vec_load_softmax_kernel = tile::kernel_of<tile::Family<tile::Always<32>::Keys, tile::Loads::vectors, 0, 1>>(
    "vec_load", "tiles of 32 keys, four channels an access");

}  // namespace delta_attention
