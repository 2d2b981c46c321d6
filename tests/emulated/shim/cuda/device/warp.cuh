#pragma once

// Stands in front of the kernels' header of this name: the same, but for the one instruction that host threads do not have.

#define sync_part sync_part_on_gpu
#include "src/cuda/device/warp.cuh"
#undef sync_part

#include <stdexcept>

namespace delta_attention {

inline void sync_part(int id, int threads) {
  test::Barrier& part = *test::this_gpu_thread.block->parts.at(static_cast<std::size_t>(id - 1));
  if (part.threads() != threads) throw std::logic_error("a barrier of another number of threads");
  part.arrive_and_wait();
}

}  // namespace delta_attention
