// What a kernel makes of the device it is told of: tiles follow the limits, results do not.

#include <cuda_runtime_api.h>

#include "api/check.h"
#include "api/device.h"
#include "api/kernel.h"
#include "support/kernel_test.h"

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
    kernel().launch({problem, call.args, properties, workspace.data(), nullptr, 1});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(workspace.guards_intact());
    return call.outputs();
  }

  std::string refusal(const Inputs& inputs, const DeviceProperties& properties) {
    Call call(inputs, device());
    return kernel().unsupported(check(call.args), properties, {});
  }

  Case recurrence_case(Recurrence recurrence, Index key_dim, Index value_dim) const {
    Case c;
    c.recurrence = recurrence;
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
  for (Index key_dim : {64, 128, 256}) {
    const Inputs inputs = make_inputs(recurrence_case(kda(), key_dim, 40), random);
    DeviceProperties properties = device_properties(device());
    ASSERT_EQ(refusal(inputs, properties), "");
    const Outputs expected = run_as(inputs, properties);
    expect_matches(inputs, expected, oracle(inputs));
    for (std::size_t kilobytes : {99, 64, 48, 16, 4}) {
      properties.shared_memory = kilobytes * 1024;
      const std::string reason = refusal(inputs, properties);
      if (reason.empty()) {
        EXPECT_TRUE(run_as(inputs, properties) == expected) << "K=" << key_dim << ", " << kilobytes << " KB";
      } else {
        EXPECT_NE(reason.find(std::to_string(properties.shared_memory)), std::string::npos) << reason;
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
      EXPECT_TRUE(run_as(inputs, properties) == wide) << "V=" << value_dim;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, DeviceLimits, ::testing::ValuesIn(cuda_kernels()), kernel_test_name);

}  // namespace
}  // namespace delta_attention::test
