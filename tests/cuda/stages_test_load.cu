// Stage A, load_run: from the caller's operands, in guarded memory, to f32 rows in shared memory. What lies beside an operand is
// NaN, so that a load of the wrong element shows.
//
// Conversions to f32 are exact. CUDA states the errors of its functions against the correctly rounded result: 1 ulp for expf, logf and
// log1pf. Against the exact one that is half an ulp more, and an ulp is at most two roundings of 2^-24: 3 roundings. Sums, products,
// quotients and square roots are correctly rounded.

#include "api/check.h"
#include "cuda/stages_test.cuh"

namespace delta_attention::test {
namespace {

template <class P>
struct LoadRun {
  Problem problem;
  RowAccess access;
  Block block;
  int padded_tokens;
  __device__ void operator()(const SharedRun<P>& shared) const {
    load_run<P>(problem, access, block, padded_tokens, shared);
  }
};

/// An element of an operand, as the formulas name it.
struct Operands {
  const Inputs& inputs;
  const Problem& problem;
  const Block& block;

  double query(int t, int c) const { return inputs.q.get({block.batch, block.first_token + t, key_head(), c}); }
  double key(int t, int c) const { return inputs.k.get({block.batch, block.first_token + t, key_head(), c}); }
  double value(int t, int c) const {
    return inputs.v.get({block.batch, block.first_token + t, block.value_head, block.first_column + c});
  }
  Index key_head() const { return block.value_head / (inputs.problem.value_heads / inputs.problem.heads); }

  Expected beta(int t) const {
    if (!inputs.beta.present()) return {1, 0};
    const double x = inputs.beta.get({block.batch, block.first_token + t, block.value_head});
    if (inputs.problem.beta_space == BetaSpace::value) return {x, 0};
    const double value = (inputs.problem.beta_space == BetaSpace::sigmoid ? 1 : 2) / (1 + std::exp(-x));
    return {value, 5 * kRounding * value};  // expf, sum, quotient
  }

  /// The logarithm of the decay. A channel c < 0 means the scalar gate.
  Expected log_decay(int t, int c) const {
    if (!inputs.log_decay.present()) return {0, 0};
    const Index token = block.first_token + t;
    const double x = c < 0 ? inputs.log_decay.get({block.batch, token, block.value_head})
                           : inputs.log_decay.get({block.batch, token, block.value_head, c});
    switch (inputs.problem.gate_space) {
      case GateSpace::log: return {x, 0};
      case GateSpace::log2: return within(x * std::log(2.0), 2);  // ln 2, product
      case GateSpace::linear: return within(std::log(x), 3);      // logf
      default: return raw_gate(x, c);
    }
  }

 private:
  static Expected within(double g, double roundings) { return {g, roundings * kRounding * std::fabs(g)}; }

  Expected raw_gate(double x, int c) const {
    const double rate = std::exp(static_cast<double>(inputs.a_log.get({block.value_head})));
    double bias = 0;
    if (inputs.dt_bias.present()) {
      bias = c < 0 ? inputs.dt_bias.get({block.value_head}) : inputs.dt_bias.get({block.value_head, c});
    }
    const double s = x + bias;
    if (inputs.problem.gate_space == GateSpace::softplus) {
      // rate, sum, product, softplus (expf, log1pf, sum); for s < 0 softplus is about e^s, which the rounding of s disturbs.
      const double softplus_of_s = std::fmax(s, 0.0) + std::log1p(std::exp(-std::fabs(s)));
      return within(-rate * softplus_of_s, 12 + std::fabs(s));
    }
    // sigmoid (expf, sum, quotient) and product; its argument carries rate, sum and product.
    return within(problem.gate_lower_bound / (1 + std::exp(-rate * s)), 6 + 5 * std::fabs(rate * s));
  }
};

template <class P>
class LoadStage : public StageTest {
 protected:
  static constexpr int kTile = P::kKeyTile;
  static constexpr bool kChannelGate = P::kGate == Gate::channel;

  /// K three quarters of the tile, so that rows hold whole pieces of every width, and a last slice of value columns that is 3/4 full.
  Case ordinary() {
    Case c;
    c.recurrence = kChannelGate ? kda() : gated_delta_net();
    c.batch = 2;
    c.tokens = 40;
    c.heads = 2;
    c.value_heads = 4;
    c.key_dim = kTile / 4 * 3;
    c.value_dim = P::kSlice + P::kSlice / 4 * 3;
    return c;
  }

