#include "tensor_values.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace delta_attention::cli {
namespace {

double f16(std::uint16_t bits) { return value_at(&bits, DType::f16, 0); }
double bf16(std::uint16_t bits) { return value_at(&bits, DType::bf16, 0); }

TEST(TensorValues, ReadF16) {
  EXPECT_EQ(f16(0x3c00), 1.0);
  EXPECT_EQ(f16(0xc000), -2.0);
  EXPECT_EQ(f16(0x3555), 0.333251953125);
  EXPECT_EQ(f16(0x7bff), 65504.0);
  EXPECT_EQ(f16(0x0400), std::ldexp(1.0, -14));  // the smallest normal number
  EXPECT_EQ(f16(0x0001), std::ldexp(1.0, -24));  // the smallest of all
  EXPECT_EQ(f16(0x03ff), std::ldexp(1023.0, -24));
  EXPECT_TRUE(std::signbit(f16(0x8000)));
  EXPECT_EQ(f16(0xfc00), -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(f16(0x7e00)));
}

TEST(TensorValues, ReadBf16) {
  EXPECT_EQ(bf16(0x3f80), 1.0);
  EXPECT_EQ(bf16(0xc049), -3.140625);
  EXPECT_EQ(bf16(0x0001), std::ldexp(1.0, -133));
  EXPECT_TRUE(std::isnan(bf16(0x7fc0)));
}

TEST(TensorValues, ConvertInOrder) {
  const std::uint16_t bits[] = {0x3c00, 0x4000, 0x4200, 0x4400};
  const ConstTensor x = tensor(static_cast<const void*>(bits), DType::f16, {2, 2});
  const std::vector<double> expected = {1.0, 2.0, 3.0, 4.0};
  EXPECT_EQ(values_of(x), expected);
  for (DType dtype : {DType::f32, DType::f64}) {
    const OwnedTensor converted_x = converted(x, dtype);
    EXPECT_EQ(converted_x.view.dtype, dtype);
    EXPECT_EQ(converted_x.view.shape[1], 2);
    EXPECT_EQ(values_of(converted_x.view), expected);
  }
}

}  // namespace
}  // namespace delta_attention::cli
