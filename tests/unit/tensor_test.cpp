// Tensor views, presets and the errors' text: the parts of the public headers that hold logic.

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <type_traits>

#include "delta_attention/delta_attention.h"

namespace delta_attention {
namespace {

TEST(TensorView, ContiguousViewsAreRowMajor) {
  float data[24];
  const Tensor x = tensor(data, {2, 3, 4});
  EXPECT_EQ(x.rank, 3);
  EXPECT_EQ(x.dtype, DType::f32);
  EXPECT_EQ(x.strides[0], 12);
  EXPECT_EQ(x.strides[1], 4);
  EXPECT_EQ(x.strides[2], 1);
  EXPECT_EQ(x.device, cpu());
  EXPECT_TRUE(x.present());
}

TEST(TensorView, DtypeFollowsThePointer) {
  double f64 = 0;
  std::int32_t i32 = 0;
  const std::int64_t i64 = 0;
  EXPECT_EQ(tensor(&f64, {1}).dtype, DType::f64);
  EXPECT_EQ(tensor(&i32, {1}).dtype, DType::i32);
  EXPECT_EQ(tensor(&i64, {1}).dtype, DType::i64);
  EXPECT_EQ(tensor(static_cast<void*>(&f64), DType::bf16, {1}).dtype, DType::bf16);
}

TEST(TensorView, S06_SizesAreCountedInElementsAndBytes) {
  EXPECT_EQ(Tensor().elements(), 0);
  EXPECT_FALSE(Tensor().present());
  EXPECT_EQ(tensor(static_cast<float*>(nullptr), {3, 0, 5}).elements(), 0);
  EXPECT_TRUE(tensor(static_cast<float*>(nullptr), {3, 0, 5}).present());
  EXPECT_EQ(tensor(static_cast<float*>(nullptr), {1 << 16, 1 << 16, 2}).elements(), std::int64_t{1} << 33);
  const std::pair<DType, std::size_t> sizes[] = {{DType::f32, 4}, {DType::f16, 2}, {DType::bf16, 2},
                                                 {DType::f64, 8}, {DType::i32, 4}, {DType::i64, 8}};
  for (const auto& [dtype, size] : sizes) EXPECT_EQ(size_of(dtype), size) << name(dtype);
}

TEST(TensorView, PermutedReadsTheSameMemoryInAnotherOrder) {
  float data[2 * 3 * 4 * 5];
  for (int i = 0; i < 120; ++i) data[i] = static_cast<float>(i);
  const Tensor bhtd = tensor(data, {2, 3, 4, 5});
  const Tensor bthd = bhtd.permuted({0, 2, 1, 3});
  EXPECT_EQ(bthd.shape[1], 4);
  EXPECT_EQ(bthd.shape[2], 3);
  const auto at = [](const Tensor& x, int i, int j, int k, int l) {
    return static_cast<const float*>(x.data)[i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3]];
  };
  for (int t = 0; t < 4; ++t) {
    for (int h = 0; h < 3; ++h) EXPECT_EQ(at(bthd, 1, t, h, 2), at(bhtd, 1, h, t, 2));
  }
}

TEST(TensorView, StridedViewsKeepTheirStrides) {
  const float gamma[3] = {};
  const ConstTensor x = strided_tensor(gamma, DType::f32, {2, 7, 3}, {0, 0, 1});
  EXPECT_EQ(x.strides[0], 0);
  EXPECT_EQ(x.strides[2], 1);
  EXPECT_EQ(x.elements(), 42);
}

TEST(TensorView, A04_ForwardTakesOneStructOfNamedFields) {
  static_assert(std::is_invocable_v<decltype(&delta_attention_forward), const ForwardArgs&, const Execution&>);
  static_assert(std::is_convertible_v<Tensor, ConstTensor> && !std::is_convertible_v<ConstTensor, Tensor>,
                "outputs pass as inputs, never the reverse");
}

TEST(Presets, HaveDistinctNamesAndTheirOwnFormula) {
  std::set<std::string> names;
  for (const Preset& preset : kPresets) {
    EXPECT_TRUE(names.insert(preset.name).second) << preset.name;
    EXPECT_GT(std::strlen(preset.formula), 0u);
  }
  EXPECT_EQ(names.size(), 9u);
  EXPECT_TRUE(kda() == (Recurrence{Update::delta, Gate::channel, false}));
  EXPECT_TRUE(gated_delta_net() == (Recurrence{Update::delta, Gate::scalar, false}));
  EXPECT_TRUE(delta_net() == (Recurrence{Update::delta, Gate::none, false}));
  EXPECT_TRUE(gla() == (Recurrence{Update::additive, Gate::channel, false}));
  EXPECT_TRUE(normalized_linear() == (Recurrence{Update::additive, Gate::none, true}));
  EXPECT_TRUE(linear() == Recurrence{});
  for (Recurrence scalar : {retention(), lightning(), mamba2()}) {
    EXPECT_TRUE(scalar == (Recurrence{Update::additive, Gate::scalar, false}));
  }
}

TEST(Errors, SayArgumentExpectedAndGot) {
  const InvalidArgument error("beta", "shape [1]", "[2]");
  EXPECT_STREQ(error.what(), "beta: expected shape [1], got [2]");
  EXPECT_EQ(error.argument(), "beta");
  EXPECT_TRUE((std::is_base_of_v<Unsupported, NoDevice>));
  EXPECT_TRUE((std::is_base_of_v<Error, CudaError> && std::is_base_of_v<Error, OutOfMemory>));
}

}  // namespace
}  // namespace delta_attention
