#pragma once

// The base of the suites that run on every kernel of this build. A suite joins with EVERY_KERNEL(Suite); a kernel joins by being
// in the library's table, nothing else.

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "support/run.h"

namespace delta_attention::test {

struct KernelInfo {
  std::string name;
  Device device;
  bool repeatable = true;
  int (*product_bits)(DType) = nullptr;  // Kernel says what it means

  int bits_of_products(DType dtype) const { return product_bits == nullptr ? kF32Bits : product_bits(dtype); }
};
std::vector<KernelInfo> all_kernels();
std::vector<KernelInfo> cuda_kernels();
std::string kernel_test_name(const ::testing::TestParamInfo<KernelInfo>& info);
std::ostream& operator<<(std::ostream& stream, const KernelInfo& kernel);

class KernelTest : public ::testing::TestWithParam<KernelInfo> {
 protected:
  /// Skips CUDA kernels where there is no GPU.
  void SetUp() override;
  /// A test whose every problem the kernel refused is skipped, with the kernel's reason.
  void TearDown() override;

  Device device() const { return GetParam().device; }
  Execution execution() const;

  /// Runs this kernel. Nothing if the kernel says that it cannot run the problem; then it must not have written anything.
  std::optional<Outputs> run(const Inputs& inputs);
  std::optional<Outputs> run(const Inputs& inputs, const CallOptions& options);
  /// The same on a prepared call.
  bool run(Call& call);
  bool run(Call& call, const Execution& execution);

  /// Runs and compares with the oracle.
  void expect_matches_oracle(const Inputs& inputs);
  void expect_matches_oracle(const Inputs& inputs, const CallOptions& options);
  /// Compares under the tolerances of this kernel.
  void expect_matches(const Inputs& inputs, const Outputs& got, const Truth& truth) const;

  int ran() const { return ran_; }
  int refused() const { return refused_; }
  Random random;

 private:
  int ran_ = 0, refused_ = 0;
  std::string first_refusal_;
};

}  // namespace delta_attention::test

#define EVERY_KERNEL(Suite)                                                                                 \
  INSTANTIATE_TEST_SUITE_P(EveryKernel, Suite, ::testing::ValuesIn(::delta_attention::test::all_kernels()), \
                           ::delta_attention::test::kernel_test_name)
