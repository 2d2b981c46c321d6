// The factors of a micro-chunk (cuda/device/micro_chunk.cuh) against its formulas in float64.
//
// Tolerances count roundings: a result of n float32 operations is off by at most n * 2^-24 times the sum of its terms' absolute
// values. Decays take up to 8 multiplications, a lane's part of a product K/32 terms of two roundings, its sum over lanes 5.

#include <array>

#include "cuda/stages_test.cuh"

namespace delta_attention::test {
namespace {

template <class P>
struct Prepare {
  int micro_chunks;
  __device__ void operator()(const SharedRun<P>& shared) const {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    for (int m = warp; m < micro_chunks; m += kWarps) {
      prepare_micro_chunk<P::kUpdate, P::kGate, P::kKeyTile, P::kSlice, P::kColumnStride>(shared.micro_chunk(m, warp),
                                                                                          lane);
    }
  }
};

using Matrix = std::array<std::array<double, kMicroChunk>, kMicroChunk>;

/// One micro-chunk of a run before the stage, and what the stage must make of it.
template <class P>
class MicroChunkTruth {
 public:
  MicroChunkTruth(const RunValues<P>& before, int index) : run_(before), first_(index * kMicroChunk) { multiply(); }

  int first() const { return first_; }
  double q(int i, int c) const { return run_.q[(first_ + i) * P::kKeyTile + c]; }
  double k(int i, int c) const { return run_.k[(first_ + i) * P::kKeyTile + c]; }
  double v(int i, int c) const { return run_.u[(first_ + i) * P::kColumnStride + c]; }
  double g(int i, int c) const {
    return P::kGate == Gate::channel ? run_.w[(first_ + i) * P::kKeyTile + c] : run_.log_decay[first_ + i];
  }
  double beta(int i) const { return run_.beta[first_ + i]; }
  /// d_ij of channel c; b_i is since(i, -1, c).
  double since(int i, int j, int c) const {
    double d = 1;
    for (int t = j + 1; t <= i; ++t) d *= std::exp(g(t, c));
    return d;
  }

  Expected decayed_query(int i, int c) const { return of(since(i, -1, c) * q(i, c), kDecayRoundings + 1); }
  Expected decayed_key(int j, int c) const { return of(since(kMicroChunk - 1, j, c) * k(j, c), kDecayRoundings); }
  /// One exponential of a sum of 8: each partial sum is rounded, and exp turns the sum's absolute error into a relative one. Near 1
  /// half an ulp of the result and of expm1's small part, else expf.
  Expected decay_end(int c) const {
    const double b = since(kMicroChunk - 1, -1, c);
    double sum = 0;
    for (int i = 0; i < kMicroChunk; ++i) sum += std::fabs(g(i, c));
    return {b, b == 0 ? 0 : (3 + kMicroChunk * sum) * kRounding * b};
  }
  Expected a_entry(int i, int j) const { return {queries_[i][j], kProductRoundings * kRounding * query_sizes_[i][j]}; }
  /// Column c of W, all 8 tokens.
  std::array<Expected, kMicroChunk> w_column(int c) const {
    return solve([&](int i) { return since(i, -1, c) * k(i, c); });
  }
  std::array<Expected, kMicroChunk> u_column(int c) const {
    if (P::kUpdate == Update::delta) return solve([&](int i) { return v(i, c); });
    std::array<Expected, kMicroChunk> u;
    for (int i = 0; i < kMicroChunk; ++i) u[i] = of(beta(i) * v(i, c), 1);
    return u;
  }

 private:
  // A decay over up to 8 tokens: CUDA's expf is within 1 ulp of the correctly rounded result, 3 roundings of 2^-24 in all, and each
  // factor is multiplied on.
  static constexpr int kDecayRoundings = kMicroChunk * (3 + 1);
  static constexpr int kProductRoundings = kDecayRoundings + 2 * P::kKeyTile / kWarpSize + 5;
  static constexpr int kRowRoundings = kProductRoundings + 2 * kMicroChunk;  // and 7 subtractions, 7 products, beta

  static Expected of(double value, int roundings) { return {value, roundings * kRounding * std::fabs(value)}; }

  void multiply() {
    for (int i = 0; i < kMicroChunk; ++i) {
      for (int j = 0; j <= i; ++j) {
        for (int c = 0; c < P::kKeyTile; ++c) {
          const double key = since(i, j, c) * k(j, c);
          keys_[i][j] += k(i, c) * key;
          key_sizes_[i][j] += std::fabs(k(i, c) * key);
          queries_[i][j] += q(i, c) * key;
          query_sizes_[i][j] += std::fabs(q(i, c) * key);
        }
      }
    }
  }