  /// Loads the last slice of some run and compares everything. `offset` elements past an aligned address; where rows are then still
  /// aligned, the load must take whole pieces.
  void expect_loads(const Case& c, Index offset = 0, bool in_pieces = true) {
    SCOPED_TRACE(c.describe());
    const Inputs inputs = make_inputs(c, random);
    CallOptions options{placements_of(c)};
    for (Placement* placement :
         {&options.placements.q, &options.placements.k, &options.placements.v, &options.placements.log_decay}) {
      placement->offset = offset;
    }
    const Call call(inputs, cuda(), options);
    const Problem problem = check(call.args);
    const Block block = last_slice(c);
    const int padded = static_cast<int>(ceil_div(block.tokens, kMicroChunk)) * kMicroChunk;
    const RowAccess access = access_of(problem);
    EXPECT_EQ(access.q, in_pieces);
    EXPECT_EQ(access.k, in_pieces);
    EXPECT_EQ(access.decay, in_pieces && kChannelGate && problem.gate == Gate::channel);

    const RunValues<P> run = run_stage(LoadRun<P>{problem, access, block, padded}, RunValues<P>(padded + kMicroChunk));
    const Operands operands{inputs, problem, block};
    expect_rows(operands, run, padded);
    expect_values(operands, run, padded);
    expect_scalars(operands, run, padded);
  }

  int tokens_ = 11;

 private:
  RowAccess access_of(const Problem& p) const {
    constexpr int kPerLane = kTile / kWarpSize;
    return {reads_in_pieces(p.q, p.key_dim, kPerLane), reads_in_pieces(p.k, p.key_dim, kPerLane),
            p.gate == Gate::channel && reads_in_pieces(p.log_decay, p.key_dim, kPerLane)};
  }

  Block last_slice(const Case& c) {
    Block block = {};
    block.sequence = block.batch = pick(random, 0, c.batch - 1);
    block.tokens = tokens_;
    block.first_token = pick(random, 0, c.tokens - tokens_);
    block.value_head = pick(random, 0, c.value_heads - 1);
    block.first_column = (c.value_dim - 1) / P::kSlice * P::kSlice;
    block.columns = static_cast<int>(c.value_dim - block.first_column);
    return block;
  }

  void expect_rows(const Operands& operands, const RunValues<P>& run, int padded) {
    for (int t = 0; t < run.tokens; ++t) {
      const bool exists = t < operands.block.tokens;
      const double query_factor = exists ? l2norm(operands, &Operands::query, t) : 0;
      const double key_factor = exists ? l2norm(operands, &Operands::key, t) : 0;
      for (int c = 0; c < kTile; ++c) {
        const int i = t * kTile + c;
        if (t >= padded) {
          ASSERT_TRUE(std::isnan(run.q[i]) && std::isnan(run.k[i]) && std::isnan(run.w[i]))
              << "row " << t << " was written";
          continue;
        }
        const bool inside = exists && c < operands.problem.key_dim;
        expect_near(run.q[i], inside ? scaled(operands, operands.query(t, c), query_factor) : Expected(),
                    at("q", t, c));
        expect_near(run.k[i], inside ? scaled(operands, operands.key(t, c), key_factor) : Expected(), at("k", t, c));
        if (kChannelGate) expect_near(run.w[i], inside ? operands.log_decay(t, c) : Expected(), at("g", t, c));
      }
    }
  }

  /// What qk_l2norm multiplies a row by; 1 without it.
  double l2norm(const Operands& operands, double (Operands::*element)(int, int) const, int t) {
    if (!operands.problem.qk_l2norm) return 1;
    double squares = 0;
    for (int c = 0; c < operands.problem.key_dim; ++c) squares += std::pow((operands.*element)(t, c), 2);
    return 1 / std::sqrt(squares + 1e-6);
  }

  /// Roundings of the sum of squares (K/32 terms of two, 5 steps across the lanes, epsilon and its addition), which the root
  /// halves; then of root, quotient and product.
  Expected scaled(const Operands& operands, double x, double factor) {
    if (!operands.problem.qk_l2norm) return {x, 0};
    const double roundings = (2.0 * kTile / kWarpSize + 5 + 2) / 2 + 3;
    return {x * factor, roundings * kRounding * std::fabs(x * factor)};
  }

  void expect_values(const Operands& operands, const RunValues<P>& run, int padded) {
    for (int t = 0; t < padded; ++t) {
      for (int c = 0; c < P::kSlice; ++c) {
        const bool inside = t < operands.block.tokens && c < operands.block.columns;
        EXPECT_EQ(run.u[t * P::kColumnStride + c], inside ? operands.value(t, c) : 0) << at("v", t, c);
      }
    }
  }

