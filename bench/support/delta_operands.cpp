#include "support/delta_operands.h"

#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "cuda/device/runtime.h"
#include "delta_attention_reference.h"
#include "support/device_data.h"
#include "support/inputs.h"
#include "support/parallel.h"

namespace bench {
namespace {

namespace reference = delta_attention::reference;

/// Sequences up to kWhole tokens are checked as a whole, kPart tokens of longer ones.
constexpr std::int64_t kWhole = 2048, kPart = 512;

/// The difference of a result from what it should be, and the size of the latter, element by element.
struct Norms {
  double difference = 0.0, expected = 0.0;

  void add(const std::vector<float>& actual, const std::vector<double>& wanted, std::size_t begin = 0) {
    for (std::size_t i = begin; i < actual.size(); ++i) {
      difference += std::pow(actual[i] - wanted[i], 2);
      expected += wanted[i] * wanted[i];
    }
  }
  double relative() const { return std::sqrt(difference / expected); }
};

class DeltaOperands : public Operands {
 public:
  DeltaOperands(const Case& c, std::uint64_t seed) : case_(c), sizes_(operand_sizes(c)) {
    for (int i = 0; i < kOperands; ++i) memory_.push_back(std::make_unique<DeviceMemory>(sizes_[i]));
    fill(seed);
    const std::int64_t sequence = c.sequences() - 1, head = c.value_heads - 1;
    pairs_ = {at_begin(0, 0), c.gates_per_head() > 0 ? at_end(sequence, head) : at_begin(sequence, head)};
    parallel_for(static_cast<std::int64_t>(pairs_.size()), [this](std::int64_t i) { expect(&pairs_[i]); });
  }

  std::unique_ptr<CudaCall> call(const std::string& kernel, const std::string&) const override {
    Addresses at;
    for (int i = 0; i < kOperands; ++i) at[i] = memory_[i]->data();
    return std::make_unique<CudaCall>(make_args(case_, at, delta_attention::cuda()), kernel);
  }

  void poison_outputs() override {
    for (const Operand output : {kOut, kFinalState}) {
      if (sizes_[output] > 0) DELTA_ATTENTION_CUDA(cudaMemset(data(output), kPoison, sizes_[output]));
    }
    DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());
  }

  double relative_error() const override {
    Norms norms;
    for (const Pair& p : pairs_) {
      const auto unchecked = static_cast<std::size_t>((p.checked - p.first) * case_.dim);
      norms.add(tokens_of(p, kOut, case_.dtype, case_.value_heads, p.head, case_.dim), p.out, unchecked);
    }
    return norms.relative();
  }

  std::optional<double> state_relative_error() const override {
    Norms norms;
    for (const Pair& p : pairs_) {
      if (case_.final_state && p.last == p.end) norms.add(state_of(p, kFinalState), p.state);
    }
    return norms.expected > 0.0 ? std::optional(norms.relative()) : std::nullopt;
  }

  double allowed_error() const override { return bench::allowed_error(case_.dtype, case_.dim); }
  double bytes() const override { return least_bytes(case_); }

 private:
  /// A value head of a sequence, and what it should give. Tokens are counted over all batch rows.
  struct Pair {
    std::int64_t sequence, head;
    std::int64_t begin, end;            // of the sequence
    std::int64_t first, last, checked;  // the reference goes over [first, last); compared are [checked, last)
    std::vector<double> out, state;     // [last - first, dim], [dim, dim]
  };

  void* data(Operand operand) const { return memory_[operand]->data(); }
  float* floats(Operand operand) const { return static_cast<float*>(data(operand)); }

  void fill(std::uint64_t seed) {
    const Case& c = case_;
    const auto source = [seed](Operand operand) { return RandomSource{seed, 16u * static_cast<std::uint64_t>(operand)}; };
    const std::int64_t tokens = c.batch * c.tokens;
    for (const Operand operand : {kQ, kK}) fill_normal(data(operand), c.dtype, tokens * c.heads, c.dim, !c.fused, source(operand));
    fill_normal(data(kV), c.dtype, tokens * c.value_heads, c.dim, false, source(kV));
    if (sizes_[kBeta] > 0 && c.fused) fill_normal(data(kBeta), c.logit_dtype(), tokens, c.value_heads, false, source(kBeta));
    if (sizes_[kBeta] > 0 && !c.fused) fill_uniform(floats(kBeta), tokens * c.value_heads, source(kBeta));
    if (sizes_[kInitialState] > 0) {
      fill_normal(data(kInitialState), DType::f32, c.sequences() * c.value_heads * c.dim, c.dim, true, source(kInitialState));
    }
    if (sizes_[kCuSeqlens] > 0) {
      const std::vector<std::int64_t> offsets = c.offsets();
      const std::vector<std::int32_t> narrow(offsets.begin(), offsets.end());
      DELTA_ATTENTION_CUDA(cudaMemcpy(data(kCuSeqlens), narrow.data(), sizes_[kCuSeqlens], cudaMemcpyHostToDevice));
    }
    fill_gates(tokens, source(kLogDecay), source(kALog), source(kDtBias));
  }

