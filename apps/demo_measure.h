#pragma once

// What the demo measures: the exact result of a problem, and one kernel's error and time against it.

#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention::cli {

/// Errors and state norms are followed over T in blocks of this many tokens.
constexpr std::int64_t kBlock = 64;

/// The problem in float64, by the kernel "reference".
struct Exact {
  std::vector<double> out;         // every element, [B,T,HV,V]
  std::vector<double> state_norm;  // after each block: the root of the sum of squares over all heads, per head
};

/// `args` has inputs in CPU memory, contiguous and not packed, and no outputs.
Exact compute_exact(const ForwardArgs& args);

struct Measurement {
  std::string kernel;
  Device device;
  double error = 0.0;      // ||out - exact|| / ||exact||, inputs and output stored as they came
  double error_f32 = 0.0;  // the same with f32 storage
  std::vector<double> error_f32_by_block;
  double median_ms = 0.0;  // of one call, stored as it came
  int runs = 0;
};

Measurement measure(const ForwardArgs& args, const std::string& kernel, Device device, const Exact& exact);

/// The time of causal softmax attention on the same q, k and v, by the kernel that a call without a choice gets. v has the shape of k.
struct SoftmaxTime {
  std::string kernel;
  Device device;
  double median_ms = 0.0;
  int runs = 0;
};

SoftmaxTime time_softmax(const ForwardArgs& args, Device device);

}  // namespace delta_attention::cli
