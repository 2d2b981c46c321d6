#pragma once

// Parts of a forward call as views: heads do not know of each other, and a sequence can be cut where its state is handed on.

#include "delta_attention/delta_attention.h"

namespace delta_attention::cli {

/// Query/key heads [first, first + count) with the value heads that read them.
ForwardArgs head_slice(const ForwardArgs& args, std::int64_t first, std::int64_t count);

/// Tokens [first, first + count) of every batch row. States are left as they are: hand them on by passing one tensor as both
/// initial_state and final_state. Not for packed sequences.
ForwardArgs token_slice(const ForwardArgs& args, std::int64_t first, std::int64_t count);

}  // namespace delta_attention::cli
