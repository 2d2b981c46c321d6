// The on-chip kernels' device code on host threads: its numbers against the oracle without a GPU, and, built with ThreadSanitizer, every
// access that no barrier orders: of the computing threads and the helpers beside them, and of two blocks that exchange sums.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "api/check.h"
#include "cuda/delta/on_chip_chain.cuh"
#include "support/run.h"

namespace delta_attention::on_chip {

float4 dynamic_shared[1 << 14];  // of the block that prepares a micro-chunk, one at a time

}  // namespace delta_attention::on_chip

namespace delta_attention::test {
namespace {

namespace chip = on_chip;

/// How a launch plays a policy.
struct How {
  int row_blocks = 1, buffers = 2;
  bool atomic = false;
  chip::Lanes lanes = chip::Lanes::channels;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Memory that holds nothing yet.
struct Memory {
  std::vector<float4> pieces;
  explicit Memory(std::size_t floats, float value = kNan) : pieces(floats / 4 + 1, {value, value, value, value}) {}
  float* floats() { return reinterpret_cast<float*>(pieces.data()); }
};

/// A launch's parameters and its workspace, for one group of blocks, which takes all items in turn.
template <class P>
struct Played {
  chip::Params params;
  int ticket = 0;
  unsigned long long arrivals = 0;
  Memory factors, slots;

  Played(const Problem& p, const How& how) : params(params_of(p, how)), factors(factor_floats()), slots(slot_floats()) {
    if (how.atomic) slots = Memory(slot_floats(), 0.0f);
    params.factors = factors.floats();
    params.ticket = &ticket;
    params.arrivals = &arrivals;
    params.slots = slots.floats();
  }

  /// Blocks one after another.
  void prepare(chip::Lanes lanes) {
    const Problem& p = params.problem;
    const chip::PrepareParams prepared = {p, params.layout, lanes, true, factors.floats()};
    const std::size_t shared_floats = chip::PreparedRows<P::kFlush>::floats(params.layout.key_rows());
    ASSERT_LE(shared_floats * sizeof(float), sizeof chip::dynamic_shared);
    for (int place = 0; place < chip::most_micro_chunks(p, P::kFlush); ++place) {
      for (int head = 0; head < p.value_heads; ++head) {
        run_block(chip::kPrepareThreads, [&] { chip::prepare_micro_chunks<P::kFlush>(prepared); }, {place, head});
      }
    }
  }

  /// The group's blocks at once, as the kernel on_chip has them.
  void run_group() {
    std::vector<Memory> memory(static_cast<std::size_t>(params.row_blocks),
                               Memory(chip::Shared<P>::count(params.row_tile, params.buffers)));
    run_blocks(params.row_blocks, P::kThreads + P::kHelpers, [&] {
      const int rank = blockIdx.x;
      const chip::Shared<P> shared(memory[static_cast<std::size_t>(rank)].floats(), params.row_tile, params.buffers);
      chip::Group group = {params.row_blocks, rank, params.atomic, params.slots, params.arrivals, 0, 0};
      for (std::int64_t item = 0; item < params.items; ++item) {
        const chip::Block block = chip::block_of(params, item, group.rank, P::kColumns);
        if (threadIdx.x < P::kThreads) {
          chip::compute_item<P>(params, block, shared, group);
        } else {
          chip::help_item<P>(params, block, shared, group);
        }
        __syncthreads();
      }
    });
  }

 private:
  static chip::Params params_of(const Problem& p, const How& how) {
    chip::Params params = {};
    params.problem = p;
    params.row_blocks = how.row_blocks;
    params.row_tile = static_cast<int>(ceil_div(ceil_div(p.key_dim, how.row_blocks), 8) * 8);
    params.slices = static_cast<int>(ceil_div(p.value_dim, P::kColumns));
    params.layout = {P::kFlush, how.row_blocks, params.row_tile, params.slices * P::kColumns};
    params.buffers = how.buffers;
    params.atomic = how.atomic;
    params.groups = 1;
    params.items = p.sequences * p.value_heads * params.slices;
    return params;
  }
  std::size_t factor_floats() const {
    const std::int64_t chunks = chip::most_micro_chunks(params.problem, P::kFlush) * params.problem.value_heads;
    return static_cast<std::size_t>(chunks * params.layout.floats());
  }
  std::size_t slot_floats() const {
    return static_cast<std::size_t>((params.atomic ? 3 : 2 * params.row_blocks) * P::kExchange);
  }
};

template <class P>
class EmulatedOnChip : public ::testing::Test {
 protected:
  Random random = random_for("EmulatedOnChip");

