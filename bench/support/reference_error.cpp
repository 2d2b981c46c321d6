#include "support/reference_error.h"

#include <cmath>

#include "delta_attention_reference.h"
#include "support/parallel.h"

namespace bench {
namespace {

namespace reference = delta_attention::reference;

struct Norms {
  double difference = 0.0;
  double expected = 0.0;

  void add(double actual, double wanted) {
    difference += (actual - wanted) * (actual - wanted);
    expected += wanted * wanted;
  }
  double relative() const { return std::sqrt(difference / expected); }
};

}  // namespace

Expected::Expected(const Case& c, const ForwardArgs& inputs) {
  const bool packed = !c.lengths.empty();
  const std::vector<std::int64_t> offsets = c.offsets();
  const auto pair = [&](std::int64_t n, std::int64_t head) {
    const std::int64_t begin = packed ? offsets[n] : 0, end = packed ? offsets[n + 1] : c.tokens;
    return Pair{
        n, head, packed ? 0 : n, begin, end, std::vector<double>(c.tokens * c.dim), std::vector<double>(c.dim * c.dim)};
  };
  pairs_ = {pair(0, 0), pair(c.sequences() - 1, c.heads - 1)};
  parallel_for(static_cast<std::int64_t>(pairs_.size()), [&](std::int64_t i) {
    Pair& p = pairs_[i];
    ForwardArgs args = inputs;
    // Stride 0 over batch and heads: this buffer holds one pair.
    args.out = delta_attention::strided_tensor(p.out.data(), DType::f64, {c.batch, c.tokens, c.heads, c.dim},
                                               {0, c.dim, 0, 1});
    args.final_state = delta_attention::strided_tensor(p.state.data(), DType::f64,
                                                       {c.sequences(), c.heads, c.dim, c.dim}, {0, 0, c.dim, 1});
    reference::forward_head(args, p.sequence, p.batch, p.begin, p.end, p.head);
  });
}

Errors Expected::errors(const ForwardArgs& args) const {
  const std::int64_t K = args.q.shape[3], V = args.v.shape[3];
  Norms out, state;
  for (const Pair& p : pairs_) {
    for (std::int64_t t = p.begin; t < p.end; ++t) {
      for (std::int64_t j = 0; j < V; ++j) out.add(reference::load(args.out, p.batch, t, p.head, j), p.out[t * V + j]);
    }
    for (std::int64_t i = 0; i < K; ++i) {
      for (std::int64_t j = 0; j < V; ++j) {
        state.add(reference::load(args.final_state, p.sequence, p.head, i, j), p.state[i * V + j]);
      }
    }
  }
  return {out.relative(), state.relative()};
}

}  // namespace bench
