// `delta-attention error-growth`: how far from float64 each staged kernel is after 512, 1024, ... tokens.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "commands.h"
#include "delta_attention/error.h"
#include "device_memory.h"
#include "error_growth_measure.h"
#include "error_growth_regimes.h"
#include "error_growth_report.h"
#include "errors.h"
#include "operands.h"
#include "progress.h"

namespace delta_attention::cli {
namespace {

constexpr std::int64_t kShortest = 512;
constexpr std::int64_t kQuickest = 4096;
constexpr std::int64_t kLongest = 1 << 17;  // of every regime; delta_above_2 grows out of its formats beyond
constexpr std::int64_t kMillion = 1 << 20;

struct GrowthOptions {
  std::vector<std::string> regimes, dtypes;
  std::int64_t tokens_to = kLongest;
  bool longest = false;
  bool quick = false;
  int repeats = 3;
  std::uint64_t seed = 0;
  bool has_seed = false;
  RegimeSize size;
  std::string device = "all";
  std::string data, csv, json;
};

constexpr const char* kFooter =
    "A running sum in f32 rounds at every token. Where a recurrence forgets, it forgets these errors too; where it "
    "does\n"
    "not, they pile up, and a compensated sum (which carries along what rounding dropped) can be worth its price. "
    "This\n"
    "command measures which is which: the kernels V1 (plain) and V2 (compensated), V3 (plain) and V4 (compensated) and "
    "the\n"
    "CPU's, against the recurrence in float64, at T = 512, 1024, 2048, ...\n"
    "\n"
    "On a GPU the kernels run; without one (or where the build lacks a kernel) a CPU emulation with the same "
    "roundings\n"
    "stands in, and the column `how` says so. `reference` is float64 rounded to its storage: nothing can be better.\n"
    "16-bit inputs are rounded first and float64 gets the rounded ones, so what is measured is the kernel, not the "
    "format.\n"
    "\n"
    "Two laws are fitted to each curve, err = c T^p and err = a + b log T; p and the one that fits better are shown, "
    "the\n"
    "residuals of both are in the JSON. p near 0 is a flat curve, 0.5 a random walk, 1 linear growth.\n"
    "\n"
    "Examples:\n"
    "  delta-attention error-growth --quick\n"
    "  delta-attention error-growth --csv growth.csv --json growth.json && scripts/plot_error_growth.py growth.json "
    "growth\n"
    "  delta-attention error-growth --regimes additive delta --dtypes f32 --longest";

DType dtype_of(const std::string& text) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    if (text == name(dtype)) return dtype;
  }
  return DType::f32;
}

/// One draw of one regime: the unit of work.
struct Task {
  const Regime* regime;
  DType dtype;
  int repeat;
  std::vector<std::int64_t> lengths;
};

std::vector<std::int64_t> lengths_to(std::int64_t last) {
  std::vector<std::int64_t> lengths;
  for (std::int64_t tokens = kShortest; tokens <= last; tokens *= 2) lengths.push_back(tokens);
  return lengths;
}

std::vector<Task> tasks_of(const GrowthOptions& options) {
  std::vector<Task> tasks;
  for (const Regime& regime : regimes()) {
    if (std::count(options.regimes.begin(), options.regimes.end(), regime.name) == 0) continue;
    for (const std::string& dtype : options.dtypes) {
      const bool to_a_million = options.longest && regime.long_run && dtype_of(dtype) == DType::f32;
      const std::vector<std::int64_t> lengths = lengths_to(to_a_million ? kMillion : options.tokens_to);
      for (int repeat = 0; repeat < options.repeats; ++repeat) {
        tasks.push_back({&regime, dtype_of(dtype), repeat, lengths});
      }
    }
  }
  return tasks;
}

