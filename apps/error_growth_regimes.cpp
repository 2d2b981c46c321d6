#include "error_growth_regimes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>

#include "errors.h"
#include "operands.h"
#include "problem/element.h"
#include "tensor_values.h"

namespace delta_attention::cli {
namespace {

using Random = std::mt19937_64;

double gauss(Random& random) { return std::normal_distribution<double>()(random); }
double uniform(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}
/// Between low and high, uniform in the logarithm.
double log_uniform(Random& random, double low, double high) {
  return std::exp(uniform(random, std::log(low), std::log(high)));
}

/// Builds the operands of one regime, in the order in which its random numbers are drawn.
class Builder {
 public:
  Builder(const char* preset, const RegimeSize& size, DType dtype, std::uint64_t seed)
      : size_(size), dtype_(dtype), random_(seed) {
    result_.args.recurrence = find_preset(preset).recurrence;
  }

  Random& random() { return random_; }
  const RegimeSize& size() const { return size_; }
  DType dtype() const { return dtype_; }
  ForwardArgs& args() { return result_.args; }

  /// q and k of unit length; `positive` makes features of them, `norm` draws another length for each key.
  template <class Norm>
  void queries_and_keys(bool positive, Norm norm) {
    result_.args.q = rows(positive, [] { return 1.0; });
    result_.args.k = rows(positive, norm);
  }
  void unit_queries_and_keys() {
    queries_and_keys(false, [] { return 1.0; });
  }

  void values(double mean) {
    OwnedTensor v = empty(dtype_, size_.dim);
    for (std::int64_t i = 0; i < v.view.elements(); ++i) put(v, i, mean + gauss(random_));
    result_.args.v = keep(std::move(v));
  }

  /// One number a token and head, draw(token row, head).
  template <class Draw>
  ConstTensor scalars(Draw draw) {
    OwnedTensor x = empty(DType::f32, 0);
    for (std::int64_t i = 0; i < x.view.elements(); ++i) put(x, i, draw(i, i % size_.heads));
    return keep(std::move(x));
  }

  template <class Draw>
  ConstTensor channels(Draw draw) {
    OwnedTensor x = empty(DType::f32, size_.dim);
    for (std::int64_t i = 0; i < x.view.elements(); ++i) put(x, i, draw(i % (size_.heads * size_.dim)));
    return keep(std::move(x));
  }

  /// |k|^2 of one row of the stored keys.
  double squared_norm(std::int64_t row) const {
    const ConstTensor& k = result_.args.k;
    double sum = 0;
    for (std::int64_t i = 0; i < size_.dim; ++i) sum += std::pow(value_at(k.data, k.dtype, row * size_.dim + i), 2);
    return sum;
  }

  /// A [1,T0,heads,width] tensor's rows of one token after another, its tokens from the start again where they end.
  ConstTensor tiled(const ConstTensor& source, std::int64_t first_head, DType dtype) {
    const std::int64_t width = source.rank == 4 ? source.shape[3] : 1;
    OwnedTensor x = empty(dtype, source.rank == 4 ? width : 0);
    for (std::int64_t t = 0; t < size_.tokens; ++t) {
      for (std::int64_t h = 0; h < size_.heads; ++h) {
        const std::int64_t head = (first_head + h) % source.shape[2];
        const std::int64_t from = t % source.shape[1] * source.strides[1] + head * source.strides[2];
        for (std::int64_t i = 0; i < width; ++i) {
          put(x, (t * size_.heads + h) * width + i, value_at(source.data, source.dtype, from + i));
        }
      }
    }
    return keep(std::move(x));
  }

  RegimeInputs finish() { return std::move(result_); }

 private:
  /// [1,T,H,width], or [1,T,H] for width 0.
  OwnedTensor empty(DType dtype, std::int64_t width) const {
    ConstTensor shape =
        tensor(static_cast<const void*>(nullptr), dtype, {1, size_.tokens, size_.heads, width > 0 ? width : 1});
    if (width == 0) shape.rank = 3;
    return zeros(shape, dtype, cpu());
  }
  static void put(OwnedTensor& x, std::int64_t at, double value) {
    store_element(x.view.data, x.view.dtype, at, static_cast<float>(value));
  }
  ConstTensor keep(OwnedTensor x) {
    result_.storage.push_back(std::move(x));
    return result_.storage.back().view;
  }

