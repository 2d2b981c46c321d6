#pragma once

// The options that describe a random problem, the same in every command that takes one.

#include "random_problem.h"

namespace CLI {
class App;
}

namespace delta_attention::cli {

/// --recurrence, --B, --T, --H, --HV, --K, --V into `problem` and --dtype into `dtype`.
void add_problem_options(CLI::App& command, RandomProblem& problem, std::string& dtype);

/// f32, f16 or bf16.
DType parse_dtype(const std::string& text);

}  // namespace delta_attention::cli