  /// x_i = beta_i (right_i - sum_{j<i} <k_i, d_ij k_j> x_j). A row's own rounding errors are those of its terms; an error in x_j
  /// reaches later rows as x_j itself does: through the same recursion.
  template <class Right>
  std::array<Expected, kMicroChunk> solve(Right right) const {
    std::array<Expected, kMicroChunk> x;
    for (int i = 0; i < kMicroChunk; ++i) {
      double rest = right(i), size = std::fabs(rest);
      for (int j = 0; j < i; ++j) {
        rest -= keys_[i][j] * x[j].value;
        size += key_sizes_[i][j] * std::fabs(x[j].value);
      }
      x[i].value = beta(i) * rest;
      const double own = kRowRoundings * kRounding * std::fabs(beta(i)) * size;
      const std::array<double, kMicroChunk> reach = spread_of_error(i);
      for (int row = i; row < kMicroChunk; ++row) x[row].error += std::fabs(reach[row]) * own;
    }
    return x;
  }

  std::array<double, kMicroChunk> spread_of_error(int from) const {
    std::array<double, kMicroChunk> reach = {};
    reach[from] = 1;
    for (int i = from + 1; i < kMicroChunk; ++i) {
      for (int j = from; j < i; ++j) reach[i] -= beta(i) * keys_[i][j] * reach[j];
    }
    return reach;
  }

  const RunValues<P>& run_;
  int first_;
  Matrix keys_ = {}, key_sizes_ = {}, queries_ = {},
         query_sizes_ = {};  // <k_i, d_ij k_j>, <q_i, d_ij k_j>; of absolute values
};

template <class P>
class PrepareMicroChunk : public StageTest {
 protected:
  static constexpr int kMicroChunks = 2;
  static constexpr int kTokens = kMicroChunks * kMicroChunk;

  /// Unit keys, values, queries, beta in (0, 1) and decays near 1, different in every token.
  RunValues<P> ordinary() {
    RunValues<P> run(kTokens);
    for (std::vector<float>* array : {&run.q, &run.k, &run.u}) draw(*array, random);
    normalize_keys(run);
    for (float& x : run.beta) x = static_cast<float>(uniform(random, 0, 1));
    set_log_decays(run, [&] { return uniform(random, -0.3, 0); });
    return run;
  }

  template <class Draw>
  void set_log_decays(RunValues<P>& run, Draw draw_one) {
    for (float& g : P::kGate == Gate::channel ? run.w : run.log_decay) g = static_cast<float>(draw_one());
  }

  void normalize_keys(RunValues<P>& run) {
    for (int t = 0; t < kTokens; ++t) {
      float* key = run.k.data() + t * P::kKeyTile;
      double squares = 0;
      for (int c = 0; c < P::kKeyTile; ++c) squares += static_cast<double>(key[c]) * key[c];
      for (int c = 0; c < P::kKeyTile; ++c) key[c] = static_cast<float>(key[c] / std::sqrt(squares));
    }
  }

  RunValues<P> prepare(const RunValues<P>& before) { return run_stage(Prepare<P>{kMicroChunks}, before); }

  void expect_matches_float64(const RunValues<P>& before) {
    const RunValues<P> after = prepare(before);
    for (int m = 0; m < kMicroChunks; ++m) expect_matches_float64(MicroChunkTruth<P>(before, m), m, after);
  }

