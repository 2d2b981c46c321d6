// Rows S*: initial and final states, their layout and who may write what.

#include <cstring>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

class State : public KernelTest {};

Case small_case(Recurrence recurrence = kda()) {
  Case c;
  c.recurrence = recurrence;
  c.batch = 2;
  c.tokens = 35;
  c.heads = 1;
  c.value_heads = 2;
  c.key_dim = 24;
  c.value_dim = 20;
  return c;
}

TEST_P(State, S01_NoFinalStateWritesNone) {
  Case c = small_case();
  c.tokens = 63;
  const Inputs inputs = make_inputs(c, random);
  Call call(inputs, device());
  call.fill_outputs(7.0f);
  call.args.final_state = {};
  if (!run(call)) return;
  for (float cell : call.outputs().final_state.values) ASSERT_EQ(cell, 7.0f);
}

TEST_P(State, S01_FinalStateWithoutMemoryIsRejected) {
  Call call(make_inputs(small_case(), random), device());
  call.args.final_state.data = nullptr;
  try {
    if (run(call)) ADD_FAILURE() << "a null final_state was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "final_state");
    EXPECT_TRUE(call.outputs_untouched());
  }
}

/// The [1,1,2,2] state read and written with the strides of both conventions.
Placements square_state(StateLayout layout) {
  Placements p;
  if (layout == StateLayout::vk) p.initial_state.order = p.final_state.order = {0, 1, 3, 2};
  return p;
}

TEST_P(State, S02_MemoryOrderOfTheStateIsHonoured) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (DType state_dtype : {DType::f32, DType::bf16}) {
      for (StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
        Case c;
        c.recurrence = gated_delta_net();
        c.dtype = dtype;
        c.state_dtype = state_dtype;
        c.key_dim = c.value_dim = 2;
        c.scale = 1.0f;
        c.with_initial_state = true;
        c.state_layout = layout;
        Inputs read = zero_inputs(c);
        read.q.values = {1, 0};
        // Memory (0, 1, 0, 0): S[0][1] = 1 in KV order, S[1][0] = 1 in VK order.
        read.initial_state.values =
            layout == StateLayout::kv ? std::vector<float>{0, 1, 0, 0} : std::vector<float>{0, 0, 1, 0};
        const auto got = run(read, {square_state(layout)});
        if (!got) continue;
        const std::vector<float> expected =
            layout == StateLayout::kv ? std::vector<float>{0, 1} : std::vector<float>{0, 0};
        EXPECT_EQ(got->out.values, expected);

        Inputs write = zero_inputs(c);
        write.k.values = {1, 0};
        write.v.values = {1, 2};
        write.beta.values = {1};
        Call call(write, device(), {square_state(layout)});
        ASSERT_TRUE(run(call));
        Array memory = call.outputs().final_state;  // by index [K][V]
        EXPECT_EQ(memory.values, (std::vector<float>{1, 2, 0, 0}));
        // And by address: (1, 2, 0, 0) in KV order, (1, 0, 2, 0) in VK order.
        unsigned char bytes[16];
        device_download(device(), bytes, call.args.final_state.data, 4 * size_of(state_dtype));
        const std::size_t size = size_of(state_dtype);
        const std::size_t two = layout == StateLayout::kv ? 1 : 2;
        unsigned char zero[4] = {};
        EXPECT_NE(std::memcmp(bytes + two * size, zero, size), 0);
        EXPECT_EQ(std::memcmp(bytes + (3 - two) * size, zero, size), 0);
      }
    }
  }
}

TEST_P(State, S02_StateHandedOverInEitherOrder) {
  for (const Preset& preset : kPresets) {
    Case c = small_case(preset.recurrence);
    c.with_initial_state = true;
    const Inputs inputs = make_inputs(c, random);
    Inputs transposed = inputs;
    transposed.problem.state_layout = StateLayout::vk;
    const auto a = run(inputs), b = run(transposed);
    if (!a || !b) continue;
    EXPECT_TRUE(*a == *b) << preset.name;
    expect_matches(inputs, *a, oracle(inputs));
  }
}

TEST_P(State, S05_NoInitialStateMeansZerosWhateverMemoryHolds) {
  for (Recurrence recurrence : {kda(), normalized_linear()}) {
    const Inputs inputs = make_inputs(small_case(recurrence), random);
    const auto clean = run(inputs);
    if (!clean) continue;
    Call call(inputs, device());
    call.fill_outputs(recurrence.normalize ? 3.0f : 1e30f);
    ASSERT_TRUE(run(call));
    EXPECT_TRUE(call.outputs() == *clean);
  }
}

TEST_P(State, S05_WorkspaceContentsDoNotMatter) {
  Case c = small_case();
  c.tokens = 150;
  const Inputs inputs = make_inputs(c, random);
  const auto own = run(inputs);
  if (!own) return;
  Call call(inputs, device());
  Execution with_workspace = execution();
  const std::size_t bytes = delta_attention_workspace(call.args, with_workspace);
  GuardedBuffer workspace(device(), bytes);  // starts as 0xFF everywhere
  with_workspace.workspace = workspace.data();
  with_workspace.workspace_bytes = bytes;
  for (int repeat = 0; repeat < 3; ++repeat) {  // then as the last call left it
    call.poison_outputs();
    ASSERT_TRUE(run(call, with_workspace));
    EXPECT_TRUE(call.outputs() == *own) << "repeat " << repeat;
    EXPECT_TRUE(workspace.guards_intact()) << "the workspace was overrun";
  }
}

