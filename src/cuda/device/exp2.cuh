#pragma once

namespace delta_attention {

constexpr float kLog2E = 1.4426950408889634f;

/// 2^x by the special function unit: relative error 2^-22, 0 for -infinity.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// 1 / x by the same unit, for normal numbers and infinity.
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace delta_attention
