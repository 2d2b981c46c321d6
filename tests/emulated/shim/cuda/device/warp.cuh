#pragma once

// Stands in front of the kernels' header of this name: the same, but for the instruction that host threads do not have.

#define sync_part sync_part_on_gpu
#include "src/cuda/device/warp.cuh"
#undef sync_part

namespace delta_attention {

inline void sync_part(int id, int threads) { test::this_gpu_thread.block->part(id, threads).arrive_and_wait(); }

}  // namespace delta_attention
