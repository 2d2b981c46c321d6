#include "api/check.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>
#include <vector>

#include "api/device.h"

namespace delta_attention {
namespace {

using View = ConstTensor;

std::string shape_text(const View& x) {
  return x.present() ? fmt::format("[{}]", fmt::join(x.shape.begin(), x.shape.begin() + x.rank, ",")) : "none";
}

std::string stride_text(const View& x) {
  return fmt::format("strides [{}]", fmt::join(x.strides.begin(), x.strides.begin() + x.rank, ","));
}

bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f64;
}

using Operands = std::vector<NamedOperand>;

void require_present(const char* name, const View& x, const char* what) {
  if (!x.present()) throw InvalidArgument(name, what, "none");
}

void require_absent(const char* name, const View& x, const std::string& why) {
  if (x.present()) throw InvalidArgument(name, "none (" + why + ")", shape_text(x));
}

/// Before anything else: printing a shape trusts its rank.
void check_ranks(const Operands& all) {
  for (const NamedOperand& operand : all) {
    if (operand.view.rank < 0 || operand.view.rank > kMaxRank) {
      throw InvalidArgument(operand.name, "a rank from 0 to 4", std::to_string(operand.view.rank));
    }
  }
}

void require_shape(const char* name, const View& x, const std::vector<std::int64_t>& shape, const char* axes) {
  const bool same = x.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), x.shape.begin());
  if (!same) throw InvalidArgument(name, fmt::format("shape {} = [{}]", axes, fmt::join(shape, ",")), shape_text(x));
}

/// The highest offset of the view, or InvalidArgument if it does not fit 64 bits.
std::int64_t last_offset(const NamedOperand& operand) {
  std::int64_t last = 0;
  for (int axis = 0; axis < operand.view.rank; ++axis) {
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(std::max<std::int64_t>(operand.view.shape[axis] - 1, 0), operand.view.strides[axis],
                               &reach) ||
        __builtin_add_overflow(last, reach, &last)) {
      throw InvalidArgument(operand.name, "offsets that fit in 64 bits", stride_text(operand.view));
    }
  }
  constexpr std::int64_t kMostElements = INT64_MAX / 16;
  if (last > kMostElements) {
    throw InvalidArgument(operand.name, "offsets that fit in 64 bits", stride_text(operand.view));
  }
  return last;
}

/// Writable views must not map two indices to one element. Sufficient test: sorted by stride, each axis steps over the last.
void require_distinct_elements(const NamedOperand& operand) {
  std::vector<std::pair<std::int64_t, std::int64_t>> axes;  // stride, extent
  for (int axis = 0; axis < operand.view.rank; ++axis) {
    if (operand.view.shape[axis] > 1) axes.emplace_back(operand.view.strides[axis], operand.view.shape[axis]);
  }
  std::sort(axes.begin(), axes.end());
  std::int64_t reach = 0;
  for (const auto& [stride, extent] : axes) {
    if (stride <= reach) {
      throw InvalidArgument(operand.name, "strides that give every element memory of its own",
                            stride_text(operand.view));
    }
    reach += stride * (extent - 1);
  }
}

void check_memory(const NamedOperand& operand) {
  const View& x = operand.view;
  for (int axis = 0; axis < x.rank; ++axis) {
    if (x.shape[axis] < 0) throw InvalidArgument(operand.name, "extents of 0 or more", shape_text(x));
    if (x.shape[axis] > 1 && x.strides[axis] < 0) {
      throw InvalidArgument(operand.name, "strides of 0 or more", stride_text(x));
    }
  }
  last_offset(operand);
  if (x.elements() > 0 && x.data == nullptr) {
    throw InvalidArgument(operand.name, "a data pointer for shape " + shape_text(x), "a null pointer");
  }
  if (reinterpret_cast<std::uintptr_t>(x.data) % size_of(x.dtype) != 0) {
    throw InvalidArgument(operand.name, fmt::format("a data pointer aligned to its {} elements", name(x.dtype)),
                          fmt::format("{}", x.data));
  }
  if (operand.is_output && x.elements() > 0) require_distinct_elements(operand);
}

