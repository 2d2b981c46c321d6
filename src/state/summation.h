#pragma once

// How a running sum is kept: plainly, or with a compensation that carries what rounding dropped.
//
// Both policies offer the same operations: add(x), add_product(x, y), scale(a) and value(); and part(i) of kParts numbers, for
// schedules that hand a sum from one thread to another. A schedule is written once against them; V1 and V3 take PlainSum, V2 and V4
// take CompensatedSum.
//
// CompensatedSum is Kahan summation built on two-sum, which is exact whatever the magnitudes (Knuth; Ogita, Rump and Oishi 2005). The
// error of each step goes into the next term, so that the compensation stays within half an ulp of the sum and its own roundings
// do not pile up. scale() carries the product's rounding error with an exact product by FMA.
// The compiler must neither contract nor reassociate these steps: on the GPU they are intrinsics that it may not touch, on
// the CPU the library is built with -ffp-contract=off.

#include <cmath>

#include "problem/host_device.h"

namespace delta_attention {

// Single correctly rounded operations that no compiler may merge.
DELTA_ATTENTION_HOST_DEVICE float rounded_add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
DELTA_ATTENTION_HOST_DEVICE float rounded_sub(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}
DELTA_ATTENTION_HOST_DEVICE float rounded_mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
DELTA_ATTENTION_HOST_DEVICE float fused_mul_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

struct PlainSum {
  static constexpr int kParts = 1;
  float sum = 0.0f;

  DELTA_ATTENTION_HOST_DEVICE float& part(int) { return sum; }
  DELTA_ATTENTION_HOST_DEVICE float part(int) const { return sum; }

  DELTA_ATTENTION_HOST_DEVICE void set(float value) { sum = value; }
  DELTA_ATTENTION_HOST_DEVICE float value() const { return sum; }
  DELTA_ATTENTION_HOST_DEVICE void scale(float factor) { sum = rounded_mul(sum, factor); }
  DELTA_ATTENTION_HOST_DEVICE void add(float x) { sum = rounded_add(sum, x); }
  DELTA_ATTENTION_HOST_DEVICE void add_product(float x, float y) { sum = fused_mul_add(x, y, sum); }
};

struct CompensatedSum {
  static constexpr int kParts = 2;
  float sum = 0.0f;
  float compensation = 0.0f;  // the true sum is sum + compensation

  DELTA_ATTENTION_HOST_DEVICE float& part(int index) { return index == 0 ? sum : compensation; }
  DELTA_ATTENTION_HOST_DEVICE float part(int index) const { return index == 0 ? sum : compensation; }

  DELTA_ATTENTION_HOST_DEVICE void set(float value) {
    sum = value;
    compensation = 0.0f;
  }
  DELTA_ATTENTION_HOST_DEVICE float value() const { return rounded_add(sum, compensation); }

  DELTA_ATTENTION_HOST_DEVICE void scale(float factor) {
    const float product = rounded_mul(sum, factor);
    const float product_error = fused_mul_add(sum, factor, -product);
    compensation = rounded_add(rounded_mul(compensation, factor), product_error);
    sum = product;
  }

  DELTA_ATTENTION_HOST_DEVICE void add(float x) {
    const float term = rounded_add(x, compensation);
    const float total = rounded_add(sum, term);
    const float term_part = rounded_sub(total, sum);
    const float sum_part = rounded_sub(total, term_part);
    compensation = rounded_add(rounded_sub(sum, sum_part), rounded_sub(term, term_part));
    sum = total;
  }

  DELTA_ATTENTION_HOST_DEVICE void add_product(float x, float y) {
    const float product = rounded_mul(x, y);
    const float product_error = fused_mul_add(x, y, -product);
    add(product);
    compensation = rounded_add(compensation, product_error);
  }
};

}  // namespace delta_attention
