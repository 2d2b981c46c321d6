#include "support/case.h"

#include <numeric>
#include <stdexcept>

namespace bench {
namespace {

using delta_attention::Gate;
using delta_attention::Recurrence;
using delta_attention::Update;

/// Decays in memory: retention keeps one number a head.
std::int64_t decay_elements(const Case& c) {
  if (c.decay == Decay::fixed) return c.value_heads;
  return c.batch * c.tokens * c.value_heads * c.gates_per_head();
}

/// Gate and beta logits, and what their fusion takes beside them.
void fuse(const Case& c, const Addresses& at, Device device, ForwardArgs* args) {
  args->qk_l2norm = true;
  args->beta_space = delta_attention::BetaSpace::sigmoid;
  if (c.gates_per_head() == 0) return;
  const bool channel = args->recurrence.gate == Gate::channel;
  args->gate_space = channel ? delta_attention::GateSpace::lower_bound : delta_attention::GateSpace::softplus;
  args->a_log = delta_attention::tensor(at[kALog], DType::f32, {c.value_heads}, device);
  args->dt_bias = channel ? delta_attention::tensor(at[kDtBias], DType::f32, {c.value_heads, c.dim}, device)
                          : delta_attention::tensor(at[kDtBias], DType::f32, {c.value_heads}, device);
}

}  // namespace

Recurrence Case::recurrence() const {
  for (const delta_attention::Preset& candidate : delta_attention::kPresets) {
    if (preset == candidate.name) return candidate.recurrence;
  }
  throw std::invalid_argument("no preset is called " + preset);
}

std::int64_t Case::sequences() const { return lengths.empty() ? batch : static_cast<std::int64_t>(lengths.size()); }

std::vector<std::int64_t> Case::offsets() const {
  std::vector<std::int64_t> result(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), result.begin() + 1);
  return result;
}

std::int64_t Case::gates_per_head() const {
  if (decay == Decay::none) return 0;
  return recurrence().gate == Gate::channel ? dim : 1;
}

std::string Case::name(const std::string& kernel, const std::string& program) const {
  std::string text = program + "/" + preset + "/" + kernel + "/" + delta_attention::name(dtype) + "/";
  const auto part = [&](const char* key, std::int64_t value) {
    text += std::string(key) + ":" + std::to_string(value) + " ";
  };
  part("B", batch);
  part("T", tokens);
  part("H", heads);
  part("HV", value_heads);
  part("K", dim);
  part("V", dim);
  part("N", sequences());
  if (decay == Decay::strong) text += "gate:strong ";
  if (decay == Decay::weak) text += "gate:weak ";
  text.pop_back();
  return text;
}

Sizes operand_sizes(const Case& c) {
  const auto bytes = [](std::int64_t elements, DType dtype) {
    return static_cast<std::size_t>(elements) * delta_attention::size_of(dtype);
  };
  const std::int64_t tokens = c.batch * c.tokens, states = c.sequences() * c.value_heads * c.dim * c.dim;
  const bool delta = c.recurrence().update == Update::delta, fused_gate = c.fused && c.gates_per_head() > 0;
  Sizes sizes{};
  sizes[kQ] = sizes[kK] = bytes(tokens * c.heads * c.dim, c.dtype);
  sizes[kV] = sizes[kOut] = bytes(tokens * c.value_heads * c.dim, c.dtype);
  sizes[kLogDecay] = bytes(decay_elements(c), c.logit_dtype());
  sizes[kBeta] = delta ? bytes(tokens * c.value_heads, c.logit_dtype()) : 0;
  sizes[kALog] = fused_gate ? bytes(c.value_heads, DType::f32) : 0;
  sizes[kDtBias] = fused_gate ? bytes(c.value_heads * c.gates_per_head(), DType::f32) : 0;
  sizes[kInitialState] = c.initial_state ? bytes(states, DType::f32) : 0;
  sizes[kCuSeqlens] = c.lengths.empty() ? 0 : (c.lengths.size() + 1) * sizeof(std::int32_t);
  sizes[kFinalState] = c.final_state ? bytes(states, DType::f32) : 0;
  return sizes;
}

double least_bytes(const Case& c) {
  const Sizes sizes = operand_sizes(c);
  return static_cast<double>(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}));
}

double recurrence_flops(const Case& c) {
  const Recurrence r = c.recurrence();
  const double accumulate = 2, read = 2, predict = r.update == Update::delta ? 2 : 0,
               decay = r.gate == Gate::none ? 0 : 1;
  const double state = static_cast<double>(c.dim) * static_cast<double>(c.dim);
  return static_cast<double>(c.batch * c.tokens * c.value_heads) * state * (accumulate + read + predict + decay);
}

ForwardArgs make_args(const Case& c, const Addresses& at, Device device) {
  const std::int64_t B = c.batch, T = c.tokens, H = c.heads, HV = c.value_heads, D = c.dim, N = c.sequences();
  const Sizes sizes = operand_sizes(c);
  ForwardArgs args;
  args.q = delta_attention::tensor(at[kQ], c.dtype, {B, T, H, D}, device);
  args.k = delta_attention::tensor(at[kK], c.dtype, {B, T, H, D}, device);
  args.v = delta_attention::tensor(at[kV], c.dtype, {B, T, HV, D}, device);
  args.out = delta_attention::tensor(at[kOut], c.dtype, {B, T, HV, D}, device);
  args.recurrence = c.recurrence();
  if (c.decay == Decay::fixed) {
    args.log_decay = delta_attention::strided_tensor(at[kLogDecay], DType::f32, {B, T, HV}, {0, 0, 1}, device);
  } else if (args.recurrence.gate == Gate::scalar) {
    args.log_decay = delta_attention::tensor(at[kLogDecay], c.logit_dtype(), {B, T, HV}, device);
  } else if (args.recurrence.gate == Gate::channel) {
    args.log_decay = delta_attention::tensor(at[kLogDecay], c.logit_dtype(), {B, T, HV, D}, device);
  }
  if (sizes[kBeta] > 0) args.beta = delta_attention::tensor(at[kBeta], c.logit_dtype(), {B, T, HV}, device);
  if (c.fused) fuse(c, at, device, &args);
  if (c.initial_state) args.initial_state = delta_attention::tensor(at[kInitialState], DType::f32, {N, HV, D, D}, device);
  if (c.final_state) args.final_state = delta_attention::tensor(at[kFinalState], DType::f32, {N, HV, D, D}, device);
  if (sizes[kCuSeqlens] > 0) args.cu_seqlens = delta_attention::tensor(at[kCuSeqlens], DType::i32, {N + 1}, device);
  return args;
}

ForwardArgs shape_only_args(const Case& c, Device device, const std::vector<std::int32_t>& cu_seqlens) {
  constexpr std::uintptr_t kApart = std::uintptr_t{1} << 40;  // more than any operand takes, so that none overlap
  Addresses addresses;
  for (std::size_t i = 0; i < addresses.size(); ++i) addresses[i] = reinterpret_cast<void*>(kApart * (i + 1));
  addresses[kCuSeqlens] = const_cast<std::int32_t*>(cu_seqlens.data());
  return make_args(c, addresses, device);
}

}  // namespace bench
