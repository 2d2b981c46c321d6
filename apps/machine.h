#pragma once

// What a result file says about where its numbers come from.

#include <string>

namespace delta_attention::cli {

/// The processor's name: "Intel(R) Xeon(R) Processor".
std::string cpu_model();

/// DELTA_ATTENTION_COMMIT of the environment: the commit that this program was built from. "unknown" if it is not set.
std::string commit();

/// The time now, in UTC: "2026-03-31T12:00:00+00:00".
std::string now();

}  // namespace delta_attention::cli
