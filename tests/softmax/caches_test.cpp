// Few rows over many keys: what splits, pages and windows can get wrong.

#include <algorithm>
#include <memory>
#include <stdexcept>

#include "api/softmax_kernel.h"
#include "support/settings.h"
#include "support/softmax.h"
#include "support/sparse.h"

namespace delta_attention::test {
namespace {

class SoftmaxCaches : public SoftmaxTest {
 protected:
  Execution execution() const {
    Execution execution;
    execution.kernel = GetParam().name;
    return execution;
  }

  /// False if the kernel refuses.
  bool attend(const SoftmaxArgs& args, const Execution& execution) {
    try {
      softmax_attention_forward(args, execution);
    } catch (const Unsupported&) {
      return false;
    }
    device_synchronize(GetParam().device);
    return true;
  }

  /// Rows that share a key head, and lengths that leave most splits of a sequence without keys.
  SoftmaxInputs ragged(DType dtype, Index queries, Index heads, Index size) {
    SoftmaxInputs inputs = random_inputs(random, dtype, 4, queries, 1500, heads, 2, size);
    inputs.valid_len = {1, 1500, 0, 130};
    return inputs;
  }
};

TEST_P(SoftmaxCaches, SplitsWithoutKeysWeighNothing) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    expect_matches_oracle(ragged(dtype, 1, 2, 64));
    expect_matches_oracle(ragged(dtype, 1, 8, 128));
    expect_matches_oracle(ragged(dtype, 1, 16, 72));
    SoftmaxInputs several = ragged(dtype, 4, 8, 130);
    several.causal = true;
    expect_matches_oracle(several);
  }
}

// Every compiled tile: sizes of heads, dtypes, settings; with and without masks.
TEST_P(SoftmaxCaches, D03_EveryCompiledTile) {
  const std::vector<const SoftmaxKernel*>& kernels = softmax_kernels();
  const auto kernel =
      std::find_if(kernels.begin(), kernels.end(), [](const SoftmaxKernel* each) { return each->name == GetParam().name; });
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Index size : {32, 64, 128, 256}) {
      for (const bool plain : {true, false}) {
        SoftmaxInputs inputs = random_inputs(random, dtype, 2, 3, 150, 2, 1, size);
        if (!plain) inputs.valid_len = {150, 70};
        const SoftmaxTruth truth = softmax_oracle(inputs);
        for (const std::string& settings : combinations((*kernel)->settings())) {
          Execution chosen = execution();
          chosen.settings = settings;
          SCOPED_TRACE(settings);
          SoftmaxCall call(inputs, GetParam().device);
          if (attend(call.args, chosen)) expect_matches(inputs, call.outputs(), truth, GetParam().rounds_weights);
        }
      }
    }
  }
}

// Channels without queries and keys change no score: the first channels come out as without them, whatever tiles a size of heads takes.
TEST_P(SoftmaxCaches, I08_WideHeadsLeaveTheFirstChannelsAlone) {
  constexpr Index kSize = 64, kRows = 3, kKeys = 70;
  SoftmaxInputs narrow = random_inputs(random, DType::f32, 1, kRows, kKeys, 1, 1, kSize);
  narrow.scale = 0.1f;
  const std::optional<SoftmaxOutputs> expected = run(narrow);
  for (const Index size : {128, 192, 320}) {
    SoftmaxInputs wide = random_inputs(random, DType::f32, 1, kRows, kKeys, 1, 1, size);
    wide.scale = narrow.scale;
    const auto widen = [&](Array& to, const Array& from, Index rows, bool zeros) {
      for (Index i = 0; i < rows; ++i) {
        for (Index d = 0; d < size; ++d) {
          if (d < kSize) to.set({0, i, 0, d}, from.get({0, i, 0, d}));
          if (d >= kSize && zeros) to.set({0, i, 0, d}, 0.0f);
        }
      }
    };
    widen(wide.q, narrow.q, kRows, true);
    widen(wide.k, narrow.k, kKeys, true);
    widen(wide.v, narrow.v, kKeys, false);
    const std::optional<SoftmaxOutputs> got = run(wide);
    if (!expected || !got) continue;
    for (Index i = 0; i < kRows; ++i) {
      EXPECT_NEAR(got->lse.get({0, i, 0}), expected->lse.get({0, i, 0}), 1e-5) << size;
      for (Index d = 0; d < kSize; ++d) {
        EXPECT_NEAR(got->out.get({0, i, 0, d}), expected->out.get({0, i, 0, d}), 1e-5) << size << " " << d;
      }
    }
  }
}

