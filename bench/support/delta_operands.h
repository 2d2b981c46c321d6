#pragma once

#include <cstdint>
#include <memory>

#include "support/case.h"
#include "support/operands.h"

namespace bench {

/// Operands of a delta recurrence with strong decays, made on the GPU. Checked are the first tokens of the first and the last head: the
/// reference is sequential, and they depend on no later token.
inline constexpr std::int64_t kCheckedTokens = 512;
std::unique_ptr<Operands> delta_operands(const Case& c, std::uint64_t seed);

}  // namespace bench
