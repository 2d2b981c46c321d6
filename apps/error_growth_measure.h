#pragma once

// Errors against float64 as a sequence gets longer: one truth, computed in one pass, and every kernel or its emulation against it.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention::cli {

/// Of an array x against the truth y.
struct Error {
  double max_abs = 0.0;       // max |x - y|
  double max_relative = 0.0;  // max |x - y| / max |y|
  double relative = 0.0;      // ||x - y|| / ||y||, root of sums of squares
};

struct LengthErrors {
  std::int64_t tokens = 0;
  Error out;  // over all tokens so far
  Error state;
  std::optional<Error> normalizer;
};

struct Growth {
  std::string kernel;
  std::string how;  // "cpu", "cuda:0" or "emulation"
  std::vector<LengthErrors> lengths;
};

/// `args` holds inputs in CPU memory, one sequence, no outputs; `lengths` are ascending and end with its number of tokens. A GPU runs the
/// staged kernels that this build has; for the others, and without one, their emulations stand in. Thread-safe.
std::vector<Growth> measure_growth(const ForwardArgs& args, const std::vector<std::int64_t>& lengths,
                                   const std::optional<Device>& gpu);

}  // namespace delta_attention::cli
