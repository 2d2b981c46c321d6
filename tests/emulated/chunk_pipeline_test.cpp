// The chunk pipeline's device code on host threads: its numbers against the oracle without a GPU, and, built with ThreadSanitizer,
// every access to shared memory that no barrier orders. One chain after another, so the hand-off between running blocks is not
// played here; the GPU tests do that. Also played: the chunked baseline's use of the same stages, and what compensation is for.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "api/check.h"
#include "cuda/delta/chunk_pipeline_stages.cuh"
#include "support/run.h"

namespace delta_attention::test {
namespace {

using namespace chunk_pipeline_stages;

constexpr int kRunTokens = 16;

/// Memory of a block's own, as uninitialised as the GPU's.
template <class P>
struct BlockMemory {
  int run_tokens;
  std::vector<float4> memory = std::vector<float4>(SharedRun<P>::bytes(run_tokens) / sizeof(float4) + 1);
  SharedRun<P> run() { return {reinterpret_cast<float*>(memory.data()), run_tokens}; }
};

/// A sequence's runs one after another, each in its own block, for one value head and slice of columns.
template <class P>
void run_chain(const Problem& p, std::int64_t n, std::int64_t chain, std::int64_t slices, int run_tokens) {
  const RowAccess access = row_access_of<P>(p);
  std::vector<float> handoff(P::kHandoffFloats);
  const std::int64_t length = p.sequence(n).length;
  for (std::int64_t index = 0; index == 0 || index * run_tokens < length; ++index) {
    const Block block = block_of<P>(p, n, index, run_tokens, chain, slices);
    BlockMemory<P> memory{run_tokens};
    run_block(kThreads, [&] {
      const SharedRun<P> shared = memory.run();
      prepare_run(p, access, block, shared);
      step_run(p, block, shared, handoff.data());
      __syncthreads();
      store_outputs(p, block, shared);
    });
  }
}

/// The same as the chunked baseline does it: the state comes in and goes out in launches of no tokens, and each stage is a launch.
template <class P>
void run_chain_in_launches(const Problem& p, std::int64_t n, std::int64_t chain, std::int64_t slices) {
  const RowAccess access = row_access_of<P>(p);
  std::vector<float> state(P::kHandoffFloats);
  BlockMemory<P> memory{kRunTokens};
  const auto pass_state = [&](bool first) {
    Block block = block_of<P>(p, n, 0, kRunTokens, chain, slices);
    block.tokens = 0;
    block.first_run = first;
    block.last_run = !first;
    run_block(kThreads, [&] { step_run(p, block, memory.run(), state.data()); });
  };
  pass_state(true);
  for (std::int64_t index = 0; index * kRunTokens < p.sequence(n).length; ++index) {
    Block block = block_of<P>(p, n, index, kRunTokens, chain, slices);
    block.first_run = block.last_run = false;
    run_block(kThreads, [&] { prepare_run(p, access, block, memory.run()); });
    run_block(kThreads, [&] { step_run(p, block, memory.run(), state.data()); });
    run_block(kThreads, [&] { store_outputs(p, block, memory.run()); });
  }
  pass_state(false);
}

template <class P>
class EmulatedChunkPipeline : public ::testing::Test {
 protected:
  Random random = random_for("EmulatedChunkPipeline");

  Case ordinary(DType dtype) {
    Case c;
    c.recurrence = {P::kUpdate, P::kGate, false};
    c.dtype = dtype;
    c.tokens = kRunTokens + 5;  // two runs, the second with a micro-chunk that is not full
    c.key_dim = P::kKeyTile * 3 / 4;
    c.value_dim = P::kSlice - 3;
    c.with_initial_state = true;
    c.qk_l2norm = true;
    return c;
  }

  using RunChain = std::function<void(const Problem&, std::int64_t n, std::int64_t chain, std::int64_t slices)>;

  static RunChain in_runs_of(int run_tokens) {
    return [=](const Problem& p, std::int64_t n, std::int64_t chain, std::int64_t slices) {
      run_chain<P>(p, n, chain, slices, run_tokens);
    };
  }

  Outputs outputs_of(const Inputs& inputs, const RunChain& run) {
    Call call(inputs, cpu());
    const Problem problem = check(call.args);
    const std::int64_t slices = ceil_div(problem.value_dim, P::kSlice);
    for (std::int64_t n = 0; n < problem.sequences; ++n) {
      for (std::int64_t chain = 0; chain < problem.value_heads * slices; ++chain) run(problem, n, chain, slices);
    }
    return call.outputs();
  }

  void expect_matches_oracle(const Case& c, const RunChain& run = in_runs_of(kRunTokens)) {
    SCOPED_TRACE(c.describe());
    const Inputs inputs = make_inputs(c, random);
    expect_matches(inputs, outputs_of(inputs, run), oracle(inputs));
  }
};

using Policies = ::testing::Types<
    Policy<Update::delta, Gate::channel, PlainSum, 64, 32>, Policy<Update::delta, Gate::scalar, PlainSum, 128, 16>,
    Policy<Update::additive, Gate::channel, PlainSum, 128, 16>, Policy<Update::delta, Gate::channel, PlainSum, 256, 16>,
    Policy<Update::additive, Gate::scalar, CompensatedSum, 64, 16>,
    Policy<Update::delta, Gate::channel, CompensatedSum, 128, 32>>;
TYPED_TEST_SUITE(EmulatedChunkPipeline, Policies);

TYPED_TEST(EmulatedChunkPipeline, EveryDType) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) this->expect_matches_oracle(this->ordinary(dtype));
}

