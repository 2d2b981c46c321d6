// The stages that meet the state: D correct_micro_chunk, C read_out, B advance, each alone on random factors and a random state;
// then the normaliser.
//
// Tolerances count roundings: a result of n float32 operations is off by at most n * 2^-24 times the sum of its terms' absolute
// values.

#include "api/check.h"
#include "cuda/stages_test.cuh"

namespace delta_attention::test {
namespace {

constexpr int kIndex = 1;  // the micro-chunk that is stepped over: not the first, so that offsets count
constexpr int kFirst = kIndex * kMicroChunk;

/// The other warps only help to load and prepare.
template <class P>
__device__ bool steps() {
  return threadIdx.x / kWarpSize < P::kStepWarps;
}

template <class P>
__device__ MicroChunkView chunk_of(const SharedRun<P>& shared) {
  return shared.micro_chunk(kIndex, threadIdx.x / kWarpSize);
}

/// The lane's part of a state [kKeyTile][kSlice].
template <class P>
__device__ typename P::Tile tile_of(const LaneRole<P>& role, const float* state) {
  typename P::Tile tile;
  for (int r = 0; r < P::kRows; ++r) tile.cell[r][0].set(state[role.row(r) * P::kSlice + role.column]);
  return tile;
}

/// The lane's column of corrections [8][kSlice].
template <class P>
__device__ void load_corrections(const LaneRole<P>& role, const float* from, float (&u)[kMicroChunk][1]) {
  for (int j = 0; j < kMicroChunk; ++j) u[j][0] = from[j * P::kSlice + role.column];
}

template <class P>
struct Correct {
  int tokens;
  const float* state;
  float* u;  // [lanes of a column][8][kSlice]
  __device__ void operator()(const SharedRun<P>& shared) const {
    if (!steps<P>()) return;
    const LaneRole<P> role;
    float mine[kMicroChunk][1];
    const MicroChunkView chunk = chunk_of(shared);
    float predicted[1];
    multiply_state<P>(tile_of<P>(role, state), role, {chunk.w}, predicted);
    correct_micro_chunk<P>(chunk, tokens, role, predicted[0], mine);
    for (int j = 0; j < kMicroChunk; ++j) u[(role.token * kMicroChunk + j) * P::kSlice + role.column] = mine[j][0];
  }
};

template <class P>
struct ReadOut {
  const float *state, *u;
  float* o;  // [8][kSlice]
  __device__ void operator()(const SharedRun<P>& shared) const {
    if (!steps<P>()) return;
    const LaneRole<P> role;
    float mine[kMicroChunk][1];
    load_corrections<P>(role, u, mine);
    const MicroChunkView chunk = chunk_of(shared);
    float product[1];
    multiply_state<P>(tile_of<P>(role, state), role, {chunk.q}, product);
    o[role.token * P::kSlice + role.column] = read_out<P>(chunk, role, product[0], mine);
  }
};

template <class P>
struct Advance {
  const float* u;
  float* state;
  __device__ void operator()(const SharedRun<P>& shared) const {
    if (!steps<P>()) return;
    const LaneRole<P> role;
    float mine[kMicroChunk][1];
    load_corrections<P>(role, u, mine);
    typename P::Tile tile = tile_of<P>(role, state);
    advance<P>(chunk_of(shared), role, mine, tile);
    for (int r = 0; r < P::kRows; ++r) state[role.row(r) * P::kSlice + role.column] = tile.cell[r][0].value();
  }
};

template <class P>
class StepStages : public StageTest {
 protected:
  static constexpr int kTile = P::kKeyTile, kSlice = P::kSlice;
  /// S^T x: a lane's rows, one fused operation each, then the steps across the lanes of a column.
  static constexpr int kProductRoundings = P::kRows + 3;
  static_assert(P::kRowLanes == 8, "3 steps across the lanes");

