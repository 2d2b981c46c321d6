#pragma once

// Random operands made on the GPU, where the CPU would take longer than the benchmark, and rows of them read back. Numbers are
// counter-based: equal seeds and streams give equal numbers. Everything runs on the default stream and is done on return.

#include <cstdint>
#include <vector>

#include "delta_attention/tensor.h"

namespace bench {

/// Where random numbers come from; operands differ in `stream`.
struct RandomSource {
  std::uint64_t seed = 0, stream = 0;
};

/// `rows` rows of `dim` normal numbers, of unit length where asked.
void fill_normal(void* data, delta_attention::DType dtype, std::int64_t rows, std::int64_t dim, bool unit_length, RandomSource source);

/// Uniform in (low, high).
void fill_uniform(float* data, std::int64_t count, RandomSource source, float low = 0.0f, float high = 1.0f);

/// Logarithms of decays that forget within a few tokens, -exp(A) softplus(x + bias) as in inputs.h: [rows,per_head] with row r of head
/// r % heads.
void fill_strong_decays(float* data, std::int64_t rows, std::int64_t heads, std::int64_t per_head, RandomSource source);

/// The rows of `dim` elements that begin at these elements, one after another, as f32, which holds every storage type.
std::vector<float> read_rows(const void* data, delta_attention::DType dtype, const std::vector<std::int64_t>& begins, std::int64_t dim);

}  // namespace bench