TYPED_TEST(EmulatedChunkPipeline, GatesOfEverySpaceAndDType) {
  for (GateSpace space :
       {GateSpace::log, GateSpace::log2, GateSpace::linear, GateSpace::softplus, GateSpace::lower_bound}) {
    Case c = this->ordinary(DType::bf16);
    c.gate_space = space;
    c.gate_dtype = space == GateSpace::log ? DType::bf16 : DType::f16;
    c.beta_space = BetaSpace::twice_sigmoid;
    this->expect_matches_oracle(c);
  }
}

TYPED_TEST(EmulatedChunkPipeline, NormalizedAndUnalignedRows) {
  Case c = this->ordinary(DType::f32);
  c.recurrence.normalize = true;
  c.qk_l2norm = false;
  c.layout = Layout::padded;
  c.key_dim = TypeParam::kKeyTile - 1;
  c.value_dim = TypeParam::kSlice + 3;  // two slices
  c.value_heads = 2;
  this->expect_matches_oracle(c);
}

TYPED_TEST(EmulatedChunkPipeline, PackedSequences) {
  Case c = this->ordinary(DType::f16);
  c.cu_seqlens = {0, 0, 3, 21};
  this->expect_matches_oracle(c);
}

using EmulatedCompensatedPipeline = EmulatedChunkPipeline<Policy<Update::delta, Gate::scalar, CompensatedSum, 64, 16>>;

// The hand-off carries all of a sum.
TEST_F(EmulatedCompensatedPipeline, RunsOfAnyLengthGiveTheSameBits) {
  Case c = ordinary(DType::f32);
  c.recurrence.normalize = true;
  c.tokens = 5 * kMicroChunk - 3;
  const Inputs inputs = make_inputs(c, random);
  const Outputs one_run = outputs_of(inputs, in_runs_of(5 * kMicroChunk));
  for (int run_tokens : {kMicroChunk, 2 * kMicroChunk}) {
    EXPECT_TRUE(outputs_of(inputs, in_runs_of(run_tokens)) == one_run) << "runs of " << run_tokens << " tokens";
  }
}

using EmulatedChunkedBaseline = EmulatedChunkPipeline<Policy<Update::delta, Gate::channel, PlainSum, 64, 16>>;

TEST_F(EmulatedChunkedBaseline, PackedSequences) {
  Case c = ordinary(DType::f32);
  c.recurrence.normalize = true;
  c.qk_l2norm = false;
  c.cu_seqlens = {0, 0, 3, 21};
  expect_matches_oracle(c, run_chain_in_launches<Policy<Update::delta, Gate::channel, PlainSum, 64, 16>>);
}

/// What a normaliser of positive keys without decay is off after T tokens, relative to its size: the root mean square over channels and
/// the worst. Two runs, so that the hand-off counts.
template <class Sum>
struct NormalizerError {
  double typical = 0, worst = 0;

  explicit NormalizerError(const Inputs& inputs) {
    using P = Policy<Update::additive, Gate::scalar, Sum, 64, 16>;
    const int run_tokens = static_cast<int>(inputs.problem.tokens / 2);
    Call call(inputs, cpu());
    const Problem problem = check(call.args);
    std::vector<float4> memory(SharedRun<P>::bytes(run_tokens) / sizeof(float4) + 1);
    std::vector<float> handoff(P::kHandoffFloats);
    const SharedRun<P> shared(reinterpret_cast<float*>(memory.data()), run_tokens);
    for (int index = 0; index < 2; ++index) {
      std::copy_n(&inputs.k.values[static_cast<std::size_t>(index * run_tokens * P::kKeyTile)],
                  run_tokens * P::kKeyTile, shared.k);
      std::fill_n(shared.decay_end, run_tokens / kMicroChunk, 1.0f);
      const Block block = block_of<P>(problem, 0, index, run_tokens, 0, 1);
      run_block(kWarpSize, [&] { normalize_run(problem, block, shared, run_tokens / kMicroChunk, handoff.data()); });
    }
    const Array z = call.outputs().final_normalizer;
    for (std::size_t channel = 0; channel < P::kKeyTile; ++channel) {
      double truth = 0;
      for (std::size_t i = channel; i < inputs.k.values.size(); i += P::kKeyTile) truth += inputs.k.values[i];
      const double error = std::fabs(z.values[channel] / truth - 1);
      typical += error * error / P::kKeyTile;
      worst = std::max(worst, error);
    }
    typical = std::sqrt(typical);
  }
};

// A compensated sum of T positive terms: each step rounds a term and the compensation to one number, T roundings of 2^-24 of the terms
// and of 2^-24 of compensations, which are 2^-24 of the sum at most; and value() rounds once. Hence the bound, which T enters with 2^-48
// only. A plain sum rounds the whole sum T times.
TEST(Emulated, CompensatedNormalizerIsRoundedLikeOneNumber) {
  Random random = random_for("CompensatedNormalizer");
  Case c;
  c.recurrence = {Update::additive, Gate::scalar, true};
  c.tokens = 4096;
  c.key_dim = 64;
  Inputs inputs = make_inputs(c, random);
  for (float& key : inputs.k.values) key = static_cast<float>(uniform(random, 0, 1));
  const double bound = 0x1p-24 * (2 + 0x1p-24 * static_cast<double>(c.tokens));
  EXPECT_LE(NormalizerError<CompensatedSum>(inputs).worst, bound);
  EXPECT_GT(NormalizerError<PlainSum>(inputs).typical, bound) << "a case where nothing is to be gained proves nothing";
}

}  // namespace
}  // namespace delta_attention::test
