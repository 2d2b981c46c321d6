#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "support/case.h"
#include "support/operands.h"

namespace bench {

/// Operands of a delta recurrence, made on the GPU, with strong decays or, where gates are fused, also with weak ones:
///   not fused      as in inputs.h
///   fused          q, k, logits of beta and of the gate normal; gate:strong has A and bias uniform in (0, 1), gate:weak A = 0 and bias
///                  uniform in (-6, -4)
///   initial state  rows of unit length
/// Checked are the first head of the first sequence and the last head of the last one, against a reference that is sequential. Of a long
/// sequence the former is checked at its beginning and the latter at its end, from a state of zeros far enough before it: gates forget.
/// Without gates both are checked at the beginning. The final state is checked where the end is.
std::string checked_part();
std::unique_ptr<Operands> delta_operands(const Case& c, std::uint64_t seed);

}  // namespace bench
