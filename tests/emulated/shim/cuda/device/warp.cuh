#pragma once

// Stands in front of the kernels' header of this name: the same, but for the instructions that host threads do not have.

#define sync_part sync_part_on_gpu
#define arrive_at_part arrive_at_part_on_gpu
#include "src/cuda/device/warp.cuh"
#undef sync_part
#undef arrive_at_part

namespace delta_attention {

inline void sync_part(int id, int threads) { test::this_gpu_thread.block->part(id, threads).arrive_and_wait(); }

/// Somebody else waits in this thread's place.
inline void arrive_at_part(int id, int threads) {
  test::Barrier& part = test::this_gpu_thread.block->part(id, threads);
  test::arrivals_of_this_thread.emplace_back([&part] { part.arrive_and_wait(); });
}

}  // namespace delta_attention
