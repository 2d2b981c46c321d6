#include "support/cases.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>

namespace delta_attention::test {
namespace {

double gauss(Random& random) { return std::normal_distribution<double>()(random); }

template <class Draw>
void draw(Array& array, Draw next) {
  for (float& x : array.values) x = rounded(static_cast<float>(next()), array.dtype);
}

using Row = std::vector<double>;

Row unit(Row row) {
  double sum = 0;
  for (double x : row) sum += x * x;
  for (double& x : row) x /= std::sqrt(sum);
  return row;
}

Row gauss_row(Index size, Random& random) {
  Row row(static_cast<std::size_t>(size));
  for (double& x : row) x = gauss(random);
  return row;
}

void put_row(Array& array, Index row, const Row& values, double factor) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    array.values[static_cast<std::size_t>(row) * values.size() + i] =
        rounded(static_cast<float>(values[i] * factor), array.dtype);
  }
}

/// Keys of unit length (any length where the kernel normalises), queries near or away from their key, as in trained layers.
void draw_queries_and_keys(Inputs& inputs, Random& random) {
  const Case& c = inputs.problem;
  const Index rows = inputs.k.size() / c.key_dim;
  const Row common = gauss_row(c.key_dim, random);
  for (Index row = 0; row < rows; ++row) {
    Row k = gauss_row(c.key_dim, random), q = gauss_row(c.key_dim, random);
    for (std::size_t i = 0; i < k.size(); ++i) {
      if (c.keys == Keys::near_parallel) k[i] = common[i] + 0.05 * k[i];
      q[i] += 0.5 * k[i];
      if (c.recurrence.normalize) {  // positive features: no cancellation in z^T q
        k[i] = std::fabs(k[i]) + 0.01;
        q[i] = std::fabs(q[i]) + 0.01;
      }
    }
    put_row(inputs.k, row, unit(k), c.qk_l2norm ? std::exp(uniform(random, -3, 2)) : 1.0);
    put_row(inputs.q, row, unit(q), c.qk_l2norm ? std::exp(uniform(random, -3, 2)) : 1.0);
  }
}

double draw_log_decay(GateRegime regime, Random& random) {
  const bool strong = regime == GateRegime::strong || (regime == GateRegime::mixed && pick(random, 0, 3) == 0);
  return strong ? -std::exp(uniform(random, 0.0, std::log(316.0))) : -std::exp(uniform(random, -9.0, 0.0));
}

void draw_gates(Inputs& inputs, Random& random) {
  const Case& c = inputs.problem;
  switch (c.gate_space) {
    case GateSpace::log: draw(inputs.log_decay, [&] { return draw_log_decay(c.gate_regime, random); }); break;
    case GateSpace::log2:
      draw(inputs.log_decay, [&] { return draw_log_decay(c.gate_regime, random) * 1.4426950408889634; });
      break;
    case GateSpace::linear:
      draw(inputs.log_decay, [&] { return std::exp(draw_log_decay(c.gate_regime, random)); });
      break;
    case GateSpace::softplus:
    case GateSpace::lower_bound:
      draw(inputs.log_decay, [&] { return 2.0 * gauss(random); });
      draw(inputs.a_log, [&] { return uniform(random, -2.0, 2.0); });
      draw(inputs.dt_bias, [&] { return gauss(random); });
      break;
  }
}

void draw_beta(Inputs& inputs, Random& random) {
  const Case& c = inputs.problem;
  if (c.beta_space == BetaSpace::value) {
    draw(inputs.beta, [&] { return uniform(random, 0.01, c.beta_to_two ? 2.0 : 0.99); });
  } else {
    draw(inputs.beta, [&] { return 2.0 * gauss(random); });
  }
}

double draw_value(Random& random) { return std::min(24.8, -0.28 + std::exp(1.2 * gauss(random) - 1.0)); }

