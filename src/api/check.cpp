#include "api/check.h"

#include <fmt/format.h>

#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "api/check_views.h"

namespace delta_attention {
namespace {

void require_state_strides(const char* name, const View& x) {
  const bool row_major = x.shape[3] <= 1 || x.strides[3] == 1;
  const bool column_major = x.shape[2] <= 1 || x.strides[2] == 1;
  if (!row_major && !column_major) throw InvalidArgument(name, "stride 1 on K or on V", stride_text(x));
}

void check_dtypes(const ForwardArgs& args, const Operands& all) {
  for (const NamedOperand& operand : all) {
    if (!operand.view.present()) continue;
    const bool is_offsets = operand.name == std::string_view("cu_seqlens");
    const DType dtype = operand.view.dtype;
    if (is_offsets && !is_integer(dtype)) {
      throw InvalidArgument(operand.name, "dtype i32 or i64", name(dtype));
    }
    if (!is_offsets && !is_floating(dtype)) {
      throw InvalidArgument(operand.name, "dtype f32, f16, bf16 or f64", name(dtype));
    }
  }
  const auto same_as_q = [&](const char* operand, const View& x) {
    if (x.dtype != args.q.dtype) {
      throw InvalidArgument(operand, fmt::format("dtype {}, as q has", name(args.q.dtype)), name(x.dtype));
    }
  };
  same_as_q("k", args.k);
  same_as_q("v", args.v);
  same_as_q("out", args.out);
}

/// A state may be updated in place.
bool may_be_updated_in_place(std::string_view written, std::string_view read) {
  return (written == "final_state" && read == "initial_state") ||
         (written == "final_normalizer" && read == "initial_normalizer");
}

void check_gate(const ForwardArgs& args, const Problem& p) {
  if (args.recurrence.gate == Gate::none) {
    require_absent("log_decay", args.log_decay, "the recurrence has no gate");
  } else if (args.log_decay.present()) {
    if (args.recurrence.gate == Gate::scalar) {
      require_shape("log_decay", args.log_decay, {p.batch, p.tokens, p.value_heads}, "[B,T,HV] (scalar gate)");
    } else {
      require_shape("log_decay", args.log_decay, {p.batch, p.tokens, p.value_heads, p.key_dim},
                    "[B,T,HV,K] (channel gate)");
      require_unit_stride("log_decay", args.log_decay, 3);
    }
  }
  const bool raw = args.gate_space == GateSpace::softplus || args.gate_space == GateSpace::lower_bound;
  if (!raw || !args.log_decay.present()) {
    const char* why = raw ? "there is no log_decay to transform" : "used by gate_space softplus and lower_bound only";
    require_absent("a_log", args.a_log, why);
    require_absent("dt_bias", args.dt_bias, why);
    return;
  }
  require_present("a_log", args.a_log, "a tensor [HV] (gate_space is softplus or lower_bound)");
  require_shape("a_log", args.a_log, {p.value_heads}, "[HV]");
  if (args.dt_bias.present()) {
    if (args.recurrence.gate == Gate::scalar) {
      require_shape("dt_bias", args.dt_bias, {p.value_heads}, "[HV] (scalar gate)");
    } else {
      require_shape("dt_bias", args.dt_bias, {p.value_heads, p.key_dim}, "[HV,K] (channel gate)");
    }
  }
  const bool bound_ok = std::isfinite(args.gate_lower_bound) && args.gate_lower_bound < 0.0f;
  if (args.gate_space == GateSpace::lower_bound && !bound_ok) {
    throw InvalidArgument("gate_lower_bound", "a finite number below 0", fmt::format("{}", args.gate_lower_bound));
  }
}

void check_states(const ForwardArgs& args, const Problem& p) {
  const std::pair<const char*, View> states[] = {{"initial_state", args.initial_state},
                                                 {"final_state", args.final_state}};
  for (const auto& [operand, state] : states) {
    if (!state.present()) continue;
    require_shape(operand, state, {p.sequences, p.value_heads, p.key_dim, p.value_dim}, "[N,HV,K,V]");
    require_state_strides(operand, state);
  }
  const std::pair<const char*, View> normalizers[] = {{"initial_normalizer", args.initial_normalizer},
                                                      {"final_normalizer", args.final_normalizer}};
  for (const auto& [operand, normalizer] : normalizers) {
    if (!args.recurrence.normalize) require_absent(operand, normalizer, "the recurrence is not normalised");
    if (normalizer.present()) require_shape(operand, normalizer, {p.sequences, p.value_heads, p.key_dim}, "[N,HV,K]");
  }
}

void check_intermediate_states(const ForwardArgs& args, const Problem& p) {
  const View& states = args.intermediate_states;
  const std::int64_t interval = args.state_interval;
  if (!states.present()) {
    if (interval != 0) throw InvalidArgument("state_interval", "0 (no intermediate_states came)", std::to_string(interval));
    return;
  }
  if (interval < 1) throw InvalidArgument("state_interval", "1 or more, with intermediate_states", std::to_string(interval));
  require_shape("intermediate_states", states, {p.intermediate_capacity(), p.value_heads, p.key_dim, p.value_dim},
                "[B floor(T / state_interval),HV,K,V]");
  require_state_strides("intermediate_states", states);
}

std::int64_t count_sequences(const ForwardArgs& args, const Problem& p) {
  if (!args.cu_seqlens.present()) return p.batch;
  return packed_sequences("cu_seqlens", args.cu_seqlens, p.batch, "T");
}

/// Sizes from q and v, and the shapes of everything else against them.
Problem check_shapes(const ForwardArgs& args) {
  require_present("q", args.q, "a tensor [B,T,H,K]");
  require_present("k", args.k, "a tensor [B,T,H,K]");
  require_present("v", args.v, "a tensor [B,T,HV,V]");
  require_present("out", args.out, "a tensor [B,T,HV,V]");
  if (args.q.rank != 4) throw InvalidArgument("q", "shape [B,T,H,K]", shape_text(args.q));
  if (args.v.rank != 4) throw InvalidArgument("v", "shape [B,T,HV,V]", shape_text(args.v));

  Problem p;
  p.batch = args.q.shape[0];
  p.tokens = args.q.shape[1];
  p.heads = args.q.shape[2];
  p.key_dim = args.q.shape[3];
  p.value_heads = args.v.shape[2];
  p.value_dim = args.v.shape[3];
  if (p.heads < 1 || p.key_dim < 1) throw InvalidArgument("q", "at least one head and one channel", shape_text(args.q));
  if (p.value_dim < 1 || p.value_heads < 1 || p.value_heads % p.heads != 0) {
    throw InvalidArgument("v", fmt::format("V >= 1 and HV a multiple of H = {}", p.heads), shape_text(args.v));
  }
  require_shape("k", args.k, {p.batch, p.tokens, p.heads, p.key_dim}, "[B,T,H,K]");
  require_shape("v", args.v, {p.batch, p.tokens, p.value_heads, p.value_dim}, "[B,T,HV,V]");
  require_shape("out", args.out, {p.batch, p.tokens, p.value_heads, p.value_dim}, "[B,T,HV,V]");
  require_unit_stride("q", args.q, 3);
  require_unit_stride("k", args.k, 3);
  require_unit_stride("v", args.v, 3);
  require_unit_stride("out", args.out, 3);
  if (args.beta.present()) require_shape("beta", args.beta, {p.batch, p.tokens, p.value_heads}, "[B,T,HV]");
  p.sequences = count_sequences(args, p);
  return p;
}

void require_known_enums(const ForwardArgs& args) {
  const auto in_range = [](auto value, auto last) {
    return static_cast<int>(value) >= 0 && static_cast<int>(value) <= static_cast<int>(last);
  };
  const auto require = [](bool ok, const char* operand, int value) {
    if (!ok) throw InvalidArgument(operand, "one of its enumerators", std::to_string(value));
  };
  require(in_range(args.recurrence.update, Update::delta), "recurrence.update",
          static_cast<int>(args.recurrence.update));
  require(in_range(args.recurrence.gate, Gate::channel), "recurrence.gate", static_cast<int>(args.recurrence.gate));
  require(in_range(args.gate_space, GateSpace::lower_bound), "gate_space", static_cast<int>(args.gate_space));
  require(in_range(args.beta_space, BetaSpace::twice_sigmoid), "beta_space", static_cast<int>(args.beta_space));
}

}  // namespace

std::vector<NamedOperand> operands(const ForwardArgs& args) {
  return {{"q", args.q, false},
          {"k", args.k, false},
          {"v", args.v, false},
          {"log_decay", args.log_decay, false},
          {"beta", args.beta, false},
          {"initial_state", args.initial_state, false},
          {"initial_normalizer", args.initial_normalizer, false},
          {"cu_seqlens", args.cu_seqlens, false},
          {"a_log", args.a_log, false},
          {"dt_bias", args.dt_bias, false},
          {"out", args.out, true},
          {"final_state", args.final_state, true},
          {"final_normalizer", args.final_normalizer, true},
          {"intermediate_states", args.intermediate_states, true}};
}

Problem check(const ForwardArgs& args) {
  const Operands all = operands(args);
  require_known_enums(args);
  check_ranks(all);
  Problem p = check_shapes(args);
  check_dtypes(args, all);
  check_devices(args.q.device, all);
  check_gate(args, p);
  check_states(args, p);
  for (const NamedOperand& operand : all) check_memory(operand);
  check_overlap(all, may_be_updated_in_place);
  require_finite_scale(args.scale);

  p.q = input(args.q);
  p.k = input(args.k);
  p.v = input(args.v);
  p.log_decay = input(args.log_decay);
  p.beta = input(args.beta);
  p.initial_state = input(args.initial_state);
  p.initial_normalizer = input(args.initial_normalizer);
  p.cu_seqlens = input(args.cu_seqlens);
  p.a_log = input(args.a_log);
  p.dt_bias = input(args.dt_bias);
  p.out = output(args.out);
  p.final_state = output(args.final_state);
  p.final_normalizer = output(args.final_normalizer);
  p.intermediate_states = output(args.intermediate_states);
  p.state_interval = args.state_interval;
  check_intermediate_states(args, p);  // of p as it stands; B T fits 64 bits, or the memory of out would not have passed

  p.update = args.recurrence.update;
  p.gate = args.log_decay.present() ? args.recurrence.gate : Gate::none;
  p.normalize = args.recurrence.normalize;
  p.qk_l2norm = args.qk_l2norm;
  p.beta_space = args.beta_space;
  p.gate_space = args.gate_space;
  p.gate_lower_bound = args.gate_lower_bound;
  p.scale = args.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.key_dim)));
  p.dtype = args.q.dtype;
  p.device = args.q.device;
  for (const NamedOperand& operand : all) p.has_f64 |= operand.view.present() && operand.view.dtype == DType::f64;

  if (args.cu_seqlens.present() && p.device.type == DeviceType::cpu) {
    check_offsets("cu_seqlens", args.cu_seqlens, p.tokens, "T");
  }
  return p;
}

}  // namespace delta_attention
