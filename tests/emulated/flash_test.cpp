// The kernel flash_tc's device code on host threads, tensor cores included: its numbers against the oracle without a GPU, and, built with
// ThreadSanitizer, every access that no barrier orders. Blocks share nothing and run one after another.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "api/check_softmax.h"
#include "cuda/softmax/flash_tc_stages.cuh"
#include "support/softmax.h"

namespace delta_attention::test {
namespace {

constexpr std::size_t kAlignment = 256;  // of shared memory

/// As many blocks run side by side as the problem has, or fewer, so that both orders of blocks come up.
template <class P>
void attend_with_tensor_cores(const SoftmaxProblem& problem, std::int64_t side_by_side) {
  const flash::Params params = {problem, WorkOrder(problem, flash::kRows), side_by_side};
  for (int block = 0; block < params.order.blocks(); ++block) {
    std::vector<char> memory(P::kBytes + kAlignment, static_cast<char>(0xff));
    char* start = memory.data() + (kAlignment - reinterpret_cast<std::uintptr_t>(memory.data()) % kAlignment) % kAlignment;
    run_block(flash::kThreads, [&] {
      this_gpu_thread.shared_memory = start;
      flash::attend_block<P>(params, block, reinterpret_cast<uint4*>(start));
    });
  }
}

template <class P>
class EmulatedFlash : public ::testing::Test {
 protected:
  Random random = random_for("EmulatedFlash");
  static constexpr DType kDType = std::is_same_v<typename P::Element, Half> ? DType::f16 : DType::bf16;

  SoftmaxInputs inputs_of(Index batch, Index queries, Index keys, Index heads) {
    return random_inputs(random, kDType, batch, queries, keys, heads, 1, P::kDim);
  }
  void expect_matches_oracle(const SoftmaxInputs& inputs, std::int64_t side_by_side = 1) {
    SoftmaxCall call(inputs, Device{});
    attend_with_tensor_cores<P>(check(call.args), side_by_side);
    EXPECT_TRUE(call.rest_untouched());
    expect_matches(inputs, call.outputs(), softmax_oracle(inputs), true);
  }
};

using Policies = ::testing::Types<flash::Policy<BFloat16, 64, false, 2>, flash::Policy<Half, 128, false, 1>>;
TYPED_TEST_SUITE(EmulatedFlash, Policies);

TYPED_TEST(EmulatedFlash, TwoBlocksOfRowsThatSeeEveryKey) { this->expect_matches_oracle(this->inputs_of(1, 131, 131, 1)); }

TYPED_TEST(EmulatedFlash, CausalWithLengths) {
  SoftmaxInputs inputs = this->inputs_of(2, 70, 150, 2);
  inputs.causal = true;
  inputs.valid_len = {149, 0};
  this->expect_matches_oracle(inputs, 4);
}

TYPED_TEST(EmulatedFlash, WindowsInPackedSequences) {
  SoftmaxInputs inputs = this->inputs_of(1, 90, 140, 1);
  inputs.cu_seqlens_q = {0, 20, 20, 90};
  inputs.cu_seqlens_kv = {0, 30, 30, 140};
  inputs.causal = true;
  inputs.window_left = 40;
  this->expect_matches_oracle(inputs);
}

// Scores that grow from tile to tile: the maxima that weights are relative to have to move.
TYPED_TEST(EmulatedFlash, MaximaThatMove) {
  SoftmaxInputs inputs = this->inputs_of(1, 5, 200, 1);
  inputs.scale = 1.0f;
  for (Index i = 0; i < 5; ++i) inputs.q.set({0, i, 0, 0}, 1.0f);
  for (Index j = 0; j < 200; ++j) inputs.k.set({0, j, 0, 0}, static_cast<float>(j / 8));
  this->expect_matches_oracle(inputs);
}

using EmulatedFlashInNats = EmulatedFlash<flash::Policy<BFloat16, 64, true, 2>>;
TEST_F(EmulatedFlashInNats, SoftcapAndANegativeScale) {
  SoftmaxInputs inputs = inputs_of(1, 5, 70, 1);
  inputs.softcap = 2.0f;
  expect_matches_oracle(inputs);
  inputs.softcap = 0.0f;
  inputs.scale = -0.1f;
  expect_matches_oracle(inputs);
}

}  // namespace
}  // namespace delta_attention::test
