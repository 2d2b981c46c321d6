#pragma once

// Checks of tensor views that all calls share: shapes, strides, memory, devices. All throw InvalidArgument with the operand's name.

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/check.h"
#include "delta_attention/tensor.h"
#include "problem/problem.h"

namespace delta_attention {

using View = ConstTensor;
using Operands = std::vector<NamedOperand>;

std::string shape_text(const View& x);
std::string stride_text(const View& x);

void require_present(const char* name, const View& x, const char* what);
void require_absent(const char* name, const View& x, const char* why);
void require_shape(const char* name, const View& x, std::initializer_list<std::int64_t> shape, const char* axes);
void require_unit_stride(const char* name, const View& x, int axis);

bool is_floating(DType dtype);  // f64 included
bool is_integer(DType dtype);

void require_finite_scale(const std::optional<float>& scale);

/// How many packed sequences offsets [N+1] describe; they lie along `axis` of batch row 0.
std::int64_t packed_sequences(const char* name, const View& offsets, std::int64_t batch, const char* axis);

/// Entry `at` (counted in memory) of an integer view that the CPU can read.
std::int64_t integer_at(const View& x, std::int64_t at);

/// Offsets [N+1] that the CPU can read: from 0, never decreasing, to `last`, the extent of `axis`.
void check_offsets(const char* name, const View& offsets, std::int64_t last, const char* axis);

/// Before anything else: printing a shape trusts its rank.
void check_ranks(const Operands& all);

/// Extents, strides, pointers, alignment; outputs have memory of their own for every element.
void check_memory(const NamedOperand& operand);

void check_devices(Device device, const Operands& all);

/// Outputs share no memory with other operands. Only views without gaps are compared: slices of one fused buffer interleave without
/// overlapping. Pairs that `may_be_same` names may be the very same view.
void check_overlap(const Operands& all, bool (*may_be_same)(std::string_view written, std::string_view read));

template <class Operand, class TensorView>
Operand operand_of(const TensorView& x) {
  Operand operand;
  operand.data = x.data;
  operand.dtype = x.dtype;
  operand.present = x.present();
  for (int axis = 0; axis < x.rank; ++axis) operand.strides[axis] = x.strides[axis];
  return operand;
}
inline InputOperand input(const ConstTensor& x) { return operand_of<InputOperand>(x); }
inline OutputOperand output(const Tensor& x) { return operand_of<OutputOperand>(x); }

}  // namespace delta_attention
