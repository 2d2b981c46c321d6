#pragma once

namespace delta_attention {

/// 2^x by the special function unit: relative error 2^-22, 0 for -infinity.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace delta_attention
