#include "tensor_values.h"

#include <cmath>
#include <cstring>

namespace delta_attention::cli {
namespace {

template <class Element>
Element element(const void* data, std::int64_t offset) {
  return static_cast<const Element*>(data)[offset];
}

double value_of_f16(std::uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  if (exponent == 31) return sign * (fraction != 0 ? std::nan("") : INFINITY);
  if (exponent == 0) return sign * std::ldexp(fraction, -24);
  return sign * std::ldexp(1024 + fraction, exponent - 25);
}

double value_of_bf16(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0.0f;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

}  // namespace

double value_at(const void* data, DType dtype, std::int64_t offset) {
  switch (dtype) {
    case DType::f64: return element<double>(data, offset);
    case DType::f16: return value_of_f16(element<std::uint16_t>(data, offset));
    case DType::bf16: return value_of_bf16(element<std::uint16_t>(data, offset));
    case DType::i32: return element<std::int32_t>(data, offset);
    case DType::i64: return static_cast<double>(element<std::int64_t>(data, offset));
    case DType::f32: break;
  }
  return element<float>(data, offset);
}

std::vector<double> values_of(const ConstTensor& contiguous) {
  std::vector<double> values(static_cast<std::size_t>(contiguous.elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = value_at(contiguous.data, contiguous.dtype, static_cast<std::int64_t>(i));
  }
  return values;
}

OwnedTensor converted(const ConstTensor& contiguous, DType dtype) {
  OwnedTensor result = zeros(contiguous, dtype, cpu());
  for (std::int64_t i = 0; i < contiguous.elements(); ++i) {
    const double value = value_at(contiguous.data, contiguous.dtype, i);
    if (dtype == DType::f64) {
      static_cast<double*>(result.view.data)[i] = value;
    } else {
      static_cast<float*>(result.view.data)[i] = static_cast<float>(value);
    }
  }
  return result;
}

}  // namespace delta_attention::cli
