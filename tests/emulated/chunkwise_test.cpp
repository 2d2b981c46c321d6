// The device code of v5_chunkwise on host threads, tensor cores included: its numbers against the oracle without a GPU, and, built with
// ThreadSanitizer, every access that no barrier orders. Blocks of a launch share nothing and run one after another.

#include "emulated/gpu_threads.h"
// The stand-ins come first.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "api/check.h"
#include "cuda/delta/chunkwise_prepare.cuh"
#include "cuda/delta/chunkwise_three_warps.cuh"
#include "cuda/delta/chunkwise_two_warps.cuh"
#include "support/run.h"

namespace delta_attention::test {
namespace {

using namespace chunkwise;

/// Shared memory of a block, as uninitialised as the GPU's, where its addresses start.
class BlockMemory {
 public:
  explicit BlockMemory(std::size_t bytes) : bytes_(bytes + kAlignment, 0xff) {}
  unsigned char* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return bytes_.data() + (kAlignment - address % kAlignment) % kAlignment;
  }

 private:
  static constexpr std::size_t kAlignment = 1024;
  std::vector<unsigned char> bytes_;
};

void run_in(BlockMemory& memory, int threads, const std::function<void()>& body) {
  run_block(threads, [&] {
    this_gpu_thread.shared_memory = reinterpret_cast<const char*>(memory.data());
    body();
  });
}

/// How a chain is run, and how many blocks that takes.
struct Shape {
  int teams, stages;
  int states = 1;
};

template <template <class, int> class Team, class Element, int kKeys>
struct Widths {
  using ForPrepare = PreparePolicy<Element, kKeys>;
  using ForChain = Team<Element, kKeys>;
};

template <class Widths>
class EmulatedChunkwise : public ::testing::Test {
 protected:
  using ForPrepare = typename Widths::ForPrepare;
  using ForChain = typename Widths::ForChain;
  Random random = random_for("EmulatedChunkwise");

  Case ordinary(Recurrence recurrence) {
    Case c;
    c.recurrence = recurrence;
    c.dtype = std::is_same_v<typename ForPrepare::Element, float> ? DType::f32
              : std::is_same_v<typename ForPrepare::Element, Half> ? DType::f16 : DType::bf16;
    c.tokens = kChunk + 5;
    c.key_dim = ForPrepare::kKeys - 3;
    c.value_dim = ForPrepare::kTerms > 1 ? ForChain::kColumns - 3 : ForChain::kColumns + 5;  // several terms take the time of several
    c.with_initial_state = true;
    c.qk_l2norm = true;
    return c;
  }

  Outputs outputs_of(const Inputs& inputs, Shape shape) {
    Call call(inputs, cpu());
    const Problem p = check(call.args);
    const Chunking chunking = Chunking::of(p);
    const std::int64_t blocks = chunking.numbers(p) * p.value_heads;
    std::vector<uint4> factors(static_cast<std::size_t>(blocks * ForPrepare::kImage.bytes()) / sizeof(uint4) + 1);
    Params params;
    params.problem = p;
    params.factors = reinterpret_cast<unsigned char*>(factors.data());
    params.chunks = chunking.chunks(p.tokens);
    params.group = static_cast<int>(p.value_heads / p.heads);
    for (std::int64_t block = 0; block < blocks; ++block) {
      BlockMemory memory(sizeof(PrepareShared<ForPrepare>));
      auto& shared = *reinterpret_cast<PrepareShared<ForPrepare>*>(memory.data());
      run_in(memory, ForPrepare::kThreads, [&] { prepare_chunk(params, block, shared); });
    }
    const ChainShared<ForChain> shared = {shape.teams, shape.stages, shape.states};
    const std::int64_t slices = ceil_div(p.value_dim, std::int64_t{shape.teams} * ForChain::kColumns);
    for (std::int64_t block = 0; block < p.sequences * p.value_heads * slices; ++block) {
      BlockMemory memory(static_cast<std::size_t>(shared.bytes()));
      run_in(memory, chain_threads<ForChain>(shape.teams), [&] { run_chain<ForChain>(params, block, shared, memory.data()); });
    }
    return call.outputs();
  }

