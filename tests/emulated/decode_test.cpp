// The kernel decode's device code on host threads: its numbers against the oracle without a GPU, and, built with ThreadSanitizer, every
// access that no barrier orders. Blocks run one after another: they share nothing but what the merging launch reads.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "api/check_softmax.h"
#include "cuda/softmax/decode_kernel.cuh"
#include "support/softmax.h"

namespace delta_attention::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Both launches of a problem.
template <class P>
void decode_in_splits(const SoftmaxProblem& problem, int splits) {
  const std::int64_t rows = problem.batch * problem.queries * problem.heads;
  std::vector<float> workspace(static_cast<std::size_t>(Partials::floats(problem, splits)), kNan);
  const bool in_pieces = reads_in_pieces(problem.k, problem.head_dim, 8) && reads_in_pieces(problem.v, problem.head_dim, 8);
  const decode::Params params = {problem, in_pieces, Partials(problem, splits, workspace.data())};
  std::vector<float4> memory(P::kBytes / sizeof(float4));
  run_blocks_in_turn(P::kThreads, problem.sequences * problem.key_heads * splits, memory,
                     [&](std::int64_t block) { decode::decode_block<P>(params, block, memory.data()); });
  if (splits == 1) return;
  run_block(kWarpSize, [&] {
    for (std::int64_t row = 0; row < rows; ++row) merge_row(problem, params.partials, row);
  });
}

template <class P>
class EmulatedDecode : public ::testing::Test {
 protected:
  Random random = random_for("EmulatedDecode");

  static constexpr DType kDType =
      sizeof(typename P::Element) == 4 ? DType::f32 : std::is_same_v<typename P::Element, Half> ? DType::f16 : DType::bf16;
  /// More tiles than stages, the last one not full.
  static constexpr Index kKeys = 5 * P::kTile + 5;
  static constexpr Index kSize = P::kSize * 3 / 4;
  static constexpr Index kHeads = P::kRows == 16 ? 4 : P::kRows;
  static constexpr Index kQueries = P::kRows == 16 ? 3 : 1;

  SoftmaxInputs ordinary(Index batch = 1) {
    return random_inputs(random, kDType, batch, kQueries, kKeys, 2 * kHeads, 2, kSize);
  }

  void expect_matches_oracle(const SoftmaxInputs& inputs, std::initializer_list<int> all_splits = {1, 3}) {
    for (const int splits : all_splits) {
      SCOPED_TRACE(std::to_string(splits) + " splits");
      SoftmaxCall call(inputs, Device{});
      decode_in_splits<P>(check(call.args), splits);
      EXPECT_TRUE(call.rest_untouched());
      expect_matches(inputs, call.outputs(), softmax_oracle(inputs));
    }
  }
};

using Policies = ::testing::Types<decode::Policy<BFloat16, 16, 4>, decode::Policy<Half, 8, 16>, decode::Policy<float, 32, 1>,
                                  decode::Policy<BFloat16, 32, 16>>;
TYPED_TEST_SUITE(EmulatedDecode, Policies);

TYPED_TEST(EmulatedDecode, LongCaches) { this->expect_matches_oracle(this->ordinary()); }

TYPED_TEST(EmulatedDecode, LengthsOfEverySize) {
  SoftmaxInputs inputs = this->ordinary(3);
  inputs.valid_len = {this->kKeys - 2, 0, 2};  // the last leaves splits without keys
  this->expect_matches_oracle(inputs, {3});
}

TYPED_TEST(EmulatedDecode, EverythingThatChangesAScore) {
  SoftmaxInputs inputs = this->ordinary();
  inputs.layout = Layout::padded;
  inputs.causal = true;
  inputs.window_left = 2 * TypeParam::kTile + 3;
  inputs.softcap = 2.0f;
  inputs.mask = Array(DType::f32, {1, 2 * this->kHeads, 1, this->kKeys});
  for (float& x : inputs.mask.values) {
    x = pick(this->random, 0, 4) == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(uniform(this->random, -2, 2));
  }
  this->expect_matches_oracle(inputs);
  inputs.alignment = Alignment::top_left;
  this->expect_matches_oracle(inputs, {3});
}

TYPED_TEST(EmulatedDecode, RowsOfOddSizeElementByElement) {
  SoftmaxInputs inputs = random_inputs(this->random, this->kDType, 1, 1, 40, this->kHeads, 1, TypeParam::kSize - 3);
  this->expect_matches_oracle(inputs, {2});
}

TYPED_TEST(EmulatedDecode, PackedSequencesOfMoreRowsThanABlockTakes) {
  SoftmaxInputs inputs = random_inputs(this->random, this->kDType, 1, 6, 50, 2 * TypeParam::kRows, 2, this->kSize);
  inputs.cu_seqlens_q = {0, 3, 3, 6};
  inputs.cu_seqlens_kv = {0, 17, 17, 50};
  inputs.causal = true;
  this->expect_matches_oracle(inputs, {2});
}

TYPED_TEST(EmulatedDecode, Pages) {
  for (const Index page_size : {1, 7, 64}) this->expect_matches_oracle(paged(this->ordinary(), page_size, this->random), {3});
}

}  // namespace
}  // namespace delta_attention::test
