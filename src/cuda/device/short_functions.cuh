#pragma once

// Functions of gates by the special function unit, for kernels whose products round far more: relative error about 2^-21, a decay's near 1
// that of an f32 number.

#include <cmath>

#include "cuda/device/exp2.cuh"
#include "state/gate.h"

namespace delta_attention {

/// 2^x for x <= 0, say. Slow decays are applied thousands of times: near 1, their series.
__device__ __forceinline__ float short_exp2(float x) {
  const float series = fmaf(fmaf(x, 0.5f * kLn2 * kLn2, kLn2), x, 1.0f);  // what is left out: below 2^-26
  return fabsf(x) < 0x1p-8f ? series : exp2_approx(x);
}

/// log(1 + e^x). Where e^x is small, its series: the logarithm of a number near 1 has lost the digits.
__device__ __forceinline__ float short_softplus(float x) {
  const float e = exp2_approx(-kLog2E * fabsf(x));
  const float series = e * fmaf(e, fmaf(e, fmaf(e, -0.25f, 1.0f / 3.0f), -0.5f), 1.0f);
  return fmaxf(x, 0.0f) + (e < 0.03f ? series : __logf(1.0f + e));
}

}  // namespace delta_attention
