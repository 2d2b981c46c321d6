#pragma once

// Running other programs.

#include <string>
#include <vector>

namespace delta_attention::cli {

/// Runs a program, found on the PATH, with this one's standard streams. Its exit status; 127 if it could not be started, 128 + the
/// signal that ended it.
int run_child(const std::vector<std::string>& words);

/// The path of the running program.
std::string own_path();

}  // namespace delta_attention::cli
