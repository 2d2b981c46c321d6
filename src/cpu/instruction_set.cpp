// Picks the hot routines for the processor at hand. src/CMakeLists.txt compiles them once per instruction set, each
// copy in a namespace of its own.

#include "cpu/instruction_set.h"

namespace delta_attention {

#define DELTA_ATTENTION_DECLARE_ROUTINES(space)                              \
  namespace space {                                                          \
  void sequential_chunk(const cpu_kernels::Chunk& chunk);                    \
  void chunkwise_chunk(const cpu_kernels::Chunk& chunk);                     \
  void exponentiate_row(float* row, cpu_kernels::Index size);                \
  void l2_normalize_row(float* row, cpu_kernels::Index size, float epsilon); \
  }
#define DELTA_ATTENTION_ROUTINES(space) \
  { #space, space::sequential_chunk, space::chunkwise_chunk, space::exponentiate_row, space::l2_normalize_row }

DELTA_ATTENTION_DECLARE_ROUTINES(cpu_baseline)
#if defined(DELTA_ATTENTION_CPU_X86)
DELTA_ATTENTION_DECLARE_ROUTINES(cpu_avx2)
DELTA_ATTENTION_DECLARE_ROUTINES(cpu_avx512)
#endif

namespace cpu_kernels {

std::vector<ChunkRoutines> chunk_routines() {
  std::vector<ChunkRoutines> routines;
#if defined(DELTA_ATTENTION_CPU_X86)
  // The features tested are the ones that the copies are compiled with.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (avx512) routines.push_back(DELTA_ATTENTION_ROUTINES(cpu_avx512));
  if (avx2) routines.push_back(DELTA_ATTENTION_ROUTINES(cpu_avx2));
#endif
  routines.push_back(DELTA_ATTENTION_ROUTINES(cpu_baseline));
  return routines;
}

}  // namespace cpu_kernels
}  // namespace delta_attention