  void SetUp() override {
    StageTest::SetUp();
    for (std::vector<float>* array : {&run.w, &run.q, &run.k, &run.u, &run.a_matrix}) draw(*array, random);
    for (float& b : run.decay_end) b = static_cast<float>(uniform(random, 0, 1));
    draw(state, random);
    draw(corrections, random);
  }

  // Factors of the micro-chunk.
  float& w(int i, int c) { return run.w[(kFirst + i) * kTile + c]; }
  float& q(int i, int c) { return run.q[(kFirst + i) * kTile + c]; }
  float& r(int i, int c) { return run.k[(kFirst + i) * kTile + c]; }
  float& value(int i, int c) { return run.u[(kFirst + i) * P::kColumnStride + c]; }
  float& weight(int i, int j) { return run.a_matrix[(kFirst + i) * kMicroChunk + j]; }
  double decay_end(int c) const {
    return P::kGate == Gate::channel ? run.decay_end[kIndex * kTile + c] : run.decay_end[kIndex];
  }

  std::vector<float> correct(int tokens) {
    const DeviceVector<float> s(state), u(nans(P::kRowLanes * kMicroChunk * kSlice));
    run_stage(Correct<P>{tokens, s.data(), u.data()}, run);
    return u.get();
  }
  std::vector<float> read_out() {
    const DeviceVector<float> s(state), u(corrections), o(nans(kMicroChunk * kSlice));
    run_stage(ReadOut<P>{s.data(), u.data(), o.data()}, run);
    return o.get();
  }
  std::vector<float> advance() {
    const DeviceVector<float> s(state), u(corrections);
    run_stage(Advance<P>{u.data(), s.data()}, run);
    return s.get();
  }