/// Copies `count` items of `item` numbers each, starting at `begin`, from every one of the array's outer rows.
Array cut(const Array& from, std::size_t axis, const std::vector<Index>& keep) {
  if (!from.present()) return {};
  Array result = from;
  result.shape[axis] = static_cast<Index>(keep.size());
  Index outer = 1, inner = 1;
  for (std::size_t i = 0; i < axis; ++i) outer *= from.shape[i];
  for (std::size_t i = axis + 1; i < from.shape.size(); ++i) inner *= from.shape[i];
  result.values.clear();
  for (Index o = 0; o < outer; ++o) {
    for (Index item : keep) {
      const auto begin = from.values.begin() + (o * from.shape[axis] + item) * inner;
      result.values.insert(result.values.end(), begin, begin + inner);
    }
  }
  return result;
}

std::vector<Index> range(Index begin, Index end) {
  std::vector<Index> items;
  for (Index i = begin; i < end; ++i) items.push_back(i);
  return items;
}

std::uint64_t fresh_seed() {
  if (const char* given = std::getenv("DELTA_ATTENTION_SEED")) return std::strtoull(given, nullptr, 0);
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

}  // namespace

float rounded(float x, DType dtype) {
  switch (dtype) {
    case DType::f16: return static_cast<float>(static_cast<Eigen::half>(x));
    case DType::bf16: return static_cast<float>(static_cast<Eigen::bfloat16>(x));
    default: return x;
  }
}

Array::Array(DType type, std::vector<Index> extents, float value) : dtype(type), shape(std::move(extents)) {
  Index count = 1;
  for (Index extent : shape) count *= extent;
  values.assign(static_cast<std::size_t>(count), rounded(value, dtype));
}

Index Array::at(std::initializer_list<Index> index) const {
  Index offset = 0;
  std::size_t axis = 0;
  for (Index i : index) offset = offset * shape[axis++] + i;
  return offset;
}

void Array::fill(float value) { std::fill(values.begin(), values.end(), rounded(value, dtype)); }

std::string Case::describe() const {
  static const char* const kGates[] = {"none", "scalar", "channel"};
  static const char* const kSpaces[] = {"log", "log2", "linear", "softplus", "lower_bound"};
  static const char* const kBetas[] = {"value", "sigmoid", "twice_sigmoid"};
  static const char* const kLayouts[] = {"bthd", "bhtd", "padded"};
  std::ostringstream text;
  text << (recurrence.update == Update::delta ? "delta" : "additive")
       << " gate=" << kGates[static_cast<int>(recurrence.gate)] << (recurrence.normalize ? " normalised" : "")
       << " B=" << batch << " T=" << tokens << " H=" << heads << " HV=" << value_heads << " K=" << key_dim
       << " V=" << value_dim << " dtype=" << name(dtype) << " gate:" << name(gate_dtype) << " beta:" << name(beta_dtype)
       << " state:" << name(state_dtype) << " layout=" << kLayouts[static_cast<int>(layout)]
       << " state=" << (state_layout == StateLayout::kv ? "kv" : "vk")
       << " gate_space=" << kSpaces[static_cast<int>(gate_space)] << " regime=" << static_cast<int>(gate_regime)
       << " beta_space=" << kBetas[static_cast<int>(beta_space)] << (beta_to_two ? " beta<2" : "")
       << (qk_l2norm ? " l2norm" : "") << (keys == Keys::near_parallel ? " near-parallel keys" : "")
       << (with_gate ? "" : " no log_decay") << (with_beta ? "" : " no beta") << (with_initial_state ? " initial" : "")
       << (with_final_state ? " final" : "");
  if (state_interval != 0) text << " every " << state_interval;
  if (scale) text << " scale=" << *scale;
  if (!cu_seqlens.empty()) {
    text << " cu(" << name(cu_dtype) << ")=";
    for (Index offset : cu_seqlens) text << offset << ",";
  }
  return text.str();
}

