// tiled: keys and values come to shared memory a tile at a time and serve a whole block of query rows (tile_kernel.cuh tells the
// algorithm that the tiled kernels share). One channel an access everywhere: neighbouring lanes read neighbouring keys, whose rows start
// in the same bank, so that a read of a key's channel takes as many turns as the warp has lanes. That is what tiling costs here, and what
// vec_load and vec_padded take away.
//
// Wins against `naive` only where global memory is the bottleneck. Measured: docs/performance.md.

#include "cuda/softmax/tile_kernel.cuh"

namespace delta_attention {

extern const SoftmaxKernel tiled_softmax_kernel;
const SoftmaxKernel tiled_softmax_kernel = tile::kernel_of<tile::Family<tile::Always<32>::Keys, tile::Loads::elements, 0, 1>>(
    "tiled", "tiles of 32 keys in shared memory, one channel an access");

}  // namespace delta_attention
