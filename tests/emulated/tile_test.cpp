// The tiled softmax kernels' device code on host threads: its numbers against the oracle without a GPU, and, built with ThreadSanitizer,
// every access that no barrier orders. Blocks share nothing and run one after another.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "api/check_softmax.h"
#include "cuda/softmax/tile_stages.cuh"
#include "support/softmax.h"

namespace delta_attention::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class P>
void attend_in_tiles(const SoftmaxProblem& problem) {
  const WorkOrder order(problem, P::kRows);
  const auto in_vectors = [&](const InputOperand& x) { return reads_in_pieces(x, problem.head_dim, 4); };
  const tile::Params params = {problem, order, in_vectors(problem.q), in_vectors(problem.k), in_vectors(problem.v)};
  for (int block = 0; block < order.blocks(); ++block) {
    std::vector<float4> memory(P::kBytes / sizeof(float4) + 1, {kNan, kNan, kNan, kNan});
    run_block(P::kThreads, [&] { tile::attend_rows<P>(params, blockIdx.x, reinterpret_cast<float*>(memory.data())); }, {block});
  }
}

template <class P>
class EmulatedTiles : public ::testing::Test {
 protected:
  Random random = random_for("EmulatedTiles");

  static constexpr Index kKeys = 2 * P::kKeys + 5, kRows = P::kRows + 3;  // the last tile and the last block are not full

  void expect_matches_oracle(const SoftmaxInputs& inputs) {
    SoftmaxCall call(inputs, Device{});
    attend_in_tiles<P>(check(call.args));
    EXPECT_TRUE(call.rest_untouched());
    expect_matches(inputs, call.outputs(), softmax_oracle(inputs));
  }
};

using tile::Exp;
using tile::Loads;
using tile::Merge;
using Policies = ::testing::Types<tile::Policy<32, 32, Loads::elements, 0, 1, Merge::row_max, Exp::exact, false>,
                                  tile::Policy<64, 16, Loads::vectors, 4, 1, Merge::row_max, Exp::exact, false>,
                                  tile::Policy<32, 64, Loads::vectors, 4, 2, Merge::row_max, Exp::exact, false>,
                                  tile::Policy<64, 8, Loads::vectors, 4, 1, Merge::elements, Exp::fast, false>>;
TYPED_TEST_SUITE(EmulatedTiles, Policies);

TYPED_TEST(EmulatedTiles, CausalWithLengthsOfEverySize) {
  SoftmaxInputs inputs = random_inputs(this->random, DType::f32, 2, this->kRows, this->kKeys, 2, 1, TypeParam::kDim);
  inputs.causal = true;
  inputs.valid_len = {this->kKeys - 2, 0};
  this->expect_matches_oracle(inputs);
}

TYPED_TEST(EmulatedTiles, EverythingThatChangesAScore) {
  SoftmaxInputs inputs = random_inputs(this->random, DType::bf16, 1, 5, this->kKeys, 2, 2, TypeParam::kDim - 3);
  inputs.layout = Layout::padded;
  inputs.causal = true;
  inputs.alignment = Alignment::top_left;
  inputs.window_left = 3;
  inputs.softcap = 2.0f;
  inputs.mask = Array(DType::f32, {1, 2, 1, this->kKeys});
  for (float& x : inputs.mask.values) {
    x = pick(this->random, 0, 4) == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(uniform(this->random, -2, 2));
  }
  this->expect_matches_oracle(inputs);
}

TYPED_TEST(EmulatedTiles, PackedSequences) {
  SoftmaxInputs inputs = random_inputs(this->random, DType::f16, 1, 40, this->kKeys, 1, 1, TypeParam::kDim);
  inputs.cu_seqlens_q = {0, 3, 3, 40};
  inputs.cu_seqlens_kv = {0, 7, 7, this->kKeys};
  this->expect_matches_oracle(inputs);
}

TYPED_TEST(EmulatedTiles, Pages) {
  SoftmaxInputs inputs = random_inputs(this->random, DType::f32, 1, 3, this->kKeys, 1, 1, TypeParam::kDim);
  this->expect_matches_oracle(paged(inputs, 7, this->random));
}

using EmulatedPlainTiles = EmulatedTiles<tile::Policy<32, 32, Loads::vectors, 4, 2, Merge::row_max, Exp::exact, true>>;
TEST_F(EmulatedPlainTiles, EveryRowSeesEveryKey) {
  for (const DType dtype : {DType::f32, DType::f16}) {
    expect_matches_oracle(random_inputs(random, dtype, 1, kRows, kKeys, 2, 1, 31));
    expect_matches_oracle(random_inputs(random, dtype, 1, 4, kKeys, 2, 1, 32));
  }
}

}  // namespace
}  // namespace delta_attention::test