Inputs zero_inputs(const Case& c) {
  Inputs inputs;
  inputs.problem = c;
  inputs.q = Array(c.dtype, {c.batch, c.tokens, c.heads, c.key_dim});
  inputs.k = inputs.q;
  inputs.v = Array(c.dtype, {c.batch, c.tokens, c.value_heads, c.value_dim});
  const bool gated = c.recurrence.gate != Gate::none && c.with_gate;
  const bool channel = c.recurrence.gate == Gate::channel;
  if (gated) {
    std::vector<Index> shape = {c.batch, c.tokens, c.value_heads};
    if (channel) shape.push_back(c.key_dim);
    inputs.log_decay = Array(c.gate_dtype, shape);
  }
  if (gated && c.raw_gate()) {
    inputs.a_log = Array(DType::f32, {c.value_heads});
    if (c.with_dt_bias) {
      inputs.dt_bias = channel ? Array(DType::f32, {c.value_heads, c.key_dim}) : Array(DType::f32, {c.value_heads});
    }
  }
  if (c.with_beta) inputs.beta = Array(c.beta_dtype, {c.batch, c.tokens, c.value_heads});
  if (c.with_initial_state) {
    inputs.initial_state = Array(c.state_dtype, {c.sequences(), c.value_heads, c.key_dim, c.value_dim});
    if (c.recurrence.normalize) {
      inputs.initial_normalizer = Array(c.state_dtype, {c.sequences(), c.value_heads, c.key_dim});
    }
  }
  return inputs;
}

Inputs v11_inputs() {
  Case c;
  c.recurrence = gated_delta_net();
  c.key_dim = c.value_dim = 2;
  c.scale = 0.5f;
  c.with_initial_state = true;
  Inputs inputs = zero_inputs(c);
  inputs.q.values = {1, 2};
  inputs.k.values = {0, 1};
  inputs.v.values = {10, 20};
  inputs.beta.values = {0.5f};
  inputs.log_decay.values = {static_cast<float>(std::log(0.5))};
  inputs.initial_state.values = {2, 4, 6, 8};
  return inputs;
}

Inputs make_inputs(const Case& c, Random& random) {
  Inputs inputs = zero_inputs(c);
  draw_queries_and_keys(inputs, random);
  draw(inputs.v, [&] { return draw_value(random); });
  draw_gates(inputs, random);
  draw_beta(inputs, random);
  draw(inputs.initial_state, [&] { return 2.0 * gauss(random); });
  draw(inputs.initial_normalizer, [&] { return std::fabs(gauss(random)); });
  return inputs;
}

Inputs slice_tokens(const Inputs& inputs, Index begin, Index end, const Array& initial_state,
                    const Array& initial_normalizer) {
  Inputs part = inputs;
  part.problem.tokens = end - begin;
  part.problem.with_initial_state = initial_state.present();
  for (Array Inputs::*operand : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::log_decay, &Inputs::beta}) {
    part.*operand = cut(inputs.*operand, 1, range(begin, end));
  }
  part.initial_state = initial_state;
  part.initial_normalizer = initial_normalizer;
  return part;
}

Inputs take_rows(const Inputs& inputs, const std::vector<Index>& rows) {
  Inputs part = inputs;
  part.problem.batch = static_cast<Index>(rows.size());
  for (Array Inputs::*operand : {&Inputs::q, &Inputs::k, &Inputs::v, &Inputs::log_decay, &Inputs::beta,
                                 &Inputs::initial_state, &Inputs::initial_normalizer}) {
    part.*operand = cut(inputs.*operand, 0, rows);
  }
  return part;
}

Inputs first_tokens(const Inputs& inputs, Index n, Index tokens) {
  const Case& c = inputs.problem;
  const bool packed = !c.cu_seqlens.empty();
  Inputs sequence = packed ? inputs : take_rows(inputs, {n});
  if (packed) {
    sequence.problem.cu_seqlens.clear();
    sequence.initial_state = cut(inputs.initial_state, 0, {n});
    sequence.initial_normalizer = cut(inputs.initial_normalizer, 0, {n});
  }
  sequence.problem.state_interval = 0;
  return slice_tokens(sequence, c.begin(n), c.begin(n) + tokens, sequence.initial_state, sequence.initial_normalizer);
}

