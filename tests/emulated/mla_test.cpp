// Absorbed MLA's device code on host threads: its numbers against the oracle that does not absorb, and, built with ThreadSanitizer, every
// access that no barrier orders. Blocks run one after another: they share nothing but what the merging launch reads.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "api/mla_kernel.h"
#include "cuda/softmax/mla_decode_kernel.cuh"
#include "support/mla.h"

namespace delta_attention::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// All launches of a problem.
void decode_latents(const MlaProblem& problem, int splits) {
  const SoftmaxProblem& a = problem.attention;
  const std::int64_t rows = problem.rows() * a.heads;
  std::vector<float> workspace(static_cast<std::size_t>(Partials::floats(a, splits)), kNan);
  std::vector<float> queries(static_cast<std::size_t>(rows * problem.channels()), kNan);
  const mla::Params params = {problem, Partials(a, splits, workspace.data()), queries.data()};
  for (int head = 0; head < a.heads; ++head) {
    for (int channel = 0; channel < problem.channels(); ++channel) mla::absorb_channel(params, head, channel);
  }
  std::vector<float4> memory(static_cast<std::size_t>(mla::shared_floats(problem) / 4 + 1));
  run_blocks_in_turn(mla::kThreads, mla::row_tiles(a) * a.batch * splits, memory, [&](std::int64_t block) {
    mla::decode_block(params, block, reinterpret_cast<float*>(memory.data()));
  });
  if (splits == 1) return;
  run_block(kWarpSize, [&] {
    for (std::int64_t row = 0; row < rows; ++row) merge_row(a, params.partials, row);
  });
}

class EmulatedMla : public ::testing::Test {
 protected:
  Random random = random_for("EmulatedMla");

  void expect_matches_oracle(const MlaInputs& inputs, int splits) {
    SCOPED_TRACE(std::to_string(splits) + " splits");
    MlaCall call(inputs, Device{});
    decode_latents(check(call.args), splits);
    EXPECT_TRUE(call.rest_untouched());
    expect_mla_matches(inputs, call.outputs());
  }
};

TEST_F(EmulatedMla, EveryDType) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const MlaInputs inputs = random_mla_inputs(random, dtype, {2, 1, 40, 16, 24, 16, 64});
    for (const int splits : {1, 2}) expect_matches_oracle(inputs, splits);
  }
}

TEST_F(EmulatedMla, SizesThatFillNothing) {
  MlaInputs inputs = random_mla_inputs(random, DType::bf16, {1, 3, 35, 7, 5, 3, 300});
  inputs.causal = true;
  inputs.placement = {{}, {8, 4, 4, 0}, 4};
  expect_matches_oracle(inputs, 1);
}

TEST_F(EmulatedMla, LengthsAndRowsThatSeeNothing) {
  MlaInputs inputs = random_mla_inputs(random, DType::f32, {4, 3, 50, 4, 8, 0, 32});
  inputs.valid_len = {50, 0, 2, 17};
  inputs.causal = true;
  expect_matches_oracle(inputs, 3);
}

}  // namespace
}  // namespace delta_attention::test
