// Problems drawn at random from everything that softmax attention takes, against the float64 oracle.

#include <algorithm>
#include <limits>

#include "support/softmax.h"

namespace delta_attention::test {
namespace {

class SoftmaxSweep : public SoftmaxTest {
 protected:
  void choose_lengths(SoftmaxInputs& inputs, Index batch, Index keys) {
    for (Index b = 0; b < batch; ++b) inputs.valid_len.push_back(pick(random, 0, keys));
  }

  void choose_mask(SoftmaxInputs& inputs, Index batch, Index heads, Index queries, Index keys) {
    const auto extent = [&](Index full) { return pick(random, 0, 1) == 0 ? 1 : full; };
    inputs.mask = Array(DType::f32, {extent(batch), extent(heads), extent(queries), keys});
    for (float& x : inputs.mask.values) {
      x = pick(random, 0, 4) == 0 ? -std::numeric_limits<float>::infinity() : static_cast<float>(uniform(random, -2, 2));
    }
  }

  /// Cuts `total` into `sequences` parts, some of them empty.
  std::vector<Index> cuts(Index total, Index sequences) {
    std::vector<Index> offsets = {0, total};
    for (Index n = 1; n < sequences; ++n) offsets.push_back(pick(random, 0, total));
    std::sort(offsets.begin(), offsets.end());
    return offsets;
  }

  /// Any size, and often one that tensor cores take.
  Index any_size() { return pick(random, 0, 2) == 0 ? pick_from(random, std::vector<Index>{64, 128}) : pick(random, 1, 80); }

  SoftmaxInputs sample() {
    const bool packed = pick(random, 0, 3) == 0;
    const Index batch = packed ? 1 : pick(random, 1, 3), queries = pick(random, 1, 40), keys = pick(random, 1, 70);
    const Index key_heads = pick(random, 1, 3), heads = key_heads * pick(random, 1, 3), size = any_size();
    const DType dtype = pick_from(random, std::vector<DType>{DType::f32, DType::f16, DType::bf16});
    SoftmaxInputs inputs = random_inputs(random, dtype, batch, queries, keys, heads, key_heads, size);
    inputs.layout = pick_from(random, std::vector<Layout>{Layout::bthd, Layout::bhtd, Layout::padded});
    inputs.causal = pick(random, 0, 1) == 1;
    inputs.alignment = pick(random, 0, 1) == 1 ? Alignment::top_left : Alignment::bottom_right;
    if (pick(random, 0, 2) == 0) inputs.window_left = pick(random, 0, 20);
    if (pick(random, 0, 2) == 0) inputs.softcap = static_cast<float>(uniform(random, 0.5, 30));
    if (pick(random, 0, 2) == 0) inputs.scale = static_cast<float>(uniform(random, 0.05, 0.5));
    if (packed) {
      const Index sequences = pick(random, 1, 4);
      inputs.cu_seqlens_q = cuts(queries, sequences);
      inputs.cu_seqlens_kv = cuts(keys, sequences);
    } else {
      if (pick(random, 0, 2) == 0) choose_lengths(inputs, batch, keys);
      if (pick(random, 0, 2) == 0) choose_mask(inputs, batch, heads, queries, keys);
    }
    return inputs;
  }
};

TEST_P(SoftmaxSweep, MatchesReferenceOnSampledProblems) {
  const int samples = small_run() ? 25 : 250;
  for (int n = 0; n < samples && !HasFailure(); ++n) {
    SCOPED_TRACE("sample " + std::to_string(n));
    expect_matches_oracle(sample());
  }
}

// Several blocks of rows and tiles of keys, the last ones not full.
TEST_P(SoftmaxSweep, MatchesReferenceOnLongerSequences) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const Index size : {64, 128}) {
      for (const bool causal : {false, true}) {
        const Index queries = pick(random, 130, 300), keys = pick(random, 65, 400);
        SoftmaxInputs inputs = random_inputs(random, dtype, 1, queries, keys, 2, 1, size);
        inputs.causal = causal;
        if (causal && pick(random, 0, 1) == 0) inputs.window_left = pick(random, 0, 150);
        expect_matches_oracle(inputs);
      }
    }
  }
}

EVERY_SOFTMAX_KERNEL(SoftmaxSweep);

}  // namespace
}  // namespace delta_attention::test