TEST_P(State, S06_SavedAndRestoredStateContinuesBitwise) {
  Case c = small_case();
  c.batch = 1;
  const Inputs inputs = make_inputs(c, random);
  const auto first = run(slice_tokens(inputs, 0, 12, {}, {}));
  if (!first) return;
  const auto straight = run(slice_tokens(inputs, 12, 35, first->final_state, {}));
  ASSERT_TRUE(straight);

  Call call(slice_tokens(inputs, 0, 12, {}, {}), device());
  ASSERT_TRUE(run(call));
  const auto bytes = static_cast<std::size_t>(call.args.final_state.elements()) * size_of(call.args.final_state.dtype);
  std::vector<unsigned char> saved(bytes);
  device_download(device(), saved.data(), call.args.final_state.data, bytes);
  call.fill_outputs(-5.0f);
  device_upload(device(), call.args.final_state.data, saved.data(), bytes);
  const auto resumed = run(slice_tokens(inputs, 12, 35, call.outputs().final_state, {}));
  ASSERT_TRUE(resumed);
  EXPECT_TRUE(*resumed == *straight);
}

TEST_P(State, S07_InputsStayUntouched) {
  for (const Preset& preset : kPresets) {
    for (Index tokens : {1, 70}) {
      Case c = small_case(preset.recurrence);
      c.tokens = tokens;
      c.with_initial_state = true;
      c.qk_l2norm = true;
      c.gate_space = GateSpace::softplus;
      c.beta_space = BetaSpace::sigmoid;
      run(make_inputs(c, random));  // outputs() compares every input byte
    }
  }
}

TEST_P(State, S08_OutputsBelongToTheCaller) {
  const Inputs first = make_inputs(small_case(), random), second = make_inputs(small_case(), random);
  Call a(first, device()), b(second, device());
  if (!run(a)) return;
  const Outputs before = a.outputs();
  ASSERT_TRUE(run(b));
  EXPECT_TRUE(a.outputs() == before);
}

TEST_P(State, S08_StateUpdatedInPlace) {
  for (const Preset& preset : kPresets) {
    for (StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
      for (Index tokens : {0, 1, 35}) {
        Case c = small_case(preset.recurrence);
        c.tokens = tokens;
        c.state_layout = layout;
        c.with_initial_state = true;
        const Inputs inputs = make_inputs(c, random);
        const auto apart = run(inputs);  // also: the separate initial state is unchanged
        if (!apart) continue;
        CallOptions options{placements_of(c)};
        options.in_place = true;
        const auto in_place = run(inputs, options);
        ASSERT_TRUE(in_place);
        EXPECT_TRUE(*in_place == *apart) << c.describe();
      }
    }
  }
}

// Slices of V share the normaliser: with many of them, some have not begun when the first is done.
TEST_P(State, S08_NormalizerUpdatedInPlaceByManySlices) {
  Case c = small_case(normalized_linear());
  c.batch = small_run() ? 2 : 32;
  c.heads = c.value_heads = 4;
  c.tokens = 20;
  c.value_dim = 320;
  c.with_initial_state = true;
  const Inputs inputs = make_inputs(c, random);
  const auto apart = run(inputs);
  if (!apart) return;
  CallOptions options{placements_of(c)};
  options.in_place = true;
  const auto in_place = run(inputs, options);
  ASSERT_TRUE(in_place);
  EXPECT_TRUE(*in_place == *apart);
}

TEST_P(State, S10_InitialStateIsHonoured) {
  for (const Preset& preset : kPresets) {
    for (Index tokens : {1, 35}) {
      Case c = small_case(preset.recurrence);
      c.tokens = tokens;
      c.gate_regime = GateRegime::slow;
      c.with_initial_state = true;
      const Inputs with = make_inputs(c, random);
      Inputs without = with;
      without.initial_state = without.initial_normalizer = {};
      const auto a = run(with), b = run(without);
      if (!a || !b) continue;
      EXPECT_FALSE(*a == *b) << preset.name;
      expect_matches(with, *a, oracle(with));
    }
  }
}

TEST_P(State, S10_NormalizerNeedsANormalisedRecurrence) {
  const Inputs inputs = make_inputs(small_case(), random);
  Call normalised(make_inputs(small_case(normalized_linear()), random), device());
  Call call(inputs, device());
  call.args.final_normalizer = normalised.args.final_normalizer;
  try {
    if (run(call)) ADD_FAILURE() << "a normaliser was taken and ignored";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "final_normalizer");
    EXPECT_TRUE(call.outputs_untouched());
  }
}

TEST_P(State, WorkspaceTooSmallOrMisalignedIsRejected) {
  Case c = small_case();
  c.tokens = 150;
  Call call(make_inputs(c, random), device());
  Execution bad = execution();
  std::size_t bytes = 0;
  try {
    bytes = delta_attention_workspace(call.args, bad);
  } catch (const Unsupported& refusal) {
    GTEST_SKIP() << refusal.what();
  }
  if (bytes == 0) GTEST_SKIP() << "needs no workspace";
  GuardedBuffer workspace(device(), bytes + 256);
  const auto expect_rejected = [&](void* data, std::size_t size, const char* argument) {
    bad.workspace = data;
    bad.workspace_bytes = size;
    try {
      call.run(bad);
      ADD_FAILURE() << "taken in spite of a bad " << argument;
    } catch (const InvalidArgument& error) {
      EXPECT_EQ(error.argument(), argument);
      EXPECT_TRUE(call.outputs_untouched());
      EXPECT_TRUE(workspace.unchanged());
    }
  };
  expect_rejected(workspace.data(), bytes - 1, "workspace_bytes");
  expect_rejected(static_cast<char*>(workspace.data()) + 16, bytes, "workspace");
}

EVERY_KERNEL(State);

}  // namespace
}  // namespace delta_attention::test
