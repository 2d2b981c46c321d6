#include "api/check_views.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "api/device.h"
#include "delta_attention/error.h"

namespace delta_attention {
namespace {

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
  std::array<std::pair<std::int64_t, std::int64_t>, kMaxRank> axes;  // stride, extent
  for (int axis = 0; axis < operand.view.rank; ++axis) axes[axis] = {operand.view.strides[axis], operand.view.shape[axis]};
  std::sort(axes.begin(), axes.begin() + operand.view.rank);
  std::int64_t reach = 0;
  for (int axis = 0; axis < operand.view.rank; ++axis) {
    const auto [stride, extent] = axes[axis];
    if (extent <= 1) continue;
    if (stride <= reach) {
      throw InvalidArgument(operand.name, "strides that give every element memory of its own",
                            stride_text(operand.view));
    }
    reach += stride * (extent - 1);
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

}  // namespace

std::string shape_text(const View& x) {
  return x.present() ? fmt::format("[{}]", fmt::join(x.shape.begin(), x.shape.begin() + x.rank, ",")) : "none";
}

std::string stride_text(const View& x) {
  return fmt::format("strides [{}]", fmt::join(x.strides.begin(), x.strides.begin() + x.rank, ","));
}

void require_present(const char* name, const View& x, const char* what) {
  if (!x.present()) throw InvalidArgument(name, what, "none");
}

void require_absent(const char* name, const View& x, const char* why) {
  if (x.present()) throw InvalidArgument(name, fmt::format("none ({})", why), shape_text(x));
}

bool is_floating(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16 || dtype == DType::f64;
}

bool is_integer(DType dtype) { return dtype == DType::i32 || dtype == DType::i64; }

void require_finite_scale(const std::optional<float>& scale) {
  if (scale && !std::isfinite(*scale)) throw InvalidArgument("scale", "a finite number", fmt::format("{}", *scale));
}

std::int64_t packed_sequences(const char* name, const View& offsets, std::int64_t batch, const char* axis) {
  if (offsets.rank != 1 || offsets.shape[0] < 1) {
    throw InvalidArgument(name, "shape [N+1] with N+1 >= 1", shape_text(offsets));
  }
  if (batch != 1) {
    throw InvalidArgument(name, fmt::format("B = 1 (packed sequences lie along {})", axis), fmt::format("B = {}", batch));
  }
  return offsets.shape[0] - 1;
}

std::int64_t integer_at(const View& x, std::int64_t at) {
  return x.dtype == DType::i32 ? static_cast<const std::int32_t*>(x.data)[at] : static_cast<const std::int64_t*>(x.data)[at];
}

void check_offsets(const char* name, const View& offsets, std::int64_t last, const char* axis) {
  const auto at = [&](std::int64_t n) { return integer_at(offsets, n * offsets.strides[0]); };
  const std::int64_t sequences = offsets.shape[0] - 1;
  if (at(0) != 0) throw InvalidArgument(name, "a first entry of 0", std::to_string(at(0)));
  for (std::int64_t n = 0; n < sequences; ++n) {
    if (at(n + 1) < at(n)) {
      throw InvalidArgument(name, "entries that never decrease", fmt::format("entry {} = {} after {}", n + 1, at(n + 1), at(n)));
    }
  }
  if (at(sequences) != last) {
    throw InvalidArgument(name, fmt::format("a last entry of {} = {}", axis, last), std::to_string(at(sequences)));
  }
}

void check_ranks(const Operands& all) {
  for (const NamedOperand& operand : all) {
    if (operand.view.rank < 0 || operand.view.rank > kMaxRank) {
      throw InvalidArgument(operand.name, "a rank from 0 to 4", std::to_string(operand.view.rank));
    }
  }
}

void require_shape(const char* name, const View& x, std::initializer_list<std::int64_t> shape, const char* axes) {
  const bool same = x.rank == static_cast<int>(shape.size()) && std::equal(shape.begin(), shape.end(), x.shape.begin());
  if (!same) throw InvalidArgument(name, fmt::format("shape {} = [{}]", axes, fmt::join(shape, ",")), shape_text(x));
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

void check_devices(Device device, const Operands& all) {
  for (const NamedOperand& operand : all) {
    if (operand.view.present() && operand.view.device != device) {
      throw InvalidArgument(operand.name, "a tensor on " + device_text(device) + ", where q is",
                            "one on " + device_text(operand.view.device));
    }
  }
}

void check_overlap(const Operands& all, bool (*may_be_same)(std::string_view written, std::string_view read)) {
  for (const NamedOperand& output : all) {
    if (!output.is_output || output.view.elements() == 0) continue;
    const Span a = span_of(output);
    for (const NamedOperand& other : all) {
      if (&other == &output || other.view.elements() == 0) continue;
      const Span b = span_of(other);
      const bool apart = a.begin >= b.end || b.begin >= a.end;
      if (apart || (may_be_same(output.name, other.name) && same_view(output.view, other.view))) continue;
      if ((a.dense && b.dense) || a.begin == b.begin) {
        throw InvalidArgument(output.name, fmt::format("memory apart from {}", other.name), "overlapping memory");
      }
    }
  }
}

}  // namespace delta_attention
