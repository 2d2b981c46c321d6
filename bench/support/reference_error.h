#pragma once

// The error of a result against the float64 reference on the very input that was timed. The reference is sequential, so
// it runs on two (sequence, head) pairs: the first head of the first sequence and the last head of the last.

#include <cstdint>
#include <vector>

#include "support/case.h"

namespace bench {

inline constexpr const char* kCheckedPairs = "first head of the first sequence and last head of the last sequence";

/// Relative errors ||x - reference|| / ||reference|| over the checked pairs.
struct Errors {
  double out = 0.0;
  double final_state = 0.0;
};

class Expected {
 public:
  /// Runs the reference; `inputs` are in CPU memory.
  Expected(const Case& c, const ForwardArgs& inputs);

  /// The errors of the outputs that `args` points to, in CPU memory.
  Errors errors(const ForwardArgs& args) const;

 private:
  struct Pair {
    std::int64_t sequence, head, batch, begin, end;
    std::vector<double> out;    // [T, V] of the whole batch row
    std::vector<double> state;  // [K, V]
  };
  std::vector<Pair> pairs_;
};

}  // namespace bench