 private:
  void expect_matches_float64(const MicroChunkTruth<P>& truth, int micro_chunk, const RunValues<P>& after) {
    const int first = truth.first();
    for (int c = 0; c < P::kKeyTile; ++c) {
      for (int i = 0; i < kMicroChunk; ++i) {
        const int element = (first + i) * P::kKeyTile + c;
        expect_near(after.q[element], truth.decayed_query(i, c), at("Q", i, c));
        expect_near(after.k[element], truth.decayed_key(i, c), at("R", i, c));
      }
      if (P::kUpdate == Update::additive) continue;
      const auto w = truth.w_column(c);
      for (int i = 0; i < kMicroChunk; ++i) expect_near(after.w[(first + i) * P::kKeyTile + c], w[i], at("W", i, c));
    }
    for (int c = 0; c < P::kSlice; ++c) {
      const auto u = truth.u_column(c);
      for (int i = 0; i < kMicroChunk; ++i) {
        expect_near(after.u[(first + i) * P::kColumnStride + c], u[i], at("U", i, c));
      }
    }
    for (int i = 0; i < kMicroChunk; ++i) {
      for (int j = 0; j <= i; ++j) {
        expect_near(after.a_matrix[(first + i) * kMicroChunk + j], truth.a_entry(i, j), at("A", i, j));
      }
    }
    const int width = SharedRun<P>::decay_end_width();
    for (int c = 0; c < width; ++c) {
      expect_near(after.decay_end[micro_chunk * width + c], truth.decay_end(c), at("b", 7, c));
    }
  }
};

using Policies = ::testing::Types<Policy<Update::delta, Gate::channel, PlainSum, 128, 16>,
                                  Policy<Update::delta, Gate::scalar, PlainSum, 64, 32>,
                                  Policy<Update::additive, Gate::channel, PlainSum, 64, 16>,
                                  Policy<Update::additive, Gate::scalar, PlainSum, 128, 32>>;
TYPED_TEST_SUITE(PrepareMicroChunk, Policies, PolicyName);

TYPED_TEST(PrepareMicroChunk, MatchesFloat64) { this->expect_matches_float64(this->ordinary()); }

// Decays that are 0, that leave float32 (e^-316) or that leave it after two tokens (e^-80), among ordinary ones.
TYPED_TEST(PrepareMicroChunk, StrongDecays) {
  RunValues<TypeParam> run = this->ordinary();
  this->set_log_decays(run, [&] {
    const std::vector<double> logs = {-INFINITY, -316, -80, -80, uniform(this->random, -20, 0), -0.01, 0};
    return pick_from(this->random, logs);
  });
  this->expect_matches_float64(run);
}

TYPED_TEST(PrepareMicroChunk, NearParallelKeysAndBetaUpToTwo) {
  RunValues<TypeParam> run = this->ordinary();
  for (std::size_t i = TypeParam::kKeyTile; i < run.k.size(); ++i) {
    run.k[i] = run.k[i % TypeParam::kKeyTile] + 1e-3f * run.k[i];
  }
  this->normalize_keys(run);
  for (float& beta : run.beta) {
    beta = pick(this->random, 0, 3) == 0 ? 2.0f : static_cast<float>(uniform(this->random, 0, 2));
  }
  this->expect_matches_float64(run);
}

TYPED_TEST(PrepareMicroChunk, NeutralTokensChangeNothing) {
  using P = TypeParam;
  RunValues<P> run = this->ordinary();
  const int tokens = this->kTokens - static_cast<int>(pick(this->random, 1, kMicroChunk - 1));
  for (int t = tokens; t < this->kTokens; ++t) {
    for (int c = 0; c < P::kKeyTile; ++c) run.k[t * P::kKeyTile + c] = 0.0f;
    for (int c = 0; c < P::kKeyTile; ++c) run.w[t * P::kKeyTile + c] = 0.0f;
    run.beta[t] = 0.0f;
    run.log_decay[t] = 0.0f;
  }
  this->expect_matches_float64(run);
}

TYPED_TEST(PrepareMicroChunk, LaterTokensDoNotReachEarlierOnes) {
  using P = TypeParam;
  const RunValues<P> clean = this->ordinary();
  RunValues<P> spoilt = clean;
  const int first_bad = this->kTokens - static_cast<int>(pick(this->random, 1, kMicroChunk - 1));
  for (int t = first_bad; t < this->kTokens; ++t) {
    const auto spoil = [t](std::vector<float>& array, int stride) {
      for (int c = 0; c < stride; ++c) array[t * stride + c] = std::numeric_limits<float>::quiet_NaN();
    };
    spoil(spoilt.q, P::kKeyTile);
    spoil(spoilt.k, P::kKeyTile);
    spoil(spoilt.w, P::kKeyTile);
    spoil(spoilt.u, P::kColumnStride);
    spoil(spoilt.beta, 1);
    spoil(spoilt.log_decay, 1);
  }
  const RunValues<P> expected = this->prepare(clean), got = this->prepare(spoilt);
  expect_same_rows(got.q, expected.q, 0, first_bad, P::kKeyTile, P::kKeyTile, "Q");
  expect_same_rows(got.u, expected.u, 0, first_bad, P::kColumnStride, P::kSlice, "U");
  if (P::kUpdate == Update::delta) expect_same_rows(got.w, expected.w, 0, first_bad, P::kKeyTile, P::kKeyTile, "W");
  for (int t = 0; t < first_bad; ++t) {
    expect_same_rows(got.a_matrix, expected.a_matrix, t, t + 1, kMicroChunk, t % kMicroChunk + 1, "A");
  }
}

}  // namespace
}  // namespace delta_attention::test