  RunValues<P> run{2 * kMicroChunk};
  std::vector<float> state = std::vector<float>(kTile * kSlice), corrections = std::vector<float>(kMicroChunk * kSlice);
};

using Policies = ::testing::Types<Policy<Update::delta, Gate::channel, PlainSum, 64, 32>,
                                  Policy<Update::delta, Gate::scalar, PlainSum, 128, 16>,
                                  Policy<Update::additive, Gate::channel, PlainSum, 128, 32>>;
TYPED_TEST_SUITE(StepStages, Policies, PolicyName);

TYPED_TEST(StepStages, CorrectMatchesFloat64) {
  using P = TypeParam;
  const std::vector<float> got = this->correct(kMicroChunk);
  for (int i = 0; i < kMicroChunk; ++i) {
    for (int c = 0; c < P::kSlice; ++c) {
      double u = this->value(i, c), size = std::fabs(u);
      for (int row = 0; row < P::kKeyTile && P::kUpdate == Update::delta; ++row) {
        const double term = static_cast<double>(this->state[row * P::kSlice + c]) * this->w(i, row);
        u -= term;
        size += std::fabs(term);
      }
      const Expected expected = {u, P::kUpdate == Update::delta ? (this->kProductRoundings + 1) * kRounding * size : 0};
      for (int lane = 0; lane < P::kRowLanes; ++lane) {
        expect_near(got[(lane * kMicroChunk + i) * P::kSlice + c], expected, at("u", i, c));
      }
    }
  }
}

// Whatever the state and the factors of tokens that do not exist hold.
TYPED_TEST(StepStages, CorrectIsZeroPastTheEnd) {
  using P = TypeParam;
  const int tokens = static_cast<int>(pick(this->random, 1, kMicroChunk - 1));
  const std::vector<float> clean = this->correct(kMicroChunk);
  for (int i = tokens; i < kMicroChunk; ++i) {
    for (int row = 0; row < P::kKeyTile; ++row) this->w(i, row) = INFINITY;
    for (int c = 0; c < P::kSlice; ++c) this->value(i, c) = NAN;
  }
  const std::vector<float> got = this->correct(tokens);
  for (int lane = 0; lane < P::kRowLanes; ++lane) {
    const int first = lane * kMicroChunk;
    expect_same_rows(got, clean, first, first + tokens, P::kSlice, P::kSlice, "u");
    const std::vector<float> zero(got.size(), 0.0f);
    expect_same_rows(got, zero, first + tokens, first + kMicroChunk, P::kSlice, P::kSlice, "u");
  }
  for (float& cell : this->state) cell = INFINITY;
  const std::vector<float> infinite = this->correct(tokens);
  for (int i = tokens; i < kMicroChunk; ++i) EXPECT_EQ(infinite[i * P::kSlice], 0.0f) << at("u", i, 0);
}

TYPED_TEST(StepStages, ReadOutMatchesFloat64) {
  using P = TypeParam;
  const std::vector<float> got = this->read_out();
  for (int i = 0; i < kMicroChunk; ++i) {
    for (int c = 0; c < P::kSlice; ++c) {
      double o = 0, size = 0;
      const auto add = [&](double x, double y) {
        o += x * y;
        size += std::fabs(x * y);
      };
      for (int row = 0; row < P::kKeyTile; ++row) add(this->state[row * P::kSlice + c], this->q(i, row));
      for (int j = 0; j <= i; ++j) add(this->weight(i, j), this->corrections[j * P::kSlice + c]);
      // Each weighted correction is a product and a sum.
      const Expected expected = {o, (this->kProductRoundings + 2 * kMicroChunk) * kRounding * size};
      expect_near(got[i * P::kSlice + c], expected, at("o", i, c));
    }
  }
}

TYPED_TEST(StepStages, ReadOutIgnoresLaterTokens) {
  using P = TypeParam;
  const std::vector<float> clean = this->read_out();
  const int first_bad = static_cast<int>(pick(this->random, 1, kMicroChunk - 1));
  for (int j = first_bad; j < kMicroChunk; ++j) {
    for (int row = 0; row < P::kKeyTile; ++row) this->q(j, row) = this->w(j, row) = this->r(j, row) = NAN;
    for (int c = 0; c < P::kSlice; ++c) this->value(j, c) = this->corrections[j * P::kSlice + c] = NAN;
    for (int i = 0; i < kMicroChunk; ++i) this->weight(i, j) = this->weight(j, i) = NAN;
  }
  const std::vector<float> got = this->read_out();
  expect_same_rows(got, clean, 0, first_bad, P::kSlice, P::kSlice, "o");
}

TYPED_TEST(StepStages, AdvanceMatchesFloat64) {
  using P = TypeParam;
  const std::vector<float> got = this->advance();
  for (int row = 0; row < P::kKeyTile; ++row) {
    for (int c = 0; c < P::kSlice; ++c) {
      double s = this->decay_end(row) * this->state[row * P::kSlice + c], size = std::fabs(s);
      for (int j = 0; j < kMicroChunk; ++j) {
        const double term = static_cast<double>(this->r(j, row)) * this->corrections[j * P::kSlice + c];
        s += term;
        size += std::fabs(term);
      }
      // The decay and 8 fused additions.
      expect_near(got[row * P::kSlice + c], {s, (1 + kMicroChunk) * kRounding * size}, at("S", row, c));
    }
  }
}

// A neutral token has R = 0 and u = 0; b_7 = 1 with it alone.
TYPED_TEST(StepStages, AdvanceOverNeutralTokensKeepsTheState) {
  for (float& x : this->run.k) x = 0.0f;
  for (float& x : this->run.decay_end) x = 1.0f;
  for (float& u : this->corrections) u = 0.0f;
  EXPECT_EQ(this->advance(), this->state);
}

/// From the caller's initial_state to the next run, and from there to the caller's final_state.
template <class P>
struct PassState {
  Problem problem;
  Block first, last;
  float* handoff;
  __device__ void operator()(const SharedRun<P>&) const {
    if (!steps<P>()) return;
    const LaneRole<P> role;
    typename P::Tile before, after;
    load_state<P>(problem, first, role, handoff, before);
    store_state<P>(problem, first, role, handoff, before);
    load_state<P>(problem, last, role, handoff, after);
    store_state<P>(problem, last, role, handoff, after);
  }
};

TYPED_TEST(StepStages, StatePassesFromRunToRunUnchanged) {
  using P = TypeParam;
  for (StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
    Case c;
    c.recurrence = {P::kUpdate, P::kGate, false};
    c.batch = 2;
    c.value_heads = 2;
    c.key_dim = P::kKeyTile - 7;
    c.value_dim = P::kSlice + 5;
    c.with_initial_state = true;
    c.state_layout = layout;
    const Inputs inputs = make_inputs(c, this->random);
    const Call call(inputs, cuda());
    Block first = {}, last = {};
    first.sequence = first.batch = first.value_head = 1;
    first.first_column = P::kSlice;  // the last slice, of 5 columns
    first.columns = 5;
    last = first;
    first.first_run = last.last_run = true;
    const DeviceVector<float> handoff(nans(P::kKeyTile * P::kSlice));
    run_stage(PassState<P>{check(call.args), first, last, handoff.data()}, this->run);

    const Array got = call.outputs().final_state;
    for (Index i = 0; i < got.size(); ++i) {
      const Index column = i % c.value_dim, sequence_and_head = i / (c.value_dim * c.key_dim);
      if (sequence_and_head == 3 && column >= P::kSlice) {
        EXPECT_EQ(got.values[i], inputs.initial_state.values[i]) << "element " << i;
      } else {
        EXPECT_TRUE(std::isnan(got.values[i])) << "element " << i << " belongs to another block";
      }
    }
    for (float x : handoff.get()) EXPECT_FALSE(std::isnan(x)) << "part of the hand-off was not written";
  }
}

template <class P>
struct Normalize {
  Problem problem;
  Block block;
  int micro_chunks;
  float* handoff;
  __device__ void operator()(const SharedRun<P>& shared) const {
    if (threadIdx.x / kWarpSize == kWarps - 1) normalize_run<P>(problem, block, shared, micro_chunks, handoff);
  }
};

template <class P>
class NormalizeStage : public StageTest {
 protected:
  static constexpr int kTile = P::kKeyTile, kMicroChunks = 3, kTokens = kMicroChunks * kMicroChunk;
  static constexpr int kKeyDim = kTile - 7;