  template <class Norm>
  ConstTensor rows(bool positive, Norm norm) {
    constexpr double kLeastFeature = 0.01;
    OwnedTensor x = empty(dtype_, size_.dim);
    std::vector<double> row(static_cast<std::size_t>(size_.dim));
    for (std::int64_t first = 0; first < x.view.elements(); first += size_.dim) {
      double sum = 0;
      for (double& element : row) {
        element = gauss(random_);
        if (positive) element = std::fabs(element) + kLeastFeature;
        sum += element * element;
      }
      const double factor = norm() / std::sqrt(sum);
      for (std::int64_t i = 0; i < size_.dim; ++i) put(x, first + i, row[static_cast<std::size_t>(i)] * factor);
    }
    return keep(std::move(x));
  }

  RegimeSize size_;
  DType dtype_;
  Random random_;
  RegimeInputs result_;
};

/// Where the regime `activations` reads: heads first_head, first_head + 1, ... of the file.
struct FileHeads {
  const SafetensorsFile& data;
  std::int64_t first_head;
};

struct Recipe {
  Regime regime;
  void (*fill)(Builder&, const FileHeads&);
};

void additive(Builder& b, const FileHeads&) {
  b.queries_and_keys(true, [] { return 1.0; });
  b.values(1.0);
}

void retention(Builder& b, const FileHeads&) {
  b.unit_queries_and_keys();
  b.values(0.0);
  // RetNet's eight heads have 1 - gamma = 2^-5 ... 2^-12; the slowest come first here.
  b.args().log_decay = b.scalars(
      [](std::int64_t, std::int64_t head) { return std::log1p(-std::exp2(-12.0 + static_cast<double>(head % 8))); });
}

/// Unit keys and beta in (0,1): the update is a contraction.
void contractive_delta(Builder& b, const FileHeads&) {
  b.unit_queries_and_keys();
  b.values(0.0);
  b.args().beta = b.scalars([&](std::int64_t, std::int64_t) { return uniform(b.random(), 0.01, 0.99); });
}

void decaying_delta(Builder& b, const FileHeads& file, double least, double most) {
  contractive_delta(b, file);
  b.args().log_decay = b.scalars([&](std::int64_t, std::int64_t) { return -log_uniform(b.random(), least, most); });
}
void strongly_decaying_delta(Builder& b, const FileHeads& file) { decaying_delta(b, file, 0.1, 3.0); }
void slowly_decaying_delta(Builder& b, const FileHeads& file) { decaying_delta(b, file, 1e-4, 1e-2); }

void channel_decaying_delta(Builder& b, const FileHeads& file) {
  contractive_delta(b, file);
  // Each channel has its own pace, and every token departs from it by a factor of e at most.
  std::vector<double> pace(static_cast<std::size_t>(b.size().heads * b.size().dim));
  for (double& x : pace) x = log_uniform(b.random(), 1e-4, 1.0);
  b.args().log_decay = b.channels([&](std::int64_t channel) {
    return -pace[static_cast<std::size_t>(channel)] * std::exp(uniform(b.random(), -1.0, 1.0));
  });
}

/// Keys of any length between 1/2 and 2; beta such that beta |k|^2 is drawn between `low` and `high`.
void stretched_delta(Builder& b, double low, double high) {
  b.queries_and_keys(false, [&] { return log_uniform(b.random(), 0.5, 2.0); });
  b.values(0.0);
  b.args().beta =
      b.scalars([&](std::int64_t row, std::int64_t) { return uniform(b.random(), low, high) / b.squared_norm(row); });
}
void reflecting_delta(Builder& b, const FileHeads&) { stretched_delta(b, 1.99, 2.0); }

void expanding_delta(Builder& b, const FileHeads&) {
  // A step multiplies what lies along its key by 1 - beta |k|^2, so the state's norm grows by a factor of about
  // 1 + (beta |k|^2 - 2) / K a token; with the excess below, by e^10 in 131072 tokens, which every format's exponent can hold.
  constexpr double kMostGrowth = 1.6e-4;
  const double dim = static_cast<double>(b.size().dim);
  stretched_delta(b, 2.0, 2.0 + kMostGrowth * dim);
  // f16 ends at 65504, and the outputs must not.
  b.args().scale = static_cast<float>(std::exp2(-10.0) / std::sqrt(dim));
}

void activations(Builder& b, const FileHeads& file) {
  const auto read = [&](const char* name, DType dtype) {
    const ConstTensor x = file.data.find(name);
    if (!x.present() || x.rank < 3) {
      throw BadInput(fmt::format("{}: error-growth needs a tensor {}", file.data.path(), name));
    }
    return b.tiled(x, file.first_head, dtype);
  };
  ForwardArgs& args = b.args();
  args.q = read("q", b.dtype());
  args.k = read("k", b.dtype());
  args.v = read("v", b.dtype());
  args.log_decay = read("log_decay", DType::f32);
  args.beta = read("beta", DType::f32);
  args.qk_l2norm = true;
}

const Recipe kRecipes[] = {
    {{"additive", "normalized_linear", "sums of positive terms, divided by z^T q, no decay: nothing is forgotten",
      true},
     additive},
    {{"retention", "retention", "a constant decay of 1 - 2^-12: a memory of 4096 tokens", true}, retention},
    {{"gdn_strong", "gated_delta_net", "scalar decays of 0.1 to 3 nats a token, unit keys, beta in (0,1)", false},
     strongly_decaying_delta},
    {{"gdn_slow", "gated_delta_net", "scalar decays of 1e-4 to 1e-2 nats a token, unit keys, beta in (0,1)", false},
     slowly_decaying_delta},
    {{"kda", "kda", "a decay for each channel, 1e-4 to 1 nats a token, unit keys, beta in (0,1)", false},
     channel_decaying_delta},
    {{"delta", "delta_net", "no decay, unit keys, beta in (0,1): the update contracts", true}, contractive_delta},
    {{"delta_near_2", "delta_net", "no decay, keys of any length, beta |k|^2 in (1.99, 2): nearly reflections", false},
     reflecting_delta},
    {{"delta_above_2", "delta_net",
      "no decay, keys of any length, beta |k|^2 just above 2: the state grows, e^10 in 131072 tokens", false},
     expanding_delta},
    {{"activations", "kda", "a trained transformer's q, k and v, heads of 32, its 1024 tokens again and again", false},
     activations},
};

/// Of the file's heads where the regime reads them.
std::int64_t dim_of(const Recipe& recipe, std::int64_t dim, const SafetensorsFile& data) {
  const ConstTensor q = data.find("q");
  return recipe.fill == activations && q.rank == 4 ? q.shape[3] : dim;
}

std::uint64_t mix(std::uint64_t seed, std::uint32_t regime, std::uint32_t repeat) {
  std::seed_seq sequence{static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32), regime, repeat};
  std::uint32_t words[2];
  sequence.generate(words, words + 2);
  return static_cast<std::uint64_t>(words[0]) << 32 | words[1];
}

}  // namespace

const std::vector<Regime>& regimes() {
  static const std::vector<Regime> list = [] {
    std::vector<Regime> all;
    for (const Recipe& recipe : kRecipes) all.push_back(recipe.regime);
    return all;
  }();
  return list;
}

RegimeInputs make_regime(const std::string& name, const RegimeSize& size, DType dtype, std::uint64_t seed, int repeat,
                         const SafetensorsFile& data) {
  const auto recipe = std::find_if(std::begin(kRecipes), std::end(kRecipes),
                                   [&](const Recipe& each) { return name == each.regime.name; });
  if (recipe == std::end(kRecipes)) throw BadInput("no regime is called " + name);
  RegimeSize own_size = size;
  own_size.dim = dim_of(*recipe, size.dim, data);
  Builder builder(recipe->regime.preset, own_size, dtype,
                  mix(seed, static_cast<std::uint32_t>(recipe - kRecipes), static_cast<std::uint32_t>(repeat)));
  recipe->fill(builder, {data, repeat * size.heads});
  return builder.finish();
}

}  // namespace delta_attention::cli
