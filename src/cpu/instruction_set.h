#pragma once

// The hot routines by instruction set.

#include <vector>

#include "cpu/chunk.h"

namespace delta_attention::cpu_kernels {

struct ChunkRoutines {
  const char* instruction_set;
  ChunkRoutine sequential;
  ChunkRoutine chunkwise;
  ExponentiateRow exponentiate_row;
  L2NormalizeRow l2_normalize_row;
};

/// What this processor runs, the best first.
std::vector<ChunkRoutines> chunk_routines();

}  // namespace delta_attention::cpu_kernels
