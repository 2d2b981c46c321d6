#include "support/kernel_test.h"

#include "api/kernel.h"

namespace delta_attention::test {

std::vector<KernelInfo> all_kernels() {
  std::vector<KernelInfo> list;
  for (const Kernel* kernel : kernels()) {
    list.push_back({kernel->name, Device{kernel->device, 0}, kernel->repeatable, kernel->product_bits});
  }
  return list;
}

std::vector<KernelInfo> cuda_kernels() {
  std::vector<KernelInfo> list;
  for (const KernelInfo& kernel : all_kernels()) {
    if (kernel.device.type == DeviceType::cuda) list.push_back(kernel);
  }
  return list;
}

std::string kernel_test_name(const ::testing::TestParamInfo<KernelInfo>& info) { return info.param.name; }
std::ostream& operator<<(std::ostream& stream, const KernelInfo& kernel) { return stream << kernel.name; }

void KernelTest::SetUp() {
  const ::testing::TestInfo& test = *::testing::UnitTest::GetInstance()->current_test_info();
  random = random_for(std::string(test.test_suite_name()) + "." + test.name());
  if (GetParam().device.type == DeviceType::cuda) {
    const std::string reason = cuda_skip_reason();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
}

void KernelTest::TearDown() {
  if (ran_ == 0 && refused_ > 0 && !HasFailure()) {
    GTEST_SKIP() << GetParam().name << " runs none of these " << refused_ << " problems: " << first_refusal_;
  }
}

Execution KernelTest::execution() const {
  Execution execution;
  execution.kernel = GetParam().name;
  execution.threads = 2;
  return execution;
}

bool KernelTest::run(Call& call, const Execution& execution) {
  try {
    call.run(execution);
  } catch (const Unsupported& refusal) {
    EXPECT_TRUE(call.outputs_untouched()) << "a call that was refused has written";
    if (refused_++ == 0) first_refusal_ = refusal.what();
    return false;
  }
  ++ran_;
  return true;
}

bool KernelTest::run(Call& call) { return run(call, execution()); }

std::optional<Outputs> KernelTest::run(const Inputs& inputs) {
  return run(inputs, CallOptions{placements_of(inputs.problem)});
}

std::optional<Outputs> KernelTest::run(const Inputs& inputs, const CallOptions& options) {
  Call call(inputs, device(), options);
  if (!run(call)) return std::nullopt;
  return call.outputs();
}

void KernelTest::expect_matches_oracle(const Inputs& inputs) {
  expect_matches_oracle(inputs, CallOptions{placements_of(inputs.problem)});
}

void KernelTest::expect_matches_oracle(const Inputs& inputs, const CallOptions& options) {
  const std::optional<Outputs> got = run(inputs, options);
  if (got) expect_matches(inputs, *got, oracle(inputs));
}

void KernelTest::expect_matches(const Inputs& inputs, const Outputs& got, const Truth& truth) const {
  test::expect_matches(inputs, got, truth, GetParam().bits_of_products(inputs.problem.dtype));
}

}  // namespace delta_attention::test
