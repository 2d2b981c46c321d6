// The library's compensated sum, and its twin in PTX, where every instruction and its rounding is written out.

#include "compensated_steps.cuh"
#include "state/summation.h"

namespace compensated_steps {
namespace {

// PTX ISA, "Floating Point Instructions": with .rn, add, sub and mul are never contracted.
__device__ __forceinline__ float add_rn(float a, float b) {
  float result;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float sub_rn(float a, float b) {
  float result;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float mul_rn(float a, float b) {
  float result;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float fma_rn(float a, float b, float c) {
  float result;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

struct PtxSum {
  float sum, compensation;

  __device__ void scale(float factor) {
    const float product = mul_rn(sum, factor);
    const float product_error = fma_rn(sum, factor, -product);
    compensation = add_rn(mul_rn(compensation, factor), product_error);
    sum = product;
  }
  __device__ void add(float x) {
    const float term = add_rn(x, compensation);
    const float total = add_rn(sum, term);
    const float term_part = sub_rn(total, sum);
    const float sum_part = sub_rn(total, term_part);
    compensation = add_rn(sub_rn(sum, sum_part), sub_rn(term, term_part));
    sum = total;
  }
  __device__ void add_product(float x, float y) {
    const float product = mul_rn(x, y);
    const float product_error = fma_rn(x, y, -product);
    add(product);
    compensation = add_rn(compensation, product_error);
  }
};

}  // namespace

void launch_intrinsics(Operation operation, const Operands* operands, Result* results, int n) {
  launch<delta_attention::CompensatedSum>(operation, operands, results, n);
}

void launch_ptx(Operation operation, const Operands* operands, Result* results, int n) {
  launch<PtxSum>(operation, operands, results, n);
}

}  // namespace compensated_steps
