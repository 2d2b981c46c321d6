// Absorbed MLA against the float64 oracle that builds every head's keys.

#include "support/mla.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace delta_attention::test {
namespace {

class MlaDecode : public ::testing::TestWithParam<DeviceType> {
 protected:
  Device device{GetParam(), 0};
  Random random = random_for("MlaDecode");

  void SetUp() override {
    if (device.type != DeviceType::cuda) return;
    const std::string reason = cuda_skip_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }

  SoftmaxOutputs run(const MlaInputs& inputs) {
    MlaCall call(inputs, device);
    mla_decode_forward(call.args);
    device_synchronize(device);
    EXPECT_TRUE(call.rest_untouched());
    return call.outputs();
  }

  void expect_matches_oracle(const MlaInputs& inputs) { expect_mla_matches(inputs, run(inputs)); }
};

TEST_P(MlaDecode, EveryDType) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    expect_matches_oracle(random_mla_inputs(random, dtype, {2, 1, 150, 16, 24, 16, 64}));
  }
}

TEST_P(MlaDecode, SizesThatFillNothing) {
  const MlaSizes all[] = {{1, 1, 1, 1, 1, 0, 1}, {1, 1, 17, 3, 5, 1, 7}, {2, 3, 33, 5, 3, 9, 130}, {1, 2, 65, 17, 8, 3, 300}};
  for (const MlaSizes& sizes : all) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      MlaInputs inputs = random_mla_inputs(random, dtype, sizes);
      inputs.causal = true;
      inputs.placement = {{}, {8, 4, 4, 0}, 4};
      inputs.scale = 0.3f;
      expect_matches_oracle(inputs);
    }
  }
}

TEST_P(MlaDecode, AModelsSizes) { expect_matches_oracle(random_mla_inputs(random, DType::bf16, {1, 1, 70, 16, 128, 64, 512})); }

TEST_P(MlaDecode, LengthsAndRowsThatSeeNothing) {
  MlaInputs inputs = random_mla_inputs(random, DType::f32, {4, 3, 700, 4, 8, 4, 32});
  inputs.valid_len = {700, 0, 2, 65};
  inputs.causal = true;
  const SoftmaxOutputs got = run(inputs);
  expect_mla_matches(inputs, got);
  EXPECT_EQ(got.lse.get({2, 0, 0}), -std::numeric_limits<float>::infinity());
  EXPECT_EQ(got.out.get({2, 0, 0, 0}), 0.0f);
}

TEST_P(MlaDecode, ByHand) {
  // W = (1 2), so q_nope = 1 reads the latent row (a, b) as a + 2 b; q_rope = 1 adds the rope channel. Scores 0 and log 3.
  MlaInputs inputs = random_mla_inputs(random, DType::f32, {1, 1, 2, 1, 1, 1, 2});
  inputs.q_nope.values = inputs.q_rope.values = {1.0f};
  inputs.w_uk.values = {1.0f, 2.0f};
  inputs.cache.values = {0.0f, 1.0f, -2.0f, 4.0f, -1.0f, std::log(3.0f) - 2.0f};
  inputs.scale = 1.0f;
  const SoftmaxOutputs got = run(inputs);
  EXPECT_NEAR(got.out.values[0], 3.0, 1e-5);
  EXPECT_NEAR(got.out.values[1], -0.5, 1e-5);
  EXPECT_NEAR(got.lse.values[0], std::log(4.0), 1e-5);
}

TEST_P(MlaDecode, MemoryOfTheCaller) {
  const MlaInputs inputs = random_mla_inputs(random, DType::bf16, {2, 1, 500, 16, 24, 16, 64});
  const SoftmaxOutputs own = run(inputs);
  MlaCall call(inputs, device);
  Execution execution;
  execution.workspace_bytes = mla_decode_workspace(call.args);
  const GuardedBuffer workspace(device, execution.workspace_bytes);
  execution.workspace = workspace.data();
  mla_decode_forward(call.args, execution);
  device_synchronize(device);
  EXPECT_TRUE(workspace.guards_intact());
  EXPECT_EQ(call.outputs().out.values, own.out.values);
}

std::string device_name(const ::testing::TestParamInfo<DeviceType>& info) { return info.param == DeviceType::cpu ? "cpu" : "cuda"; }
#if defined(DELTA_ATTENTION_WITH_CUDA)
INSTANTIATE_TEST_SUITE_P(Mla, MlaDecode, ::testing::Values(DeviceType::cpu, DeviceType::cuda), device_name);
#else
INSTANTIATE_TEST_SUITE_P(Mla, MlaDecode, ::testing::Values(DeviceType::cpu), device_name);
#endif

TEST(MlaCheck, NamesWhatIsWrong) {
  Random random = random_for("MlaCheck");
  const MlaInputs inputs = random_mla_inputs(random, DType::f32, {2, 1, 5, 2, 3, 2, 4});
  const auto argument_of = [&](const std::function<void(MlaArgs&)>& spoil) {
    MlaCall call(inputs, Device{});
    spoil(call.args);
    try {
      mla_decode_forward(call.args);
    } catch (const InvalidArgument& error) {
      return error.argument();
    }
    return std::string("none");
  };
  EXPECT_EQ(argument_of([](MlaArgs&) {}), "none");
  EXPECT_EQ(argument_of([](MlaArgs& a) { a.q_nope = {}; }), "q_nope");
  EXPECT_EQ(argument_of([](MlaArgs& a) { a.q_rope.shape[3] = 1; }), "cache");
  EXPECT_EQ(argument_of([](MlaArgs& a) { a.w_uk.shape[0] = 1; }), "w_uk");
  EXPECT_EQ(argument_of([](MlaArgs& a) { a.cache.dtype = DType::i32; }), "cache");
  EXPECT_EQ(argument_of([](MlaArgs& a) { a.out.shape[3] = 3; }), "out");
  EXPECT_EQ(argument_of([](MlaArgs& a) { a.scale = std::numeric_limits<float>::infinity(); }), "scale");
  const std::int64_t lengths[2] = {5, 6};
  EXPECT_EQ(argument_of([&](MlaArgs& a) { a.valid_len = tensor(lengths, {2}); }), "valid_len");
}

TEST(MlaCheck, NamesTheKernelThatItHas) {
  Random random = random_for("MlaCheck");
  MlaCall call(random_mla_inputs(random, DType::f32, {2, 1, 5, 2, 3, 2, 4}), Device{});
  Execution execution;
  execution.kernel = "mla_cpu";
  mla_decode_forward(call.args, execution);
  execution.kernel = "other";
  EXPECT_THROW(mla_decode_forward(call.args, execution), Unsupported);
}

}  // namespace
}  // namespace delta_attention::test
