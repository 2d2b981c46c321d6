#pragma once

// The vectors of the instruction set that the including file is compiled for. For files that src/CMakeLists.txt
// compiles once per instruction set, nowhere else; types and static functions only, so that no copy can serve another
// file.

#include "cpu/chunk.h"

namespace delta_attention::DELTA_ATTENTION_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
static_assert(cpu_kernels::kAlignment % kLanes == 0, "a padded row must hold whole vectors");

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float)), may_alias));
typedef std::int32_t IntegerVector __attribute__((vector_size(kLanes * sizeof(std::int32_t))));

/// The kLanes floats that start at `data`, which is aligned to a vector.
__attribute__((always_inline)) static inline Vector& vector_at(float* data) { return *reinterpret_cast<Vector*>(data); }
__attribute__((always_inline)) static inline const Vector& vector_at(const float* data) {
  return *reinterpret_cast<const Vector*>(data);
}

__attribute__((always_inline)) static inline float sum_of_lanes(Vector x) {
  typedef float Four __attribute__((vector_size(4 * sizeof(float))));
  Four parts[kLanes / 4];
  __builtin_memcpy(parts, &x, sizeof parts);
  Four sum = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) sum += parts[i];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

}  // namespace delta_attention::DELTA_ATTENTION_ISA