  /// Random factors, 0 in channels past K, as prepare_micro_chunk leaves them.
  RunValues<P> factors() {
    RunValues<P> run(kTokens);
    for (std::vector<float>* array : {&run.q, &run.k, &run.a_matrix}) draw(*array, random);
    for (std::vector<float>* rows : {&run.q, &run.k}) {
      for (std::size_t i = 0; i < rows->size(); ++i) {
        if (i % kTile >= kKeyDim) (*rows)[i] = 0.0f;
      }
    }
    for (float& b : run.decay_end) b = static_cast<float>(uniform(random, 0, 1));
    return run;
  }

  Inputs inputs() {
    Case c;
    c.recurrence = {P::kUpdate, P::kGate, true};
    c.batch = c.tokens = 2;
    c.value_heads = 2;
    c.key_dim = kKeyDim;
    c.value_dim = P::kSlice;
    c.with_initial_state = true;
    return make_inputs(c, random);
  }

  static Block block_of(bool first_run, bool last_run) {
    Block block = {};
    block.sequence = block.batch = block.value_head = 1;
    block.tokens = kTokens;
    block.columns = P::kSlice;
    block.first_run = first_run;
    block.last_run = last_run;
    return block;
  }

  /// Compares denominators and returns what z must be after the run.
  std::vector<Expected> expect_denominators(const RunValues<P>& run, const std::vector<float>& denominators,
                                            const std::vector<float>& start) {
    std::vector<double> z(start.begin(), start.end()), size;
    for (double x : z) size.push_back(std::fabs(x));
    for (int m = 0; m < kMicroChunks; ++m) {
      for (int i = 0; i < kMicroChunk; ++i) {
        const int t = m * kMicroChunk + i;
        double sum = 0, sum_size = 0;
        for (int c = 0; c < kTile; ++c) {
          sum += z[c] * run.q[t * kTile + c];
          sum_size += size[c] * std::fabs(run.q[t * kTile + c]);
        }
        for (int j = 0; j <= i; ++j) {
          sum += run.a_matrix[t * kMicroChunk + j];
          sum_size += std::fabs(run.a_matrix[t * kMicroChunk + j]);
        }
        // z itself, a lane's K/32 terms of two roundings, one entry of A, 5 steps across the lanes.
        const int roundings = kStepRoundings * m + 2 * kTile / kWarpSize + 1 + 5;
        expect_near(denominators[t], {sum, roundings * kRounding * sum_size}, at("denominator", m, i));
      }
      for (int c = 0; c < kTile; ++c) {
        const double b = run.decay_end[P::kGate == Gate::channel ? m * kTile + c : m];
        z[c] *= b;
        size[c] *= b;
        for (int j = 0; j < kMicroChunk; ++j) {
          const double key = run.k[(m * kMicroChunk + j) * kTile + c];
          z[c] += key;
          size[c] += std::fabs(key);
        }
      }
    }
    std::vector<Expected> end;
    for (int c = 0; c < kTile; ++c) end.push_back({z[c], kStepRoundings * kMicroChunks * kRounding * size[c]});
    return end;
  }

