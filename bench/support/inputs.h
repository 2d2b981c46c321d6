#pragma once

// Random inputs in the ranges that models produce, from one seed:
//   q, k           unit length
//   v              normal
//   beta           uniform in (0, 1)
//   gate:strong    -exp(A) softplus(x + bias), x normal, A and bias uniform in (0, 1), A per head, bias per gate: the
//                  usual random initialisation, which forgets within a few tokens
//   gate:weak      log decay uniform in (-0.01, 0): what trained long-memory heads do
//   retention      log(1 - 2^(-5-h)) of head h

#include <array>
#include <cstddef>
#include <vector>

#include "support/case.h"

namespace bench {

/// The operands of a case in CPU memory. Outputs are poisoned with NaN.
class HostOperands {
 public:
  HostOperands(const Case& c, std::uint64_t seed);

  ForwardArgs args() const { return make_args(case_, addresses(), {}); }
  Addresses addresses() const;
  void poison_outputs();

 private:
  Case case_;
  mutable std::array<std::vector<std::byte>, kOperands> memory_;
};

/// Every byte 0xFF: NaN in f32, f16 and bf16.
constexpr int kPoison = 0xFF;

}  // namespace bench
