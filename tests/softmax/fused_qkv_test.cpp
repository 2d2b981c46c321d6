// The fused projection against sums in float64.

#include "delta_attention/fused_qkv.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include "support/run.h"

namespace delta_attention::test {
namespace {

struct Sizes {
  Index batch, tokens, channels, heads, key_heads, size;
  Index columns() const { return (heads + 2 * key_heads) * size; }
};

struct ProjectionInputs {
  Sizes sizes;
  Array x, w, bias;
  Placement of_x, of_outputs;
};

class FusedQkv : public ::testing::TestWithParam<DeviceType> {
 protected:
  Device device{GetParam(), 0};
  Random random = random_for("FusedQkv");

  void SetUp() override {
    if (device.type != DeviceType::cuda) return;
    const std::string reason = cuda_skip_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  ProjectionInputs inputs_of(DType dtype, const Sizes& s, bool with_bias) {
    ProjectionInputs inputs = {s, Array(dtype, {s.batch, s.tokens, s.channels}), Array(dtype, {s.channels, s.columns()}), {}, {}, {}};
    if (with_bias) inputs.bias = Array(dtype, {s.columns()});
    std::normal_distribution<float> normal;
    for (Array* array : {&inputs.x, &inputs.w, &inputs.bias}) {
      for (float& x : array->values) x = rounded(normal(random), dtype);
    }
    return inputs;
  }

  /// Runs. "", or that this machine has no cuBLASLt.
  std::string refusal_of(const FusedQkvArgs& args, const Execution& execution = {}) {
    try {
      fused_qkv_forward(args, execution);
    } catch (const Unsupported& refusal) {
      const std::string why = refusal.what();
      EXPECT_TRUE(device.type == DeviceType::cuda && why.find("cublasLt") != std::string::npos) << why;
      return why;
    }
    device_synchronize(device);
    return "";
  }

  /// The unit roundoff of a dtype.
  static double roundoff(DType dtype) { return dtype == DType::f32 ? 0x1p-24 : dtype == DType::f16 ? 0x1p-11 : 0x1p-8; }

  /// Each element of `got`, the columns from `first_column` on, is a sum of C products and a bias in f32, C + 1 roundings of 2^-24 of the
  /// terms' sizes at most, rounded once.
  void expect_columns(const ProjectionInputs& inputs, const Array& got, Index first_column) {
    const Sizes& s = inputs.sizes;
    for (Index i = 0; i < static_cast<Index>(got.values.size()); ++i) {
      const Index columns = got.shape[2] * s.size, row = i / columns, column = first_column + i % columns;
      double truth = inputs.bias.present() ? inputs.bias.get({column}) : 0.0, size = std::fabs(truth);
      for (Index c = 0; c < s.channels; ++c) {
        const double product = static_cast<double>(inputs.x.get({row / s.tokens, row % s.tokens, c})) * inputs.w.get({c, column});
        truth += product;
        size += std::fabs(product);
      }
      const double sums = static_cast<double>(s.channels + 1) * 0x1p-24 * size;
      ASSERT_NEAR(got.values[static_cast<std::size_t>(i)], truth, sums + roundoff(inputs.x.dtype) * (std::fabs(truth) + sums))
          << "row " << row << ", column " << column;
    }
  }

  void expect_matches_oracle(const ProjectionInputs& inputs) {
    const Sizes& s = inputs.sizes;
    Stored x(inputs.x, inputs.of_x, device, kNanByte), w(inputs.w, {}, device, kNanByte);
    x.put(inputs.x);
    w.put(inputs.w);
    std::unique_ptr<Stored> bias;
    FusedQkvArgs args;
    if (inputs.bias.present()) {
      bias = std::make_unique<Stored>(inputs.bias, Placement{{}, {}, inputs.of_x.offset}, device, kNanByte);
      bias->put(inputs.bias);
      args.bias = bias->view();
    }
    Stored q(Array(inputs.x.dtype, {s.batch, s.tokens, s.heads, s.size}), inputs.of_outputs, device, kNanByte);
    const Array like(inputs.x.dtype, {s.batch, s.tokens, s.key_heads, s.size});
    Stored k(like, inputs.of_outputs, device, kNanByte), v(like, inputs.of_outputs, device, kNanByte);
    for (Stored* output : {&q, &k, &v}) output->poison();
    args.x = x.view();
    args.w = w.view();
    args.q = q.writable();
    args.k = k.writable();
    args.v = v.writable();
    if (const std::string why = refusal_of(args); !why.empty()) GTEST_SKIP() << why;
    expect_columns(inputs, q.get(), 0);
    expect_columns(inputs, k.get(), s.heads * s.size);
    expect_columns(inputs, v.get(), (s.heads + s.key_heads) * s.size);
    for (const Stored* output : {&q, &k, &v}) EXPECT_TRUE(output->gaps_intact());
    EXPECT_TRUE(x.unchanged() && w.unchanged());
  }
};

TEST_P(FusedQkv, EveryDTypeWithAndWithoutBias) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    expect_matches_oracle(inputs_of(dtype, {2, 70, 96, 4, 2, 32}, true));
    expect_matches_oracle(inputs_of(dtype, {1, 1, 64, 2, 2, 16}, false));
  }
}

TEST_P(FusedQkv, OutputsWhereAttentionWantsThem) {
  ProjectionInputs inputs = inputs_of(DType::bf16, {2, 33, 40, 4, 1, 24}, true);
  inputs.of_outputs.order = {0, 2, 1, 3};
  expect_matches_oracle(inputs);
  inputs.of_outputs = {{}, {8, 4, 4, 0}, 4};
  expect_matches_oracle(inputs);
}

TEST_P(FusedQkv, RowsWithGapsAndOddSizes) {
  ProjectionInputs inputs = inputs_of(DType::f32, {3, 5, 37, 3, 1, 7}, true);
  inputs.of_x = {{}, {8, 4, 0}, 1};
  expect_matches_oracle(inputs);
}

TEST_P(FusedQkv, SlicesOfOneBuffer) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const ProjectionInputs inputs = inputs_of(dtype, {2, 20, 64, 4, 2, 16}, true);
    const Sizes& s = inputs.sizes;
    Stored x(inputs.x, {}, device, kNanByte), w(inputs.w, {}, device, kNanByte), bias(inputs.bias, {}, device, kNanByte);
    x.put(inputs.x);
    w.put(inputs.w);
    bias.put(inputs.bias);
    // A head more than there are, so that rows have a gap.
    const Index heads = s.heads + 2 * s.key_heads;
    Stored all(Array(dtype, {s.batch, s.tokens, heads, s.size}), {{}, {0, 16, 0, 0}, 0}, device, kNanByte);
    all.poison();
    const auto slice = [&](Index first, Index count) {
      Tensor part = all.writable();
      part.data = static_cast<char*>(part.data) + static_cast<std::size_t>(first * s.size) * size_of(dtype);
      part.shape[2] = count;
      return part;
    };
    FusedQkvArgs args;
    args.x = x.view();
    args.w = w.view();
    args.bias = bias.view();
    args.q = slice(0, s.heads);
    args.k = slice(s.heads, s.key_heads);
    args.v = slice(s.heads + s.key_heads, s.key_heads);
    Execution execution;
    try {
      execution.workspace_bytes = fused_qkv_workspace(args);
    } catch (const Unsupported&) {
    }
    const GuardedBuffer workspace(device, execution.workspace_bytes);
    execution.workspace = workspace.data();
    if (const std::string why = refusal_of(args, execution); !why.empty()) GTEST_SKIP() << why;
    expect_columns(inputs, all.get(), 0);
    EXPECT_TRUE(all.gaps_intact());
    EXPECT_TRUE(workspace.guards_intact());
  }
}

