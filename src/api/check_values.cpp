#include <fmt/format.h>

#include <cstdint>

#include "api/check.h"
#include "api/check_views.h"
#include "api/device.h"

namespace delta_attention {
namespace {

/// The bytes of an operand from its first element to the one at `last`.
HostCopy read_back(const InputOperand& operand, std::int64_t last, const Problem& p) {
  return HostCopy(operand.data, static_cast<std::size_t>(last + 1) * size_of(operand.dtype), p.device);
}

double load_number(const void* data, DType dtype, std::int64_t index) {
  return dtype == DType::f64 ? static_cast<const double*>(data)[index] : load_element(data, dtype, index);
}

void check_gate_values(const ForwardArgs& args, const Problem& p) {
  const bool linear = args.gate_space == GateSpace::linear;
  const bool has_domain = linear || args.gate_space == GateSpace::log || args.gate_space == GateSpace::log2;
  if (!has_domain || args.log_decay.elements() == 0) return;
  const bool per_channel = args.log_decay.rank == 4;
  const std::int64_t channels = per_channel ? p.key_dim : 1;
  const std::int64_t last = p.log_decay.offset(p.batch - 1, p.tokens - 1, p.value_heads - 1, channels - 1);
  const HostCopy copy = read_back(p.log_decay, last, p);
  for (std::int64_t b = 0; b < p.batch; ++b) {
    for (std::int64_t t = 0; t < p.tokens; ++t) {
      for (std::int64_t h = 0; h < p.value_heads; ++h) {
        for (std::int64_t c = 0; c < channels; ++c) {
          const double x = load_number(copy.data(), p.log_decay.dtype, p.log_decay.offset(b, t, h, c));
          if (linear ? x >= 0.0 && x <= 1.0 : x <= 0.0) continue;
          throw InvalidArgument(fmt::format(per_channel ? "log_decay[{},{},{},{}]" : "log_decay[{},{},{}]", b, t, h, c),
                                linear ? "a decay in [0, 1]" : "a log decay <= 0", fmt::format("{}", x));
        }
      }
    }
  }
}

}  // namespace

void check_values(const ForwardArgs& args, const Problem& p) {
  for (const NamedOperand& operand : operands(args)) {
    if (operand.view.elements() > 0) require_device_pointer(operand.name, operand.view.data, p.device);
  }
  if (p.cu_seqlens.present && p.device.type == DeviceType::cuda) {
    const HostCopy copy = read_back(p.cu_seqlens, p.cu_seqlens.offset(p.sequences), p);
    View offsets = args.cu_seqlens;
    offsets.data = copy.data();
    check_offsets("cu_seqlens", offsets, p.tokens, "T");
  }
  check_gate_values(args, p);
}

}  // namespace delta_attention
