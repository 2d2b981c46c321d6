#include "owned_call.h"

#include <utility>

#include "operands.h"
#include "tensor_values.h"

namespace delta_attention::cli {
namespace {

/// copy(x) makes the copy of an input; stored(dtype) is what an output of that type becomes.
template <class Copy, class Stored>
OwnedCall own(const ForwardArgs& args, Device device, Copy copy, Stored stored) {
  OwnedCall call{args, {}};
  const auto keep = [&](OwnedTensor tensor) {
    call.storage.push_back(std::move(tensor));
    return call.storage.back().view;
  };
  for (const NamedOperand& operand : input_operands()) {
    ConstTensor& view = call.args.*operand.view;
    if (view.present()) view = keep(copy(view));
  }
  call.args.out = keep(zeros(args.v, stored(args.q.dtype), device));
  for (Tensor ForwardArgs::*output : {&ForwardArgs::final_state, &ForwardArgs::final_normalizer}) {
    Tensor& view = call.args.*output;
    if (view.present()) view = keep(zeros(view, stored(view.dtype), device));
  }
  return call;
}

}  // namespace

OwnedCall as_stored(const ForwardArgs& args, Device device) {
  return own(
      args, device, [&](const ConstTensor& x) { return copy_to(x, device); }, [](DType dtype) { return dtype; });
}

OwnedCall in_f32(const ForwardArgs& args, Device device) {
  return own(
      args, device, [&](const ConstTensor& x) { return copy_to(converted(x, DType::f32).view, device); },
      [](DType) { return DType::f32; });
}

OwnedCall in_f64(const ForwardArgs& args) {
  return own(
      args, cpu(), [](const ConstTensor& x) { return converted(x, DType::f64); }, [](DType) { return DType::f64; });
}

std::vector<double> downloaded(const ConstTensor& contiguous) { return values_of(copy_to(contiguous, cpu()).view); }

}  // namespace delta_attention::cli
