// What a kernel makes of the device it is told of: tiles follow the limits, results do not.

#include <cuda_runtime_api.h>

#include "api/check.h"
#include "api/device.h"
#include "api/kernel.h"
#include "support/kernel_test.h"
#include "support/settings.h"

namespace delta_attention::test {
namespace {

class DeviceLimits : public KernelTest {
 protected:
  const Kernel& kernel() const {
    for (const Kernel* candidate : kernels()) {
      if (candidate->name == GetParam().name) return *candidate;
    }
    throw std::logic_error("a kernel that is in no table");
  }

  /// What the kernel computes when it takes this GPU for one with `properties`.
  Outputs run_as(const Inputs& inputs, const DeviceProperties& properties) {
    Call call(inputs, device());
    const Problem problem = check(call.args);
    const GuardedBuffer workspace(device(), kernel().workspace(problem, properties, {}));
    kernel().launch({problem, call.args, properties, workspace.data(), nullptr, 1, {}});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(workspace.guards_intact());
    return call.outputs();
  }

  std::string refusal(const Inputs& inputs, const DeviceProperties& properties) {
    Call call(inputs, device());
    return kernel().unsupported(check(call.args), properties, {});
  }

  /// Results on two devices: the same bits, or for kernels that split sums to fit the device, the same up to rounding.
  void expect_same(const Inputs& inputs, const Truth& truth, const Outputs& got, const Outputs& expected) {
    if (splits_sums(kernel().settings())) {
      expect_matches(inputs, got, truth);
    } else {
      EXPECT_TRUE(got == expected);
    }
  }

  Case recurrence_case(Recurrence recurrence, Index key_dim, Index value_dim, DType dtype = DType::f32) const {
    Case c;
    c.recurrence = recurrence;
    c.dtype = dtype;
    c.tokens = 150;
    c.heads = 1;
    c.value_heads = 2;
    c.key_dim = key_dim;
    c.value_dim = value_dim;
    c.with_initial_state = true;
    return c;
  }
};

TEST_P(DeviceLimits, I07_LittleSharedMemoryGivesTheSameResultOrAReason) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (Index key_dim : {64, 128, 256}) {
      const Inputs inputs = make_inputs(recurrence_case(kda(), key_dim, 40, dtype), random);
      DeviceProperties properties = device_properties(device());
      ASSERT_EQ(refusal(inputs, properties), "");
      const Truth truth = oracle(inputs);
      const Outputs expected = run_as(inputs, properties);
      expect_matches(inputs, expected, truth);
      for (std::size_t kilobytes : {99, 64, 48, 16, 4}) {
        SCOPED_TRACE(std::string(name(dtype)) + ", K=" + std::to_string(key_dim) + ", " + std::to_string(kilobytes) + " KB");
        properties.shared_memory = kilobytes * 1024;
        const std::string reason = refusal(inputs, properties);
        if (reason.empty()) {
          expect_same(inputs, truth, run_as(inputs, properties), expected);
        } else {
          EXPECT_NE(reason.find(std::to_string(properties.shared_memory)), std::string::npos) << reason;
        }
      }
    }
  }
}

TEST_P(DeviceLimits, I08_SlicesOfVGiveTheSameResult) {
  for (Recurrence recurrence : {gated_delta_net(), gla()}) {
    for (Index value_dim : {64, 128, 192, 320}) {
      const Inputs inputs = make_inputs(recurrence_case(recurrence, 48, value_dim), random);
      const Truth truth = oracle(inputs);
      DeviceProperties properties = device_properties(device());
      properties.multiprocessors = 1;  // few: the widest slices
      const Outputs wide = run_as(inputs, properties);
      expect_matches(inputs, wide, truth);
      properties.multiprocessors = 100000;  // many: the narrowest
      SCOPED_TRACE("V=" + std::to_string(value_dim));
      expect_same(inputs, truth, run_as(inputs, properties), wide);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, DeviceLimits, ::testing::ValuesIn(cuda_kernels()), kernel_test_name);

}  // namespace
}  // namespace delta_attention::test