std::string device_name(const ::testing::TestParamInfo<DeviceType>& info) { return info.param == DeviceType::cpu ? "cpu" : "cuda"; }
#if defined(DELTA_ATTENTION_WITH_CUDA)
INSTANTIATE_TEST_SUITE_P(Qkv, FusedQkv, ::testing::Values(DeviceType::cpu, DeviceType::cuda), device_name);
#else
INSTANTIATE_TEST_SUITE_P(Qkv, FusedQkv, ::testing::Values(DeviceType::cpu), device_name);
#endif

TEST(FusedQkvCheck, NamesWhatIsWrong) {
  const std::vector<float> input(256, 1.0f);
  std::vector<float> q(64), k(64), v(64);
  FusedQkvArgs good;
  good.x = tensor(input.data(), {1, 2, 3});
  good.w = tensor(input.data(), {3, 16});
  good.q = tensor(q.data(), {1, 2, 2, 4});
  good.k = tensor(k.data(), {1, 2, 1, 4});
  good.v = tensor(v.data(), {1, 2, 1, 4});
  const auto argument_of = [&](const std::function<void(FusedQkvArgs&)>& spoil) {
    FusedQkvArgs args = good;
    spoil(args);
    try {
      fused_qkv_forward(args);
    } catch (const InvalidArgument& error) {
      return error.argument();
    }
    return std::string("none");
  };
  EXPECT_EQ(argument_of([](FusedQkvArgs&) {}), "none");
  EXPECT_EQ(argument_of([](FusedQkvArgs& a) { a.x = {}; }), "x");
  EXPECT_EQ(argument_of([](FusedQkvArgs& a) { a.w.shape[1] = 15; }), "w");
  EXPECT_EQ(argument_of([](FusedQkvArgs& a) { a.k.dtype = DType::f16; }), "k");
  EXPECT_EQ(argument_of([](FusedQkvArgs& a) { a.v.shape[3] = 3; }), "v");
  EXPECT_EQ(argument_of([](FusedQkvArgs& a) { a.k.data = a.v.data; }), "k");
  EXPECT_EQ(argument_of([&](FusedQkvArgs& a) { a.bias = tensor(input.data(), {3}); }), "bias");
}

}  // namespace
}  // namespace delta_attention::test
