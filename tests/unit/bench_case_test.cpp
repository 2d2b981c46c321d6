// The cases of the benchmarks: their bytes, counted by hand, and that the library takes their arguments.

#include "support/case.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace {

using bench::Case;
using bench::Decay;
using delta_attention::DType;

/// Three tokens in bf16, one head of q and k for two value heads, two channels.
Case small(const char* preset) {
  Case c;
  c.preset = preset;
  c.dtype = DType::bf16;
  c.decay = Decay::strong;
  c.fused = c.initial_state = true;
  c.tokens = 3;
  c.heads = 1;
  c.value_heads = c.dim = 2;
  return c;
}

TEST(BenchCase, CountsEveryOperandOnce) {
  const double tokens = 2 * (2 * 3 * 2) + 2 * (2 * 3 * 2 * 2), states = 2 * (4 * 2 * 2 * 2);  // q and k, v and out; initial and final
  const double beta = 2 * 3 * 2, rates = 4 * 2;
  EXPECT_EQ(least_bytes(small("kda")), tokens + states + beta + rates + 2 * (3 * 2 * 2) + 4 * (2 * 2));
  EXPECT_EQ(least_bytes(small("gated_delta_net")), tokens + states + beta + rates + 2 * (3 * 2) + 4 * 2);

  Case bare = small("kda");
  bare.fused = bare.initial_state = bare.final_state = false;
  EXPECT_EQ(least_bytes(bare), tokens + 2 * beta + 4 * (3 * 2 * 2));  // beta and the gate are f32
}

TEST(BenchCase, NamesTheShape) {
  EXPECT_EQ(small("kda").name("fast", "program"), "program/kda/fast/bf16/B:1 T:3 H:1 HV:2 K:2 V:2 N:1 gate:strong");
}

TEST(BenchCase, TheLibraryTakesItsArguments) {
  for (const char* preset : {"kda", "gated_delta_net", "delta_net"}) {
    Case c = small(preset);
    if (c.preset == "delta_net") c.decay = Decay::none;
    c.lengths = {1, 2};
    const bench::Sizes sizes = operand_sizes(c);
    std::array<std::vector<std::byte>, bench::kOperands> memory;
    bench::Addresses at;
    for (int i = 0; i < bench::kOperands; ++i) {
      memory[i].resize(sizes[i]);
      at[i] = memory[i].data();
    }
    const std::int32_t offsets[] = {0, 1, 3};
    at[bench::kCuSeqlens] = const_cast<std::int32_t*>(offsets);
    auto* state = static_cast<float*>(at[bench::kInitialState]);
    state[0] = 1.0f;
    const bench::ForwardArgs args = make_args(c, at, delta_attention::cpu());
    EXPECT_NO_THROW(delta_attention_forward(args)) << preset;
    // Keys are 0: the state of the first sequence only decays.
    const float decayed = static_cast<const float*>(at[bench::kFinalState])[0];
    if (args.recurrence.gate == delta_attention::Gate::none) {
      EXPECT_EQ(decayed, 1.0f);
    } else {
      EXPECT_GT(decayed, 0.0f);
      EXPECT_LT(decayed, 1.0f);
    }
  }
}

}  // namespace