/// Runs every task on all cores; the first failure is thrown once the others have ended.
std::vector<std::vector<Growth>> run_tasks(const std::vector<Task>& tasks, const GrowthSettings& settings,
                                           const SafetensorsFile& data) {
  std::vector<std::vector<Growth>> results(tasks.size());
  std::atomic<std::size_t> next{0}, done{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  Progress progress("error-growth");
  const auto work = [&] {
    for (std::size_t i = next++; i < tasks.size(); i = next++) {
      const Task& task = tasks[i];
      try {
        RegimeSize size = settings.size;
        size.tokens = task.lengths.back();
        const RegimeInputs inputs = make_regime(task.regime->name, size, task.dtype, settings.seed, task.repeat, data);
        results[i] = measure_growth(inputs.args, task.lengths, settings.gpu);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(failure_mutex);
        failure = std::current_exception();
        next = tasks.size();
      }
      progress.set(static_cast<double>(++done) / static_cast<double>(tasks.size()));
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::thread::hardware_concurrency(); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
  return results;
}

/// Medians over the repeats, which are neighbours in `tasks`.
std::vector<GrowthCurve> curves_of(const std::vector<Task>& tasks, const std::vector<std::vector<Growth>>& results,
                                   int repeats) {
  std::vector<GrowthCurve> curves;
  for (std::size_t first = 0; first < tasks.size(); first += static_cast<std::size_t>(repeats)) {
    for (std::size_t kernel = 0; kernel < results[first].size(); ++kernel) {
      std::vector<Growth> draws;
      for (int i = 0; i < repeats; ++i) draws.push_back(results[first + static_cast<std::size_t>(i)][kernel]);
      curves.push_back({tasks[first].regime->name, tasks[first].dtype, median_growth(draws)});
    }
  }
  return curves;
}

std::optional<Device> gpu_of(const std::string& text, std::string& why_not) {
  if (text == "all") return list_gpus(why_not).empty() ? std::nullopt : std::optional<Device>(cuda(0));
  const Device device = parse_device(text);
  if (device.type == DeviceType::cpu) {
    why_not = "--device cpu";
    return std::nullopt;
  }
  if (list_gpus(why_not).size() <= static_cast<std::size_t>(device.index)) {
    throw NoDevice(fmt::format("no device {}{}{}", text, why_not.empty() ? "" : ": ", why_not));
  }
  return device;
}

void error_growth(GrowthOptions options) {
  if (options.quick) {
    options.tokens_to = std::min(options.tokens_to, kQuickest);
    options.repeats = 1;
  }
  GrowthSettings settings;
  settings.seed = options.has_seed ? options.seed : std::random_device{}();
  settings.repeats = options.repeats;
  settings.size = options.size;
  settings.data = options.data.empty() ? shipped_data() : options.data;
  std::string why_no_gpu;
  settings.gpu = gpu_of(options.device, why_no_gpu);
  const SafetensorsFile data(settings.data);
  for (const std::string& path : {options.csv, options.json}) {
    if (!path.empty()) require_writable(path);
  }

  fmt::print(
      "error against float64, ||x - exact|| / ||exact||; {0} head{1} of {2} x {2}, median of {3} draw{4}, seed {5}\n",
      options.size.heads, options.size.heads == 1 ? "" : "s", options.size.dim, options.repeats,
      options.repeats == 1 ? "" : "s", settings.seed);
  if (!settings.gpu) fmt::print("emulations stand in for GPU kernels: {}\n", why_no_gpu);
  std::fflush(stdout);
  const std::vector<Task> tasks = tasks_of(options);
  const std::vector<GrowthCurve> curves = curves_of(tasks, run_tasks(tasks, settings, data), options.repeats);
  print_growth(curves);
  if (!options.csv.empty()) write_growth_csv(options.csv, curves);
  if (!options.json.empty()) write_growth_json(options.json, settings, curves);
}

std::vector<std::string> regime_names() {
  std::vector<std::string> names;
  for (const Regime& regime : regimes()) names.emplace_back(regime.name);
  return names;
}

std::string describe_regimes() {
  std::string text = "Regimes:\n";
  for (const Regime& regime : regimes()) text += fmt::format("  {:<14} {}\n", regime.name, regime.description);
  return text;
}

}  // namespace

void add_error_growth_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<GrowthOptions>();
  options->regimes = regime_names();
  options->dtypes = {"f32", "f16", "bf16"};
  CLI::App* command = app.add_subcommand("error-growth", "Measure how rounding errors grow with the number of tokens");
  command->footer(describe_regimes() + "\n" + kFooter);
  command->add_option("--regimes", options->regimes, "Which regimes (default: all)")
      ->check(CLI::IsMember(regime_names()));
  command->add_option("--dtypes", options->dtypes, "Storage of q, k, v and out (default: f32 f16 bf16)")
      ->check(CLI::IsMember({"f32", "f16", "bf16"}));
  command->add_option("--tokens-to", options->tokens_to, "The largest T; those before are 512, 1024, 2048, ...")
      ->check(CLI::Range(kShortest, kLongest))
      ->capture_default_str();
  command->add_flag("--longest", options->longest, "T up to 1048576 in additive, retention and delta, f32");
  command->add_flag("--quick", options->quick, "One draw, T up to 4096: a few seconds");
  command->add_option("--repeats", options->repeats, "Draws of every regime; errors are medians over them")
      ->check(CLI::Range(1, 99))
      ->capture_default_str();
  CLI::Option* seed =
      command->add_option("--seed", options->seed, "Repeat the draws of an earlier run (default: fresh)");
  command->add_option("--heads", options->size.heads, "Heads side by side, each with numbers of its own")
      ->check(CLI::Range(1, 12))
      ->capture_default_str();
  command->add_option("--dim", options->size.dim, "K and V of a head")
      ->check(CLI::Range(8, 256))
      ->capture_default_str();
  command->add_option("--device", options->device, "all (a GPU if there is one), cpu (emulations), cuda or cuda:N")
      ->capture_default_str();
  command->add_option("--data", options->data, "safetensors file of the regime activations (default: as for demo)");
  command->add_option("--csv", options->csv, "Write every error to this file");
  command->add_option("--json", options->json, "Write errors, fits and what was run where to this file");
  command->callback([options, seed, &selected] {
    options->has_seed = seed->count() > 0;
    selected = [options] { error_growth(*options); };
  });
}

}  // namespace delta_attention::cli
