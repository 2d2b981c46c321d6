#pragma once

// Calls that own their memory, made from other calls: on another device, in another storage type.

#include <vector>

#include "delta_attention/delta_attention.h"
#include "device_memory.h"

namespace delta_attention::cli {

/// A call with inputs and outputs of its own.
struct OwnedCall {
  ForwardArgs args;
  std::vector<OwnedTensor> storage;
};

/// Copies of a call's inputs, which are contiguous and in CPU memory, and new outputs: `out`, and the final states where it has any.
OwnedCall as_stored(const ForwardArgs& args, Device device);
OwnedCall in_f32(const ForwardArgs& args, Device device);
OwnedCall in_f64(const ForwardArgs& args);

/// The elements of a contiguous tensor on any device.
std::vector<double> downloaded(const ConstTensor& contiguous);

}  // namespace delta_attention::cli
