// What is done to whole rows as they are loaded: the l2 norm of q and k, and e^x for the decays of a channel gate,
// which are as many as the inputs.
//
// Compiled once per instruction set, as chunkwise.cpp is.

#include "cpu/vector.h"

namespace delta_attention::DELTA_ATTENTION_ISA {
namespace {

using cpu_kernels::Index;

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2High = 0.693359375f;  // few bits, so that n * kLn2High is exact
constexpr float kLn2Low = -2.12194440e-4f;
constexpr float kLeast = -104.0f, kMost = 89.0f;  // beyond, e^x is 0 or infinite
constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits

Vector power_of_two(IntegerVector n) {
  const IntegerVector bits = (n + 127) << 23;
  return (Vector)bits;
}

/// x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial of degree 7 (the first term left out is below
/// 6e-9), and 2^n in two factors, so that results below the smallest normal number round once. -inf gives 0, NaN stays
/// NaN.
Vector exponential(Vector x) {
  x = x < kLeast ? Vector{} + kLeast : x;
  x = x > kMost ? Vector{} + kMost : x;
  const Vector shifted = x * kLog2E + kToInteger;
  const Vector n = shifted - kToInteger;
  const IntegerVector exponent = (IntegerVector)shifted - 0x4B400000;
  const Vector r = (x - n * kLn2High) - n * kLn2Low;
  Vector sum = Vector{} + 1.0f / 5040.0f;
  constexpr float kCoefficients[] = {1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
  for (const float coefficient : kCoefficients) sum = sum * r + coefficient;
  const IntegerVector half = exponent >> 1;
  return sum * power_of_two(half) * power_of_two(exponent - half);
}

}  // namespace

void l2_normalize_row(float* row, Index size, float epsilon) {
  Vector sums{};
  for (Index i = 0; i < size; i += kLanes) sums += vector_at(row + i) * vector_at(row + i);
  const float factor = 1.0f / __builtin_sqrtf(sum_of_lanes(sums) + epsilon);
  for (Index i = 0; i < size; ++i) row[i] *= factor;  // and not the padding: a NaN there would stay for later tokens
}

void exponentiate_row(float* row, Index size) {
  for (Index i = 0; i < size; i += kLanes) vector_at(row + i) = exponential(vector_at(row + i));
}

}  // namespace delta_attention::DELTA_ATTENTION_ISA