double uniform(Random& random, double low, double high) {
  return std::uniform_real_distribution<double>(low, high)(random);
}
Index pick(Random& random, Index low, Index high) { return std::uniform_int_distribution<Index>(low, high)(random); }

Case random_case(Random& random) {
  const auto coin = [&] { return pick(random, 0, 1) == 1; };
  const std::vector<DType> floats = {DType::f32, DType::f16, DType::bf16};
  Case c;
  c.recurrence = kPresets[pick(random, 0, static_cast<Index>(std::size(kPresets)) - 1)].recurrence;
  // Every combination of the three fields is legal, named or not; normalised sums want the additive update's positive weights.
  if (c.recurrence.update == Update::additive && pick(random, 0, 4) == 0) c.recurrence.normalize = true;
  c.dtype = pick_from(random, floats);
  c.gate_dtype = pick_from(random, floats);
  c.beta_dtype = pick_from(random, floats);
  c.state_dtype = pick(random, 0, 3) > 0 ? DType::f32 : pick_from(random, floats);

  const std::vector<Index> dims = {1, 2, 5, 16, 32, 48, 60, 64, 80, 96, 100, 112, 128, 160, 192, 256};
  const std::vector<Index> small_dims = {1, 2, 5, 16, 32, 48};
  c.key_dim = pick_from(random, small_run() ? small_dims : dims);
  c.value_dim = pick_from(random, small_run() ? small_dims : dims);
  const std::vector<Index> lengths = {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129};
  c.tokens = pick_from(random, lengths);
  if (c.key_dim * c.value_dim > 16384) c.tokens = std::min<Index>(c.tokens, 65);
  c.batch = pick(random, 1, 3);
  c.heads = pick(random, 1, 3);
  c.value_heads = c.heads * pick(random, 1, 3);

  if (coin()) {
    c.batch = 1;
    c.cu_dtype = coin() ? DType::i32 : DType::i64;
    c.cu_seqlens = {0};
    const Index sequences = pick(random, 1, 5);
    for (Index n = 1; n < sequences; ++n) c.cu_seqlens.push_back(pick(random, 0, c.tokens));
    c.cu_seqlens.push_back(c.tokens);
    std::sort(c.cu_seqlens.begin(), c.cu_seqlens.end());
  }
  c.with_gate = pick(random, 0, 7) > 0;
  c.with_beta = pick(random, 0, 3) > 0;
  c.with_initial_state = coin();
  c.with_final_state = pick(random, 0, 3) > 0;
  c.gate_regime = static_cast<GateRegime>(pick(random, 0, 2));
  c.keys = coin() ? Keys::random : Keys::near_parallel;
  c.beta_to_two = coin();
  c.layout = static_cast<Layout>(pick(random, 0, 2));
  c.state_layout = coin() ? StateLayout::kv : StateLayout::vk;
  c.qk_l2norm = pick(random, 0, 2) == 0;
  c.gate_space = coin() ? GateSpace::log : static_cast<GateSpace>(pick(random, 0, 4));
  c.beta_space = coin() ? BetaSpace::value : static_cast<BetaSpace>(pick(random, 0, 2));
  c.with_dt_bias = coin();
  if (coin()) c.scale = static_cast<float>(uniform(random, 0.1, 1.5));
  return c;
}

std::uint64_t run_seed() {
  static const std::uint64_t seed = fresh_seed();
  return seed;
}

Random random_for(const std::string& test_name) {
  std::vector<std::uint32_t> material = {static_cast<std::uint32_t>(run_seed()),
                                         static_cast<std::uint32_t>(run_seed() >> 32)};
  for (char letter : test_name) material.push_back(static_cast<unsigned char>(letter));
  std::seed_seq sequence(material.begin(), material.end());
  return Random(sequence);
}

bool small_run() {
  const char* value = std::getenv("DELTA_ATTENTION_SMALL");
  return value != nullptr && std::string(value) == "1";
}

}  // namespace delta_attention::test
