#include "problem_options.h"

#include <CLI/CLI.hpp>

#include "errors.h"
#include "operands.h"

namespace delta_attention::cli {

constexpr DType kStorage[] = {DType::f32, DType::f16, DType::bf16};

DType parse_dtype(const std::string& text) {
  for (DType dtype : kStorage) {
    if (text == name(dtype)) return dtype;
  }
  throw BadInput("dtype: expected f32, f16 or bf16, got '" + text + "'");
}

void add_problem_options(CLI::App& command, RandomProblem& problem, std::string& dtype) {
  const CLI::Validator sizes = CLI::PositiveNumber;
  command.add_option("-r,--recurrence", problem.recurrence, "Recurrence")
      ->check(CLI::IsMember(preset_names()))
      ->capture_default_str();
  command.add_option("--B", problem.size.B, "Batch")->check(sizes)->capture_default_str();
  command.add_option("--T", problem.size.T, "Tokens")->check(sizes)->capture_default_str();
  command.add_option("--H", problem.size.H, "Query/key heads")->check(sizes)->capture_default_str();
  command.add_option("--HV", problem.size.HV, "Value heads, a multiple of H (default: H)")->check(sizes);
  command.add_option("--K", problem.size.K, "Key dimension")->check(sizes)->capture_default_str();
  command.add_option("--V", problem.size.V, "Value dimension")->check(sizes)->capture_default_str();
  command.add_option("--dtype", dtype, "Storage of q, k, v, out: f32, f16 or bf16")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}))
      ->capture_default_str();
}

}  // namespace delta_attention::cli
