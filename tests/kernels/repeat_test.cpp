// Rows C*: runs repeat, neighbours do not matter, queries have no side effects. Rows I*: large offsets, more blocks than work.

#include <memory>

#include "support/kernel_test.h"
#include "support/sparse.h"

namespace delta_attention::test {
namespace {

class Repeats : public KernelTest {
 protected:
  int repeats() const { return small_run() ? 5 : 200; }

  void expect_repeats(const Inputs& inputs) {
    Call call(inputs, device());
    if (!run(call)) return;
    const Outputs first = call.outputs();
    for (int repeat = 1; repeat < repeats(); ++repeat) {
      call.poison_outputs();
      ASSERT_TRUE(run(call));
      ASSERT_TRUE(call.outputs() == first) << "repeat " << repeat << " differs; " << inputs.problem.describe();
    }
  }
};

TEST_P(Repeats, C01_EveryRunGivesTheSameBits) {
  if (!GetParam().repeatable) GTEST_SKIP() << "does not claim to be repeatable";
  for (Index tokens : {0, 1, 15, 16, 17, 257}) {
    Case c;
    c.recurrence = tokens % 2 == 0 ? gated_delta_net() : kda();
    c.tokens = tokens;
    c.with_initial_state = true;
    expect_repeats(make_inputs(c, random));
  }
}

// As in models: wide heads of 16-bit numbers, whose sums many warps share.
TEST_P(Repeats, C01_WideHeadsInSixteenBits) {
  if (!GetParam().repeatable) GTEST_SKIP() << "does not claim to be repeatable";
  Case c;
  c.recurrence = kda();
  c.dtype = DType::bf16;
  c.tokens = 100;
  c.heads = c.value_heads = 2;
  c.key_dim = c.value_dim = 128;
  c.with_initial_state = true;
  expect_repeats(make_inputs(c, random));
}

TEST_P(Repeats, C01_ManyPackedSequences) {
  if (!GetParam().repeatable) GTEST_SKIP() << "does not claim to be repeatable";
  Case c;
  c.recurrence = kda();
  c.cu_seqlens = {0};
  for (int n = 0; n < 64; ++n) c.cu_seqlens.push_back(c.cu_seqlens.back() + pick(random, 0, 20));
  c.tokens = c.cu_seqlens.back();
  expect_repeats(make_inputs(c, random));
}

TEST_P(Repeats, C02_ManyBatchRows) {
  if (!GetParam().repeatable) GTEST_SKIP() << "does not claim to be repeatable";
  Case c;
  c.recurrence = gated_delta_net();
  c.batch = 99;
  c.tokens = 9;
  c.with_initial_state = true;
  expect_repeats(make_inputs(c, random));
}

TEST_P(Repeats, C04_QueriesHaveNoSideEffects) {
  Case c;
  c.recurrence = kda();
  c.tokens = 40;
  c.with_initial_state = true;
  Call call(make_inputs(c, random), device());
  std::size_t bytes = 0;
  try {
    bytes = delta_attention_workspace(call.args, execution());
  } catch (const Unsupported& refusal) {
    GTEST_SKIP() << refusal.what();
  }
  EXPECT_EQ(bytes, delta_attention_workspace(call.args, execution()));
  dispatch_info(call.args, execution());
  device_synchronize(device());
  EXPECT_TRUE(call.outputs_untouched());
  call.poison_outputs();
  ASSERT_TRUE(run(call));
}

TEST_P(Repeats, C07_NeighboursInTheBatchDoNotMatter) {
  Case c;
  c.recurrence = kda();
  c.batch = 3;
  c.tokens = 70;
  const Inputs rows = make_inputs(c, random);  // A, B, C
  const auto ab = run(take_rows(rows, {0, 1})), ac = run(take_rows(rows, {0, 2})), alone = run(take_rows(rows, {0}));
  if (!ab || !ac || !alone) return;
  const auto size = alone->out.values.size();
  const auto state_size = alone->final_state.values.size();
  EXPECT_TRUE(std::equal(ab->out.values.begin(), ab->out.values.begin() + static_cast<std::ptrdiff_t>(size),
                         ac->out.values.begin()));
  EXPECT_TRUE(std::equal(ab->final_state.values.begin(),
                         ab->final_state.values.begin() + static_cast<std::ptrdiff_t>(state_size),
                         ac->final_state.values.begin()));

  const auto in_many = run(take_rows(rows, std::vector<Index>(62, 0)));
  ASSERT_TRUE(in_many);
  for (std::size_t row = 0; row < 62; ++row) {
    expect_near({in_many->out.values.begin() + static_cast<std::ptrdiff_t>(row * size),
                 in_many->out.values.begin() + static_cast<std::ptrdiff_t>((row + 1) * size)},
                alone->out.values, 1e-5, 1e-5, "row in a batch of 62");
  }
}

TEST_P(Repeats, C09_WorkspaceGrowsWithTokens) {
  std::size_t last = 0;
  for (Index tokens : {0, 1, 8, 64, 65, 1000, 4096}) {
    Case c;
    c.recurrence = kda();
    c.tokens = tokens;
    Call call(zero_inputs(c), device());
    std::size_t bytes = 0;
    try {
      bytes = delta_attention_workspace(call.args, execution());
    } catch (const Unsupported& refusal) {
      GTEST_SKIP() << refusal.what();
    }
    EXPECT_GE(bytes, last) << "T = " << tokens;
    last = bytes;
  }
}

TEST_P(Repeats, I06_MoreBlocksThanWork) {
  for (const Preset& preset : kPresets) {
    for (Index tokens : {1, 2, 4, 8}) {
      Case c;
      c.recurrence = preset.recurrence;
      c.tokens = tokens;
      expect_matches_oracle(make_inputs(c, random));
    }
  }
}

TEST_P(Repeats, I01_BatchStrideBeyondTwoToThe31) {
  constexpr Index kStride = (Index{1} << 31) + 64;
  Case c;
  c.recurrence = kda();
  c.dtype = c.gate_dtype = c.beta_dtype = DType::bf16;
  c.batch = 2;
  c.tokens = 4;
  const Inputs inputs = make_inputs(c, random);
  const auto packed = run(inputs);
  if (!packed) return;

  Call call(inputs, device());
  std::vector<std::unique_ptr<Sparse>> memory;
  const auto spread = [&](auto& view, bool copy) {
    const Index row = view.elements() / c.batch;
    const std::size_t size = size_of(view.dtype);
    memory.push_back(std::make_unique<Sparse>(device(), static_cast<std::size_t>(kStride + row) * size));
    char* target = memory.back()->data();
    for (Index b = 0; copy && b < c.batch; ++b) {
      device_upload(device(), target + static_cast<std::size_t>(b * kStride) * size,
                    static_cast<const char*>(view.data) + static_cast<std::size_t>(b * row) * size,
                    static_cast<std::size_t>(row) * size);
    }
    view.data = target;
    view.strides[0] = kStride;
  };
  try {
    spread(call.args.q, true);
    spread(call.args.k, true);
    spread(call.args.v, true);
    spread(call.args.log_decay, true);
    spread(call.args.beta, true);
  } catch (const std::runtime_error& error) {
    GTEST_SKIP() << error.what();
  }
  const Tensor packed_out = call.args.out;
  spread(call.args.out, false);
  ASSERT_TRUE(run(call));
  const auto row_bytes = static_cast<std::size_t>(packed_out.elements() / 2) * size_of(packed_out.dtype);
  for (std::size_t b = 0; b < 2; ++b) {
    device_upload(device(), static_cast<char*>(packed_out.data) + b * row_bytes,
                  static_cast<const char*>(call.args.out.data) + b * static_cast<std::size_t>(kStride) * 2, row_bytes);
  }
  EXPECT_TRUE(call.outputs() == *packed);
}

TEST_P(Repeats, I02_LongSequenceEqualsTwoHalves) {
  if (GetParam().name == "reference") GTEST_SKIP() << "the oracle itself, slow at this length";
  Case c;
  c.recurrence = mamba2();
  c.tokens = small_run() ? 2048 : 131072;
  c.heads = c.value_heads = 8;
  c.key_dim = c.value_dim = 4;
  const Inputs inputs = make_inputs(c, random);
  const auto whole = run(inputs);
  if (!whole) return;
  const auto first = run(slice_tokens(inputs, 0, c.tokens / 2, {}, {}));
  ASSERT_TRUE(first);
  const auto second = run(slice_tokens(inputs, c.tokens / 2, c.tokens, first->final_state, {}));
  ASSERT_TRUE(second);
  std::vector<float> out = first->out.values;
  out.insert(out.end(), second->out.values.begin(), second->out.values.end());
  EXPECT_LT(relative_error(out, {whole->out.values.begin(), whole->out.values.end()}), 1e-5);
  EXPECT_LT(
      relative_error(second->final_state.values, {whole->final_state.values.begin(), whole->final_state.values.end()}),
      1e-5);
}

EVERY_KERNEL(Repeats);

}  // namespace
}  // namespace delta_attention::test