  static constexpr Index kTokens = 4 * P::kFlush + (P::kFlush + 1) / 2;  // the last micro-chunk is not full

  static Case delta() {
    Case c;
    c.recurrence = {Update::delta, Gate::channel, false};
    c.tokens = kTokens;
    c.key_dim = P::kColumns == 8 ? 35 : 131;  // rows that do not fill the tile; a thread advances one or several
    c.value_dim = P::kColumns + 3;            // two slices
    c.with_initial_state = true;
    c.qk_l2norm = true;
    return c;
  }
  static Case normalized() {
    Case c = delta();
    c.recurrence = {Update::additive, Gate::scalar, true};
    c.qk_l2norm = false;
    c.dtype = DType::bf16;
    c.value_dim = P::kColumns - 1;
    return c;
  }

  Outputs outputs_of(const Inputs& inputs, const How& how) {
    Call call(inputs, cpu());
    Played<P> played(check(call.args), how);
    played.prepare(how.lanes);
    played.run_group();
    return call.outputs();
  }

  void expect_matches_oracle(const Case& c, const How& how) {
    SCOPED_TRACE(c.describe() + ", " + std::to_string(how.buffers) + " buffers");
    const Inputs inputs = make_inputs(c, random);
    expect_matches(inputs, outputs_of(inputs, how), oracle(inputs));
  }
};

constexpr chip::Layout kVectors = chip::Layout::vectors;
constexpr chip::Loads kAsync = chip::Loads::async_copies;
using Policies = ::testing::Types<chip::Policy<PlainSum, 16, 8, 256, kVectors, kAsync>,
                                  chip::Policy<PlainSum, 4, 32, 256, kVectors, kAsync>,
                                  chip::Policy<CompensatedSum, 8, 32, 256, kVectors, kAsync>>;
TYPED_TEST_SUITE(EmulatedOnChip, Policies);

TYPED_TEST(EmulatedOnChip, OneBlock) {
  for (int buffers : {1, 2}) {
    How how;
    how.buffers = buffers;
    this->expect_matches_oracle(this->delta(), how);
    this->expect_matches_oracle(this->normalized(), how);
  }
}

TYPED_TEST(EmulatedOnChip, PackedSequences) {
  Case c = this->normalized();
  c.cu_seqlens = {0, 0, 3, this->kTokens};
  How how;
  how.lanes = chip::Lanes::tokens;
  this->expect_matches_oracle(c, how);
}

TYPED_TEST(EmulatedOnChip, TwoBlocksWithSlotsOfTheirOwn) {
  How how;
  how.row_blocks = 2;
  this->expect_matches_oracle(this->delta(), how);
  how.buffers = 1;
  this->expect_matches_oracle(this->normalized(), how);
}

TYPED_TEST(EmulatedOnChip, TwoBlocksThatAddToOneSlot) {
  How how;
  how.row_blocks = 2;
  how.atomic = true;
  this->expect_matches_oracle(this->delta(), how);
  how.buffers = 1;
  this->expect_matches_oracle(this->normalized(), how);
}

// Pieces wait in registers for the micro-chunk before to end; a helper holds few.
using EmulatedOnChipStagedLoads = EmulatedOnChip<chip::Policy<PlainSum, 8, 32, 256, kVectors, chip::Loads::registers>>;
TEST_F(EmulatedOnChipStagedLoads, OneBlock) {
  for (int buffers : {1, 2}) {
    Case c = delta();
    c.key_dim = 32;
    How how;
    how.buffers = buffers;
    expect_matches_oracle(c, how);
  }
}

}  // namespace
}  // namespace delta_attention::test
