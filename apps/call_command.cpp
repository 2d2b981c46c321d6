// `delta-attention call`: one kernel on one problem of random numbers, for a profiler or a debugger to look at.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "commands.h"
#include "device_memory.h"
#include "kernel_choice.h"
#include "problem_options.h"

namespace delta_attention::cli {
namespace {

struct CallOptions {
  RandomProblem problem;
  std::string dtype = "f32";
  std::string kernel = "automatic";
  std::string device = "cpu";
  int repeat = 5;
  std::uint64_t seed = 1;
};

constexpr const char* kFooter =
    "The numbers are random, in the ranges of real models. After a warm-up the call runs --repeat times; the last of "
    "them is marked\n"
    "for profilers (cudaProfilerStart/Stop), so that `--profile-from-start off` sees one call and nothing else.\n"
    "\n"
    "Examples:\n"
    "  delta-attention call --kernel cpu_chunkwise --T 4096\n"
    "  delta-attention call --device cuda --kernel v1_chunk_pipeline:slice=32 --T 8192 --dtype bf16\n"
    "      a kernel with settings; `delta-attention info` lists what each has\n"
    "  ncu --profile-from-start off delta-attention call --device cuda --kernel v1_chunk_pipeline\n"
    "  compute-sanitizer delta-attention call --device cuda --kernel v1_chunk_pipeline --T 200 --repeat 1";

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void call(const CallOptions& options) {
  RandomProblem problem = options.problem;
  problem.dtype = parse_dtype(options.dtype);
  const Device device = parse_device(options.device);
  const KernelChoice choice = parse_kernel_choice(options.kernel);
  std::mt19937_64 random(options.seed);
  const OwnedCall there = as_stored(draw_call(problem, random).args, device);
  forward_on(choice, there.args);
  std::vector<double> times;
  for (int i = 1; i < options.repeat; ++i) times.push_back(time_ms(device, [&] { forward_on(choice, there.args); }));
  {
    const ProfiledRange marked(device);
    times.push_back(time_ms(device, [&] { forward_on(choice, there.args); }));
  }
  fmt::print("{}  {}  on {}: {:.1f} us, median of {}\n", choice.text(), problem.text(), text_of(device),
             1000.0 * median(times), times.size());
}

}  // namespace

void add_call_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<CallOptions>();
  CLI::App* command = app.add_subcommand("call", "Time one kernel on random numbers, or show it to a profiler");
  command->footer(kFooter);
  command->add_option("--kernel", options->kernel, "NAME or NAME:SETTING=VALUE,...")->capture_default_str();
  command->add_option("--device", options->device, "cpu, cuda or cuda:N")->capture_default_str();
  add_problem_options(*command, options->problem, options->dtype);
  command->add_option("--repeat", options->repeat, "Calls after the warm-up")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Of the random numbers")->capture_default_str();
  command->callback([options, &selected] { selected = [options] { call(*options); }; });
}

}  // namespace delta_attention::cli
