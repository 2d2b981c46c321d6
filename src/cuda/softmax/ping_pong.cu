// ping_pong: vec_padded with two tiles in turn (tile_kernel.cuh): while a tile is computed with, the next one is copied to shared memory
// (cp.async where operands are f32). One barrier a tile instead of two, and no thread waits for global memory; but two tiles take twice
// the shared memory, so fewer blocks share a multiprocessor, and other blocks had hidden much of the wait already.
//
// Wins against vec_padded where both tiles are small; level with it at 128 channels. Measured: docs/performance.md.

#include "cuda/softmax/tile_kernel.cuh"

namespace delta_attention {

extern const SoftmaxKernel ping_pong_softmax_kernel;
const SoftmaxKernel ping_pong_softmax_kernel = tile::kernel_of<tile::Family<tile::Always<32>::Keys, tile::Loads::vectors, 4, 2>>(
    "ping_pong", "vec_padded with the next tile fetched under this one");

}  // namespace delta_attention
