// Picks the hot routines for the processor at hand. src/CMakeLists.txt compiles them once per instruction set, each copy in a
// namespace of its own.

#include "cpu/chunk.h"

namespace delta_attention {

#define DELTA_ATTENTION_DECLARE_ROUTINES(space)                 \
  namespace space {                                             \
  void sequential_chunk(const cpu_kernels::Chunk&);             \
  void chunkwise_chunk(const cpu_kernels::Chunk&);              \
  void exponentiate_row(float* row, cpu_kernels::Index size);   \
  }                                                             \
  static constexpr cpu_kernels::ChunkRoutines space##_routines{ \
      #space, space::sequential_chunk, space::chunkwise_chunk, space::exponentiate_row};
DELTA_ATTENTION_DECLARE_ROUTINES(cpu_baseline)
#if defined(DELTA_ATTENTION_CPU_X86)
DELTA_ATTENTION_DECLARE_ROUTINES(cpu_avx2)
DELTA_ATTENTION_DECLARE_ROUTINES(cpu_avx512)
#endif
#undef DELTA_ATTENTION_DECLARE_ROUTINES

namespace cpu_kernels {

const ChunkRoutines& chunk_routines() {
#if defined(DELTA_ATTENTION_CPU_X86)
  // The features tested are the ones that the copies are compiled with.
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (has_avx2 && has_avx512) return cpu_avx512_routines;
  if (has_avx2) return cpu_avx2_routines;
#endif
  return cpu_baseline_routines;
}

}  // namespace cpu_kernels
}  // namespace delta_attention