TEST_P(SoftmaxCaches, RepeatsItsBitsInMemoryOfTheCaller) {
  const SoftmaxInputs inputs = ragged(DType::bf16, 1, 8, 128);
  const std::optional<SoftmaxOutputs> first = run(inputs);
  if (!first) return;
  SoftmaxCall call(inputs, GetParam().device);
  Execution with_memory = execution();
  const std::size_t bytes = softmax_attention_workspace(call.args, with_memory);
  const GuardedBuffer workspace(GetParam().device, bytes);
  with_memory.workspace = workspace.data();
  with_memory.workspace_bytes = bytes;
  ASSERT_TRUE(attend(call.args, with_memory));
  EXPECT_EQ(call.outputs().out.values, first->out.values);
  EXPECT_EQ(call.outputs().lse.values, first->lse.values);
  EXPECT_TRUE(workspace.guards_intact());
}

TEST_P(SoftmaxCaches, C10_WindowsAndTilesOfAnyKeysEnd) {
  for (const Index keys : {0, 1, 255, 256, 257}) {
    for (const Index window : {-1, 0, 1, 200, 511}) {
      for (const Index queries : {1, 3, 65}) {
        SoftmaxInputs inputs = random_inputs(random, DType::f32, 1, queries, keys, 2, 1, 16);
        inputs.causal = true;
        inputs.window_left = window;
        expect_matches_oracle(inputs);
      }
    }
  }
}

TEST_P(SoftmaxCaches, I04_PagesBeyondTwoToThe31) {
  constexpr Index kPageStride = (Index{1} << 29) + 64;  // page 4 starts beyond
  const SoftmaxInputs inputs = paged(random_inputs(random, DType::bf16, 1, 1, 20, 2, 1, 64), 8, random);
  SoftmaxCall call(inputs, GetParam().device);
  const Index pages = call.args.k.shape[0], page = call.args.k.elements() / pages;
  constexpr std::size_t kSize = 2;
  std::unique_ptr<Sparse> memory;
  try {
    memory = std::make_unique<Sparse>(GetParam().device, static_cast<std::size_t>((pages - 1) * kPageStride + 2 * page) * kSize);
  } catch (const std::runtime_error& error) {
    GTEST_SKIP() << error.what();
  }
  // Each page's values lie behind its keys.
  const auto spread = [&](ConstTensor& view, Index offset) {
    for (Index i = 0; i < pages; ++i) {
      const auto from = static_cast<std::size_t>(i * page) * kSize, to = static_cast<std::size_t>(i * kPageStride + offset) * kSize;
      std::vector<char> bytes(static_cast<std::size_t>(page) * kSize);
      device_download(GetParam().device, bytes.data(), static_cast<const char*>(view.data) + from, bytes.size());
      device_upload(GetParam().device, memory->data() + to, bytes.data(), bytes.size());
    }
    view.data = memory->data() + static_cast<std::size_t>(offset) * kSize;
    view.strides[0] = kPageStride;
  };
  spread(call.args.k, 0);
  spread(call.args.v, page);
  if (attend(call.args, execution())) expect_matches(inputs, call.outputs(), softmax_oracle(inputs), GetParam().rounds_weights);
}

EVERY_SOFTMAX_KERNEL(SoftmaxCaches);

}  // namespace
}  // namespace delta_attention::test