 private:
  static constexpr int kStepRoundings = 1 + kMicroChunk;  // of z over a micro-chunk: the decay and 8 additions
};

using NormalizePolicies = ::testing::Types<Policy<Update::additive, Gate::channel, PlainSum, 64, 32>,
                                           Policy<Update::additive, Gate::scalar, PlainSum, 128, 16>>;
TYPED_TEST_SUITE(NormalizeStage, NormalizePolicies, PolicyName);

TYPED_TEST(NormalizeStage, FirstRunStartsFromTheCallersNormalizerAndHandsItOn) {
  using P = TypeParam;
  const RunValues<P> run = this->factors();
  const Inputs inputs = this->inputs();
  const Call call(inputs, cuda());
  const DeviceVector<float> handoff(nans(P::kKeyTile));
  const RunValues<P> after =
      run_stage(Normalize<P>{check(call.args), this->block_of(true, false), this->kMicroChunks, handoff.data()}, run);

  std::vector<float> start(P::kKeyTile, 0.0f);
  for (int c = 0; c < this->kKeyDim; ++c) start[c] = inputs.initial_normalizer.get({1, 1, c});
  const std::vector<Expected> end = this->expect_denominators(run, after.denominator, start);
  const std::vector<float> got = handoff.get();
  for (int c = 0; c < P::kKeyTile; ++c) expect_near(got[c], end[c], at("z", c, 0));
  EXPECT_TRUE(call.outputs_untouched()) << "only the last run writes final_normalizer";
}

TYPED_TEST(NormalizeStage, LastRunTakesTheHandoffAndWritesTheCallersNormalizer) {
  using P = TypeParam;
  const RunValues<P> run = this->factors();
  const Inputs inputs = this->inputs();
  const Call call(inputs, cuda());
  std::vector<float> start(P::kKeyTile, 0.0f);
  for (int c = 0; c < this->kKeyDim; ++c) start[c] = static_cast<float>(uniform(this->random, -1, 1));
  const DeviceVector<float> handoff(start);
  const RunValues<P> after =
      run_stage(Normalize<P>{check(call.args), this->block_of(false, true), this->kMicroChunks, handoff.data()}, run);

  const std::vector<Expected> end = this->expect_denominators(run, after.denominator, start);
  const Array got = call.outputs().final_normalizer;
  for (int c = 0; c < this->kKeyDim; ++c) expect_near(got.get({1, 1, c}), end[c], at("z", c, 0));
  EXPECT_EQ(handoff.get(), start);
}

}  // namespace
}  // namespace delta_attention::test
