#pragma once

// Runs a softmax kernel through the public API, with every operand in guarded memory, and the float64 oracle on the same numbers.

#include <gtest/gtest.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "delta_attention/softmax_attention.h"
#include "support/run.h"

namespace delta_attention::test {

/// Numbers and options of one call. Arrays without a shape and empty lists are "none".
struct SoftmaxInputs {
  Array q, k, v, mask;
  std::vector<Index> valid_len, cu_seqlens_q, cu_seqlens_kv;
  std::vector<std::vector<Index>> block_table;
  bool causal = false;
  Alignment alignment = Alignment::bottom_right;
  Index window_left = -1;
  float softcap = 0.0f;
  std::optional<float> scale;
  Layout layout = Layout::bthd;

  std::string describe() const;
};

/// q = 0 and v_j = j in every channel: each output is the mean of the keys that its row sees.
SoftmaxInputs counting_inputs(Index batch, Index queries, Index keys, Index heads = 1, Index key_heads = 1, Index size = 4);

/// Normal q, k, v, rounded to the dtype.
SoftmaxInputs random_inputs(Random& random, DType dtype, Index batch, Index queries, Index keys, Index heads, Index key_heads,
                            Index size);

/// The same keys, cut into pages of `page_size` that lie in any order.
SoftmaxInputs paged(const SoftmaxInputs& inputs, Index page_size, Random& random);

struct SoftmaxOutputs {
  Array out, lse;
};

/// What the float64 oracle says, every number in float64.
struct SoftmaxTruth {
  std::vector<double> out, lse;
};
SoftmaxTruth softmax_oracle(const SoftmaxInputs& inputs);

/// Compares with the oracle under tolerances that softmax.cpp derives; adds test failures.
/// `rounds_weights`: as the kernel says of itself.
void expect_matches(const SoftmaxInputs& inputs, const SoftmaxOutputs& got, const SoftmaxTruth& truth, bool rounds_weights = false);

/// Integers as i32 in guarded memory.
class StoredIntegers {
 public:
  StoredIntegers(const std::vector<Index>& values, std::initializer_list<Index> shape, Device device);
  ConstTensor view() const { return view_; }
  bool unchanged() const { return buffer_.unchanged(); }

 private:
  GuardedBuffer buffer_;
  ConstTensor view_;
};

/// Arguments whose memory this object owns. Outputs start as NaN.
class SoftmaxCall {
 public:
  SoftmaxCall(const SoftmaxInputs& inputs, Device device);

  SoftmaxArgs args;

  SoftmaxOutputs outputs() const { return {out_->get(), lse_->get()}; }
  bool outputs_untouched() const { return out_->unchanged() && lse_->unchanged(); }
  /// Inputs and the memory around every operand are as they were.
  bool rest_untouched() const;

 private:
  std::vector<std::unique_ptr<Stored>> stored_;
  std::vector<std::unique_ptr<StoredIntegers>> integers_;
  std::unique_ptr<Stored> out_, lse_;
};

struct SoftmaxKernelInfo {
  std::string name;
  Device device;
  bool rounds_weights = false;
};
std::vector<SoftmaxKernelInfo> all_softmax_kernels();
std::string softmax_kernel_test_name(const ::testing::TestParamInfo<SoftmaxKernelInfo>& info);
std::ostream& operator<<(std::ostream& stream, const SoftmaxKernelInfo& kernel);

/// The base of the suites that run on every softmax kernel; a kernel joins by being in the library's table.
class SoftmaxTest : public ::testing::TestWithParam<SoftmaxKernelInfo> {
 protected:
  void SetUp() override;
  /// Runs this kernel and checks guards, gaps and that inputs are as they were. Nothing if it says that it cannot; then it must not have
  /// written anything.
  std::optional<SoftmaxOutputs> run(const SoftmaxInputs& inputs);
  /// Channel 0 of every row of batch 0 and head 0, for counting_inputs.
  void expect_rows(const SoftmaxInputs& inputs, const std::vector<double>& expected);
  void expect_matches_oracle(const SoftmaxInputs& inputs);
  Random random;
};

}  // namespace delta_attention::test

#define EVERY_SOFTMAX_KERNEL(Suite)                                                                                        \
  INSTANTIATE_TEST_SUITE_P(EverySoftmaxKernel, Suite,                                                                      \
                           ::testing::ValuesIn(::delta_attention::test::all_softmax_kernels()),                            \
                           ::delta_attention::test::softmax_kernel_test_name)