void require_unit_stride(const char* name, const View& x, int axis) {
  if (x.shape[axis] > 1 && x.strides[axis] != 1) {
    throw InvalidArgument(name, "stride 1 on the last axis", stride_text(x));
  }
}

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
    if (is_offsets && dtype != DType::i32 && dtype != DType::i64) {
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

void check_devices(Device device, const Operands& all) {
  for (const NamedOperand& operand : all) {
    if (operand.view.present() && operand.view.device != device) {
      throw InvalidArgument(operand.name, "a tensor on " + device_text(device) + ", where q is",
                            "one on " + device_text(operand.view.device));
    }
  }
}

struct Span {
  const char* begin;
  const char* end;
  bool dense;  // no gaps: every byte between begin and end belongs to the view
};

Span span_of(const NamedOperand& operand) {
  const auto* begin = static_cast<const char*>(operand.view.data);
  const std::int64_t count = last_offset(operand) + 1;
  return {begin, begin + count * static_cast<std::int64_t>(size_of(operand.view.dtype)),
          operand.view.elements() == count};
}

bool same_view(const View& a, const View& b) {
  return a.data == b.data && a.dtype == b.dtype && a.rank == b.rank && a.shape == b.shape && a.strides == b.strides;
}

/// Outputs share no memory with other operands. Only views without gaps are compared: slices of one fused buffer interleave
/// without overlapping. A state may be updated in place.
void check_overlap(const Operands& all) {
  for (const NamedOperand& output : all) {
    if (!output.is_output || output.view.elements() == 0) continue;
    for (const NamedOperand& other : all) {
      if (&other == &output || other.view.elements() == 0) continue;
      const std::string_view written = output.name, read = other.name;
      const bool in_place = (written == "final_state" && read == "initial_state") ||
                            (written == "final_normalizer" && read == "initial_normalizer");
      if (in_place && same_view(output.view, other.view)) continue;
      const Span a = span_of(output), b = span_of(other);
      const bool overlap = a.begin < b.end && b.begin < a.end;
      if (overlap && ((a.dense && b.dense) || a.begin == b.begin)) {
        throw InvalidArgument(output.name, fmt::format("memory apart from {}", other.name), "overlapping memory");
      }
    }
  }
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

std::int64_t count_sequences(const ForwardArgs& args, const Problem& p) {
  if (!args.cu_seqlens.present()) return p.batch;
  const View& offsets = args.cu_seqlens;
  if (offsets.rank != 1 || offsets.shape[0] < 1) {
    throw InvalidArgument("cu_seqlens", "shape [N+1] with N+1 >= 1", shape_text(offsets));
  }
  if (p.batch != 1) {
    throw InvalidArgument("cu_seqlens", "B = 1 (packed sequences lie along T)", fmt::format("B = {}", p.batch));
  }
  return offsets.shape[0] - 1;
}

template <class Operand, class TensorView>
Operand operand_of(const TensorView& x) {
  Operand operand;
  operand.data = x.data;
  operand.dtype = x.dtype;
  operand.present = x.present();
  for (int axis = 0; axis < x.rank; ++axis) operand.strides[axis] = x.strides[axis];
  return operand;
}
InputOperand input(const ConstTensor& x) { return operand_of<InputOperand>(x); }
OutputOperand output(const Tensor& x) { return operand_of<OutputOperand>(x); }

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
          {"final_normalizer", args.final_normalizer, true}};
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
  check_overlap(all);
  if (args.scale && !std::isfinite(*args.scale)) {
    throw InvalidArgument("scale", "a finite number", fmt::format("{}", *args.scale));
  }

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
    check_offsets(args.cu_seqlens.data, p);
  }
  return p;
}

}  // namespace delta_attention