  void fill_gates(std::int64_t tokens, RandomSource logits, RandomSource rates, RandomSource biases) {
    const Case& c = case_;
    const std::int64_t gates = c.gates_per_head();
    if (gates == 0) return;
    if (!c.fused) return fill_strong_decays(floats(kLogDecay), tokens * c.value_heads, c.value_heads, gates, logits);
    const bool strong = c.decay == Decay::strong;
    fill_normal(data(kLogDecay), c.logit_dtype(), tokens, c.value_heads * gates, false, logits);
    fill_uniform(floats(kALog), c.value_heads, rates, 0.0f, strong ? 1.0f : 0.0f);
    fill_uniform(floats(kDtBias), c.value_heads * gates, biases, strong ? 0.0f : -6.0f, strong ? 1.0f : -4.0f);
  }

  /// The sequence as a whole.
  Pair pair(std::int64_t sequence, std::int64_t head) const {
    const bool packed = !case_.lengths.empty();
    const std::int64_t begin = packed ? case_.offsets()[sequence] : sequence * case_.tokens;
    const std::int64_t end = begin + (packed ? case_.lengths[sequence] : case_.tokens);
    return {sequence, head, begin, end, begin, end, begin, {}, {}};
  }

  Pair at_begin(std::int64_t sequence, std::int64_t head) const {
    Pair p = pair(sequence, head);
    if (p.end - p.begin > kWhole) p.last = p.begin + kPart;
    return p;
  }

  /// Starts from a state of zeros so far before the tokens compared that gates forget what it was.
  Pair at_end(std::int64_t sequence, std::int64_t head) const {
    Pair p = pair(sequence, head);
    if (p.end - p.begin <= kWhole) return p;
    p.first = p.end - kWhole;
    p.checked = p.end - kPart;
    return p;
  }

  /// The tokens that the reference goes over, of an operand [B,T,heads,width].
  std::vector<float> tokens_of(const Pair& p, Operand operand, DType dtype, std::int64_t heads, std::int64_t head,
                               std::int64_t width) const {
    std::vector<std::int64_t> begins;
    for (std::int64_t t = p.first; t < p.last; ++t) begins.push_back((t * heads + head) * width);
    return read_rows(data(operand), dtype, begins, width);
  }

  std::vector<float> state_of(const Pair& p, Operand operand) const {
    std::vector<std::int64_t> begins;
    for (std::int64_t i = 0; i < case_.dim; ++i) begins.push_back(((p.sequence * case_.value_heads + p.head) * case_.dim + i) * case_.dim);
    return read_rows(data(operand), DType::f32, begins, case_.dim);
  }

  /// The inputs of a pair, in f32, which holds every storage type.
  std::array<std::vector<float>, kOperands> inputs_of(const Pair& p) const {
    const Case& c = case_;
    const std::int64_t gates = c.gates_per_head(), key_head = p.head / (c.value_heads / c.heads);
    std::array<std::vector<float>, kOperands> inputs;
    for (const Operand operand : {kQ, kK}) inputs[operand] = tokens_of(p, operand, c.dtype, c.heads, key_head, c.dim);
    inputs[kV] = tokens_of(p, kV, c.dtype, c.value_heads, p.head, c.dim);
    if (gates > 0) inputs[kLogDecay] = tokens_of(p, kLogDecay, c.logit_dtype(), c.value_heads, p.head, gates);
    if (sizes_[kBeta] > 0) inputs[kBeta] = tokens_of(p, kBeta, c.logit_dtype(), c.value_heads, p.head, 1);
    if (sizes_[kALog] > 0) inputs[kALog] = read_rows(data(kALog), DType::f32, {p.head}, 1);
    if (sizes_[kDtBias] > 0) inputs[kDtBias] = read_rows(data(kDtBias), DType::f32, {p.head * gates}, gates);
    if (sizes_[kInitialState] > 0) inputs[kInitialState] = state_of(p, kInitialState);
    return inputs;
  }

  /// Runs the reference on a pair, as a case of one head.
  void expect(Pair* p) const {
    std::array<std::vector<float>, kOperands> inputs = inputs_of(*p);
    Case one = case_;
    one.dtype = DType::f32;
    one.batch = one.heads = one.value_heads = 1;
    one.tokens = p->last - p->first;
    one.lengths.clear();
    one.initial_state = case_.initial_state && p->first == p->begin;
    Addresses at;
    for (int i = 0; i < kOperands; ++i) at[i] = inputs[i].data();
    ForwardArgs args = make_args(one, at, delta_attention::cpu());
    p->out.resize(static_cast<std::size_t>(one.tokens * one.dim));
    p->state.resize(static_cast<std::size_t>(one.dim * one.dim));
    args.out = delta_attention::tensor(p->out.data(), {1, one.tokens, 1, one.dim});
    args.final_state = delta_attention::tensor(p->state.data(), {1, 1, one.dim, one.dim});
    reference::forward_head(args, 0, 0, 0, one.tokens, 0);
  }

  Case case_;
  Sizes sizes_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
  std::vector<Pair> pairs_;
};

}  // namespace

std::string checked_part() {
  const std::string part = std::to_string(kPart);
  return "first head of the first sequence and last head of the last one; of sequences of more than " + std::to_string(kWhole) +
         " tokens the first " + part + " of the former, the last " + part + " of the latter (without a gate the first, too)";
}

std::unique_ptr<Operands> delta_operands(const Case& c, std::uint64_t seed) { return std::make_unique<DeltaOperands>(c, seed); }

}  // namespace bench