  void expect_scalars(const Operands& operands, const RunValues<P>& run, int padded) {
    for (int t = 0; t < padded; ++t) {
      const bool inside = t < operands.block.tokens;
      expect_near(run.beta[t], inside ? operands.beta(t) : Expected(), at("beta", t, 0));
      expect_near(run.log_decay[t], inside && !kChannelGate ? operands.log_decay(t, -1) : Expected(), at("g", t, 0));
    }
  }
};

using Policies = ::testing::Types<Policy<Update::delta, Gate::channel, PlainSum, 64, 32>,
                                  Policy<Update::delta, Gate::scalar, PlainSum, 128, 16>,
                                  Policy<Update::delta, Gate::channel, PlainSum, 256, 16>>;
TYPED_TEST_SUITE(LoadStage, Policies, PolicyName);

constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};

TYPED_TEST(LoadStage, AlignedRowsOfEveryDType) {
  for (DType dtype : kDTypes) {
    Case c = this->ordinary();
    c.dtype = c.gate_dtype = c.beta_dtype = dtype;
    this->expect_loads(c);
    c.key_dim = TypeParam::kKeyTile;
    this->expect_loads(c);
    c.layout = Layout::bhtd;
    this->expect_loads(c);
  }
}

TYPED_TEST(LoadStage, MisalignedRowsOfEveryDType) {
  for (DType dtype : kDTypes) {
    Case c = this->ordinary();
    c.dtype = c.gate_dtype = c.beta_dtype = dtype;
    this->expect_loads(c, 1, false);
    c.layout = Layout::padded;  // gaps of odd lengths between rows
    this->expect_loads(c, 0, false);
    c.layout = Layout::bthd;
    c.key_dim = TypeParam::kKeyTile - 1;
    this->expect_loads(c, 0, false);
  }
}

TYPED_TEST(LoadStage, TokensPastTheEndAreNeutral) {
  for (int tokens : {0, 1, 7, 8, 9, 16}) {
    this->tokens_ = tokens;
    this->expect_loads(this->ordinary());
  }
}

// As many tokens as 96 KiB of shared memory hold, which every GPU of these architectures has.
TYPED_TEST(LoadStage, LongRuns) {
  int run_tokens = 128;
  while (SharedRun<TypeParam>::bytes(run_tokens) > 96 * 1024) run_tokens -= kMicroChunk;
  this->tokens_ = run_tokens - kMicroChunk - static_cast<int>(pick(this->random, 0, kMicroChunk - 1));
  Case c = this->ordinary();
  c.tokens = run_tokens;
  this->expect_loads(c);
  this->expect_loads(c, 1, false);
}

TYPED_TEST(LoadStage, NormalizesQueriesAndKeys) {
  for (DType dtype : kDTypes) {
    Case c = this->ordinary();
    c.dtype = dtype;
    c.qk_l2norm = true;
    this->expect_loads(c);
  }
}

TYPED_TEST(LoadStage, ActivatesGatesOfEverySpace) {
  for (GateSpace space :
       {GateSpace::log, GateSpace::log2, GateSpace::linear, GateSpace::softplus, GateSpace::lower_bound}) {
    for (GateRegime regime : {GateRegime::mixed, GateRegime::strong, GateRegime::slow}) {
      Case c = this->ordinary();
      c.gate_space = space;
      c.gate_regime = regime;
      c.gate_dtype = pick_from(this->random, std::vector<DType>(std::begin(kDTypes), std::end(kDTypes)));
      c.with_dt_bias = pick(this->random, 0, 1) == 1;
      this->expect_loads(c);
    }
  }
}

TYPED_TEST(LoadStage, ActivatesBetaOfEverySpace) {
  for (BetaSpace space : {BetaSpace::value, BetaSpace::sigmoid, BetaSpace::twice_sigmoid}) {
    Case c = this->ordinary();
    c.beta_space = space;
    this->expect_loads(c);
  }
}

TYPED_TEST(LoadStage, BetaAndGateThatWereNotGivenDoNothing) {
  Case c = this->ordinary();
  c.with_beta = false;
  // Without log_decay the pipeline takes a policy of the scalar gate.
  if (TypeParam::kGate == Gate::scalar) c.with_gate = false;
  this->expect_loads(c);
}

}  // namespace
}  // namespace delta_attention::test