  void expect_matches_oracle(const Inputs& inputs, Shape shape = {1, 2}) {
    SCOPED_TRACE(inputs.problem.describe());
    constexpr int kTerms = ForPrepare::kTerms;  // of bf16, 8 bits each
    expect_matches(inputs, outputs_of(inputs, shape), oracle(inputs), 8 * kTerms);
  }
};

template <class Element, int kKeys>
using WholeImages = ThreeWarps<Element, kKeys, false>;
template <class Element, int kKeys>
using Sections = ThreeWarps<Element, kKeys, true>;

using AllWidths = ::testing::Types<Widths<WholeImages, BFloat16, 64>, Widths<TwoWarps, BFloat16, 64>, Widths<WholeImages, float, 64>,
                                   Widths<WholeImages, Half, 128>, Widths<Sections, float, 64>>;
TYPED_TEST_SUITE(EmulatedChunkwise, AllWidths);

TYPED_TEST(EmulatedChunkwise, EveryRecurrence) {
  for (Recurrence recurrence : {kda(), gated_delta_net(), delta_net(), gla(), linear()}) {
    if (TypeParam::ForPrepare::kTerms > 1 && recurrence.gate == Gate::none) continue;
    this->expect_matches_oracle(make_inputs(this->ordinary(recurrence), this->random));
  }
}

// Decays that no quotient can express beside slow ones: rows that are summed up pair by pair beside rows that are not.
TYPED_TEST(EmulatedChunkwise, DecaysOfAnyStrength) {
  Inputs inputs = make_inputs(this->ordinary(kda()), this->random);
  const Case& c = inputs.problem;
  for (Index t = 0; t < c.tokens; ++t) {
    for (Index i = 0; i < c.key_dim; ++i) {
      const float strong = t % 5 == 1 ? -std::numeric_limits<float>::infinity() : -20.0f;
      inputs.log_decay.set({0, t, 0, i}, i % 3 == 0 ? strong : -0.01f);
    }
  }
  this->expect_matches_oracle(inputs);
}

// Eight tokens whose decays multiply to less than a normal number, and eight slow ones: the half's decays are no f32 number, those of its second
// part among themselves are.
TYPED_TEST(EmulatedChunkwise, DecaysThatLeaveTheRange) {
  Case c = this->ordinary(gated_delta_net());
  Inputs inputs = make_inputs(c, this->random);
  for (Index t = 0; t < c.tokens; ++t) inputs.log_decay.set({0, t, 0}, t % 16 < 8 ? uniform(this->random, -13.5, -11.0) : -0.01);
  this->expect_matches_oracle(inputs);
}

TYPED_TEST(EmulatedChunkwise, PackedSequencesWithStatesOnTheWay) {
  Case c = this->ordinary(kda());
  c.tokens = 61;
  c.cu_seqlens = {0, 3, 3, 23, 61};
  c.state_interval = TypeParam::ForPrepare::kTerms > 1 ? 36 : 10;
  this->expect_matches_oracle(make_inputs(c, this->random), {2, 3, TypeParam::ForChain::kMostStates});
}

TYPED_TEST(EmulatedChunkwise, FewStages) {
  Case c = this->ordinary(gated_delta_net());
  c.tokens = 2 * kChunk + 5;
  for (int teams : {1, 2}) this->expect_matches_oracle(make_inputs(c, this->random), {teams, TypeParam::ForChain::kLeastStages});
}

// NaN in one value: its column is NaN from there on, and nothing else.
TYPED_TEST(EmulatedChunkwise, NanStaysBehind) {
  for (Recurrence recurrence : {kda(), gla()}) {
    if (TypeParam::ForPrepare::kTerms > 1 && recurrence.update == Update::additive) continue;
    Inputs inputs = make_inputs(this->ordinary(recurrence), this->random);
    inputs.v.set({0, 7, 0, 3}, std::numeric_limits<float>::quiet_NaN());
    const Outputs got = this->outputs_of(inputs, {1, 2});
    for (Index t = 0; t < inputs.problem.tokens; ++t) {
      for (Index j = 0; j < inputs.problem.value_dim; ++j) {
        EXPECT_EQ(std::isnan(got.out.get({0, t, 0, j})), t >= 7 && j == 3) << "token " << t << ", column " << j;
      }
    }
  }
}

// Which kind of teams runs depends on how many chains there are; a chain's bits do not.
TEST(EmulatedTeamsOfBothKinds, GiveTheSameBits) {
  struct Two : EmulatedChunkwise<Widths<TwoWarps, BFloat16, 64>> {
    void TestBody() override {}
    using EmulatedChunkwise::ordinary, EmulatedChunkwise::outputs_of, EmulatedChunkwise::random;
  } two;
  struct Three : EmulatedChunkwise<Widths<WholeImages, BFloat16, 64>> {
    void TestBody() override {}
    using EmulatedChunkwise::outputs_of;
  } three;
  for (Recurrence recurrence : {kda(), gla()}) {
    const Inputs inputs = make_inputs(two.ordinary(recurrence), two.random);
    const Outputs a = two.outputs_of(inputs, {1, 2}), b = three.outputs_of(inputs, {2, 2});
    EXPECT_EQ(a.out.values, b.out.values);
    EXPECT_EQ(a.final_state.values, b.final_state.values);
  }
}

// Chunks of packed sequences have numbers of their own, and no number is beyond the last one.
TEST(EmulatedChunking, PackedSequencesHaveRoom) {
  Random random = random_for("EmulatedChunking");
  for (int repetition = 0; repetition < 2000; ++repetition) {
    const std::int64_t span = pick(random, 0, 1) == 0 ? std::int64_t{1} << 30 : pick(random, 1, 100);
    const Chunking chunking = {span, ceil_div(span, kChunk)};
    const std::int64_t sequences = pick(random, 1, 6);
    std::int64_t begin = 0, beyond = 0;
    for (std::int64_t n = 0; n < sequences; ++n) {
      const std::int64_t first = chunking.first_chunk(n, begin), length = pick(random, 0, 200);
      EXPECT_GE(first, beyond);
      beyond = first + chunking.chunks(length);
      begin += length;
    }
    EXPECT_GE(chunking.first_chunk(sequences, begin), beyond);
  }
}

// Every chunk lies in its sequence, also where offsets in device memory are wrong.
TEST(EmulatedChunking, ChunksLieInTheirSequences) {
  Random random = random_for("EmulatedChunking");
  for (const std::vector<Index>& offsets : {std::vector<Index>{0, 10, 24}, {17, 10, 24}, {20, 22, 24}, {0, 24, 5}}) {
    for (Index interval : {Index{0}, Index{1}, Index{1} << 40}) {
      Case c;
      c.recurrence = delta_net();
      c.cu_seqlens = {0, 10, 24};
      c.tokens = 24;
      c.state_interval = interval;
      const Inputs inputs = make_inputs(c, random);
      Call call(inputs, cpu());
      Params params;
      params.problem = check(call.args);
      const std::vector<std::int64_t> wrong(offsets.begin(), offsets.end());
      params.problem.cu_seqlens.data = wrong.data();
      params.problem.cu_seqlens.dtype = DType::i64;
      const std::int64_t numbers = Chunking::of(params.problem).numbers(params.problem);
      for (std::int64_t number = 0; number < numbers; ++number) {
        run_block(kWarpSize, [&] {
          const ChunkPlace place = chunk_place_of(params, static_cast<unsigned>(number * params.problem.value_heads), 0);
          if (!place.exists || threadIdx.x != 0) return;
          EXPECT_GE(place.tokens.begin, 0);
          EXPECT_GT(place.tokens.rows, 0);
          EXPECT_LE(place.tokens.begin + place.tokens.rows, c.tokens);
        });
      }
    }
  }
}

}  // namespace
}  // namespace delta_attention::test
