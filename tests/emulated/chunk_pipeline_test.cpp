// The chunk pipeline's device code on host threads: its numbers against the oracle without a GPU, and, built with ThreadSanitizer,
// every access to shared memory that no barrier orders. One chain after another, so the hand-off between running blocks is not
// played here; the GPU tests do that.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>

#include "api/check.h"
#include "cuda/delta/chunk_pipeline_stages.cuh"
#include "support/run.h"

namespace delta_attention::test {
namespace {

using namespace chunk_pipeline_stages;

constexpr int kRunTokens = 16;

/// One block as the kernel runs it, between its waits.
template <class P>
void run_one(const Problem& p, const RowAccess& access, const Block& block, float* shared_memory, float* handoff) {
  run_block(kThreads, [&] {
    const SharedRun<P> shared(shared_memory, kRunTokens);
    prepare_run(p, access, block, shared);
    step_run(p, block, shared, handoff);
    __syncthreads();
    store_outputs(p, block, shared);
  });
}

/// A sequence's runs one after another, for one value head and slice of columns.
template <class P>
void run_chain(const Problem& p, std::int64_t n, std::int64_t value_head, std::int64_t first_column) {
  constexpr int kPerLane = P::kKeyTile / kWarpSize;
  const RowAccess access = {reads_in_pieces(p.q, p.key_dim, kPerLane), reads_in_pieces(p.k, p.key_dim, kPerLane),
                            p.gate == Gate::channel && reads_in_pieces(p.log_decay, p.key_dim, kPerLane)};
  std::vector<float> handoff(P::kKeyTile * (P::kSlice + 1));
  const Sequence sequence = p.sequence(n);
  for (std::int64_t start = 0; start == 0 || start < sequence.length; start += kRunTokens) {
    const std::int64_t left = sequence.length - start;
    Block block;
    block.sequence = n;
    block.batch = sequence.batch;
    block.first_token = sequence.begin + start;
    block.tokens = static_cast<int>(std::min<std::int64_t>(left, kRunTokens));
    block.value_head = value_head;
    block.first_column = first_column;
    block.columns = static_cast<int>(std::min<std::int64_t>(p.value_dim - first_column, P::kSlice));
    block.first_run = start == 0;
    block.last_run = left <= kRunTokens;
    // Fresh memory for every block, as uninitialised as the GPU's.
    std::vector<float4> shared_memory((SharedRun<P>::bytes(kRunTokens) + sizeof(float4) - 1) / sizeof(float4));
    run_one<P>(p, access, block, reinterpret_cast<float*>(shared_memory.data()), handoff.data());
  }
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

  void expect_matches_oracle(const Case& c) {
    SCOPED_TRACE(c.describe());
    const Inputs inputs = make_inputs(c, random);
    Call call(inputs, cpu());
    const Problem problem = check(call.args);
    for (std::int64_t n = 0; n < problem.sequences; ++n) {
      for (std::int64_t head = 0; head < problem.value_heads; ++head) {
        for (std::int64_t column = 0; column < problem.value_dim; column += P::kSlice) {
          run_chain<P>(problem, n, head, column);
        }
      }
    }
    expect_matches(inputs, call.outputs(), oracle(inputs));
  }
};

using Policies = ::testing::Types<Policy<Update::delta, Gate::channel, PlainSum, 64, 32>,
                                  Policy<Update::delta, Gate::scalar, PlainSum, 128, 16>,
                                  Policy<Update::additive, Gate::channel, PlainSum, 128, 16>,
                                  Policy<Update::delta, Gate::channel, PlainSum, 256, 16>>;
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

}  // namespace
}  // namespace delta_attention::test
