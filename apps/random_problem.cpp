#include "random_problem.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "operands.h"
#include "problem/element.h"

namespace delta_attention::cli {
namespace {

using Random = std::mt19937_64;

double gauss(Random& random) { return std::normal_distribution<double>()(random); }
double uniform(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}

/// Values of trained layers lie in about [-0.3, 25] and have a heavy tail.
double draw_value(Random& random) { return std::min(24.8, -0.28 + std::exp(1.2 * gauss(random) - 1.0)); }

/// Three in four decays forget over many tokens, one over a few, down to the strongest that trained gates reach.
double draw_log_decay(Random& random) {
  const bool strong = uniform(random, 0, 1) < 0.25;
  return strong ? -std::exp(uniform(random, 0.0, std::log(316.0))) : -std::exp(uniform(random, -9.0, 0.0));
}

class Builder {
 public:
  Builder(const RandomProblem& problem, Random& random) : dtype_(problem.dtype), random_(random) {
    const ProblemSize& n = problem.size;
    const std::int64_t HV = n.HV > 0 ? n.HV : n.H;
    ForwardArgs& args = call_.args;
    args.recurrence = find_preset(problem.recurrence).recurrence;
    draw_queries_and_keys({n.B, n.T, n.H, n.K});
    args.v = filled({n.B, n.T, HV, n.V}, dtype_, [&] { return draw_value(random_); });
    const auto decay = [&] { return draw_log_decay(random_); };
    if (args.recurrence.gate == Gate::scalar) args.log_decay = filled({n.B, n.T, HV}, DType::f32, decay);
    if (args.recurrence.gate == Gate::channel) args.log_decay = filled({n.B, n.T, HV, n.K}, DType::f32, decay);
    args.beta = filled({n.B, n.T, HV}, DType::f32, [&] { return uniform(random_, 0.01, 0.99); });
    args.out = keep(empty({n.B, n.T, HV, n.V}, dtype_));
    args.final_state = keep(empty({n.B, HV, n.K, n.V}, DType::f32));
    if (args.recurrence.normalize) args.final_normalizer = keep(empty({n.B, HV, n.K}, DType::f32));
  }

  OwnedCall finish() { return std::move(call_); }

 private:
  using Shape = std::initializer_list<std::int64_t>;

  static OwnedTensor empty(Shape shape, DType dtype) {
    return zeros(tensor(static_cast<const void*>(nullptr), dtype, shape), dtype, cpu());
  }
  Tensor keep(OwnedTensor x) {
    call_.storage.push_back(std::move(x));
    return call_.storage.back().view;
  }
  static void put(const Tensor& x, std::int64_t at, double value) {
    store_element(x.data, x.dtype, at, static_cast<float>(value));
  }

  template <class Draw>
  ConstTensor filled(Shape shape, DType dtype, Draw draw) {
    const Tensor x = keep(empty(shape, dtype));
    for (std::int64_t i = 0; i < x.elements(); ++i) put(x, i, draw());
    return x;
  }

  void draw_queries_and_keys(Shape shape) {
    const Tensor q = keep(empty(shape, dtype_)), k = keep(empty(shape, dtype_));
    const std::int64_t width = q.shape[3];
    std::vector<double> key(static_cast<std::size_t>(width)), query(key.size());
    for (std::int64_t first = 0; first < q.elements(); first += width) {
      for (std::size_t i = 0; i < key.size(); ++i) {
        key[i] = gauss(random_);
        query[i] = gauss(random_) + 0.5 * key[i];
        if (call_.args.recurrence.normalize) {  // positive features: z^T q must not cancel
          key[i] = std::fabs(key[i]) + 0.01;
          query[i] = std::fabs(query[i]) + 0.01;
        }
      }
      put_unit_row(k, first, key);
      put_unit_row(q, first, query);
    }
    call_.args.q = q;
    call_.args.k = k;
  }

  static void put_unit_row(const Tensor& x, std::int64_t first, const std::vector<double>& row) {
    double sum = 0;
    for (double element : row) sum += element * element;
    for (std::size_t i = 0; i < row.size(); ++i) {
      put(x, first + static_cast<std::int64_t>(i), row[i] / std::sqrt(sum));
    }
  }

  DType dtype_;
  Random& random_;
  OwnedCall call_;
};

}  // namespace

std::string RandomProblem::text() const {
  return fmt::format("{} {} B:{} T:{} H:{} HV:{} K:{} V:{}", recurrence, name(dtype), size.B, size.T, size.H,
                     size.HV > 0 ? size.HV : size.H, size.K, size.V);
}

OwnedCall draw_call(const RandomProblem& problem, Random& random) { return Builder(problem, random).finish(); }

}  // namespace delta_attention::cli
