// `delta-attention tune`: measures the settings of kernels and writes the table that dispatch reads.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <fstream>
#include <memory>

#include "commands.h"
#include "delta_attention/error.h"
#include "device_memory.h"
#include "errors.h"
#include "operands.h"
#include "progress.h"
#include "tune_bench.h"
#include "tuning.h"

namespace delta_attention::cli {
namespace {

using Sizes = std::vector<std::int64_t>;

struct TuneOptions {
  std::vector<std::string> kernels;  // none: all that have settings
  std::vector<std::string> recurrences = {"gated_delta_net", "kda"};
  Sizes D = {64, 128}, B = {1, 4, 16}, T = {512, 2048, 8192};
  std::int64_t H = 8;
  std::string device;  // "": the first GPU, or else the CPU
  std::vector<std::string> fixed;
  std::int64_t keep = 24;
  bool quick = false;
  std::string log;
  std::string output;
};

constexpr const char* kFooter =
    "A setting is a number that a kernel leaves open: a tile, a number of buffers, how often partial sums are "
    "flushed.\n"
    "`delta-attention info` lists them, Execution::settings (run --settings) sets them. Dispatch takes what nobody set "
    "from\n"
    "the table that this command writes, by the nearest problem measured on a GPU of the same generation.\n"
    "\n"
    "For each D, recurrence and B the shortest T tries every combination that the kernel takes, and each longer T the\n"
    "fastest of the T before (--keep). Every combination is first compared with the float64 reference; one that is "
    "wrong is\n"
    "reported and never chosen. One that is 1.25 times slower than the best so far is not timed again.\n"
    "\n"
    "Examples:\n"
    "  delta-attention tune --log tune.jsonl --output src/api/tuned/nvidia_h200.inc\n"
    "      every kernel with settings on the first GPU; build again to use the table\n"
    "  delta-attention tune --log tune.jsonl --output src/api/tuned/nvidia_h200.inc\n"
    "      the same again after an interruption: what the log holds is not measured again. Start a new log for a new "
    "build.\n"
    "  delta-attention tune --kernel v1_chunk_pipeline --D 128 --T 2048 --B 1 -r kda\n"
    "      one kernel on one problem; only prints\n"
    "\n"
    "Exit code 0 also when no kernel that runs here has settings, which it then says; 3 when a kernel was asked for by "
    "name\n"
    "and cannot be tuned here. The other codes are those of `delta-attention --help`.";

Device device_of(const TuneOptions& options) {
  if (!options.device.empty()) return parse_device(options.device);
  std::string reason;
  if (!list_gpus(reason).empty()) return cuda(0);
  fmt::print("no GPU: {}\n", reason);
  return cpu();
}

/// "9.0" -> 90.
int capability_of(const GpuFacts& gpu) {
  int digits = 0;
  for (char c : gpu.capability) digits = c == '.' ? digits : 10 * digits + (c - '0');
  return digits;
}

void describe_device(Device device, TunePlan& plan) {
  plan.device = text_of(device);
  if (device.type == DeviceType::cpu) return;
  std::string reason;
  const std::vector<GpuFacts> gpus = list_gpus(reason);
  if (gpus.empty()) throw NoDevice("no CUDA device: " + reason);
  if (device.index >= static_cast<int>(gpus.size())) {
    throw NoDevice(fmt::format("cuda:{} was asked for; this machine has {} CUDA device(s)", device.index, gpus.size()));
  }
  const GpuFacts& gpu = gpus[static_cast<std::size_t>(device.index)];
  plan.device = gpu.name;
  plan.capability = capability_of(gpu);
}

/// What every kernel of the build says to a small problem on the device.
std::vector<KernelReport> reports(Device device) {
  const OwnedTensor x = zeros(tensor(static_cast<const float*>(nullptr), {1, 1, 1, 32}), DType::f32, device);
  ForwardArgs args;
  args.q = args.k = args.v = x.view;
  const OwnedTensor out = zeros(args.v, DType::f32, device);
  args.out = out.view;
  return dispatch_info(args).kernels;
}

/// Leaves one value to each setting named in "name=value" words.
void fix_settings(const std::vector<std::string>& words, std::vector<TunedKernel>& kernels) {
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    int value = 0;
    const char* end = word.data() + word.size();
    const bool is_pair = equals != std::string::npos &&
                         std::from_chars(word.data() + equals + 1, end, value).ptr == end && equals + 1 < word.size();
    if (!is_pair) throw BadInput(fmt::format("--fix: expected NAME=INTEGER, got '{}'", word));
    bool known = false;
    for (TunedKernel& kernel : kernels) {
      for (Setting& setting : kernel.settings) {
        if (word.compare(0, equals, setting.name) != 0) continue;
        known = true;
        if (std::find(setting.values.begin(), setting.values.end(), value) == setting.values.end()) {
          throw BadInput(fmt::format("--fix: {} of {} is one of {}, got {}", setting.name, kernel.name,
                                     fmt::join(setting.values, ", "), value));
        }
        setting.values = {value};
      }
    }
    if (!known)
      throw BadInput(fmt::format("--fix: no kernel to be tuned has the setting '{}'", word.substr(0, equals)));
  }
}

/// The kernels to tune; the others are named with the reason.
std::vector<TunedKernel> kernels_to_tune(const TuneOptions& options, Device device) {
  std::vector<TunedKernel> kernels;
  const std::vector<KernelReport> all = reports(device);
  const auto asked = [&](const std::string& name) {
    return std::find(options.kernels.begin(), options.kernels.end(), name) != options.kernels.end();
  };
  for (const std::string& name : options.kernels) {
    const auto found = std::find_if(all.begin(), all.end(), [&](const KernelReport& r) { return r.kernel == name; });
    if (found == all.end()) throw Unsupported(fmt::format("kernel '{}' is not in this build", name));
    if (found->settings.empty()) throw Unsupported(fmt::format("kernel '{}' has no settings to tune", name));
    if (!found->supported) {
      throw Unsupported(fmt::format("kernel '{}' cannot be tuned on {}: {}", name, text_of(device), found->reason));
    }
  }
  for (const KernelReport& report : all) {
    if (!options.kernels.empty() && !asked(report.kernel)) continue;
    if (report.supported && !report.settings.empty()) {
      kernels.push_back({report.kernel, report.settings});
    } else {
      fmt::print("skipped {:<30} {}\n", report.kernel, report.settings.empty() ? "it has no settings" : report.reason);
    }
  }
  fix_settings(options.fixed, kernels);
  return kernels;
}

std::string times_faster(const TuneRecord* now, const TuneRecord& best) {
  const bool known = now != nullptr && now->us > 0.0;
  return known ? fmt::format("{:.2f}x", now->us / best.us) : "";
}

void print_outcome(const TuneOutcome& o) {
  const TuneProblem& p = o.problem;
  const std::string faults = o.wrong + o.failed > 0 ? fmt::format("  ({} wrong, {} failed)", o.wrong, o.failed) : "";
  fmt::print("{:<30} {:<16} {:>4} {:>3} {:>6} {:>6} {:>6.2f} {:>6.2f} ", o.kernel, p.recurrence, p.D, p.B, p.T, o.tried,
             o.seconds, o.slowest_seconds);
  if (o.best == nullptr) {
    fmt::print(" nothing to choose{}\n", faults);
  } else {
    fmt::print("{:>10.1f} {:>10} {:>7}  {}{}\n", o.best->us, o.now != nullptr ? fmt::format("{:.1f}", o.now->us) : "",
               times_faster(o.now, *o.best), o.best->candidate.settings, faults);
  }
  std::fflush(stdout);
}

void print_faults(const TuneLog& log, const std::string& device) {
  for (const TuneRecord& record : log.records()) {
    if (record.device != device || record.reason.empty()) continue;
    const TuneProblem& p = record.candidate.problem;
    fmt::print("  {} {} D={} B={} T={} \"{}\": {}\n", record.candidate.kernel, p.recurrence, p.D, p.B, p.T,
               record.candidate.settings, record.reason);
  }
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (!file) throw IoError(fmt::format("{}: cannot be written", path));
}

void tune(const TuneOptions& options) {
  const Device device = device_of(options);
  TunePlan plan;
  describe_device(device, plan);
  plan.kernels = kernels_to_tune(options, device);
  if (plan.kernels.empty()) {
    fmt::print("nothing to tune: no kernel that runs on {} has settings\n", plan.device);
    return;
  }
  plan.recurrences = options.recurrences;
  plan.D = options.D;
  plan.B = options.B;
  plan.T = options.T;
  if (options.quick) {
    plan.B = {plan.B.front()};
    plan.T.resize((plan.T.size() + 1) / 2);
  }
  plan.H = options.H;
  plan.keep = options.keep;

  TuneLog log = options.log.empty() ? TuneLog() : TuneLog(options.log);
  DeviceBench bench(device);
  fmt::print(
      "{}, H={}. us: one call; now: what this build chooses; seconds: of all candidates, and of the slowest\n"
      "{:<30} {:<16} {:>4} {:>3} {:>6} {:>6} {:>6} {:>6} {:>10} {:>10} {:>7}  {}\n",
      plan.device, plan.H, "kernel", "recurrence", "D", "B", "T", "tried", "sec", "worst", "best us", "now us", "gain",
      "settings");
  {
    Progress progress("tune");
    sweep(plan, bench, log, {[&](double fraction) { progress.set(fraction); }, print_outcome});
  }
  print_faults(log, plan.device);
  if (options.output.empty()) return;
  write_file(options.output, tuned_rows(log, plan.device, plan.capability));
  fmt::print("wrote {}\n", options.output);
}

}  // namespace

void add_tune_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<TuneOptions>();
  CLI::App* command = app.add_subcommand("tune", "Measure the settings of kernels and write the table dispatch reads");
  command->footer(kFooter);
  const CLI::Validator sizes = CLI::PositiveNumber;
  command->add_option("--kernel", options->kernels, "Kernels to tune (default: all that have settings)")
      ->delimiter(',');
  command->add_option("-r,--recurrence", options->recurrences, "Recurrences")
      ->delimiter(',')
      ->check(CLI::IsMember(preset_names()))
      ->capture_default_str();
  command->add_option("--D", options->D, "Dimensions, K = V")->delimiter(',')->check(sizes)->capture_default_str();
  command->add_option("--B", options->B, "Batches")->delimiter(',')->check(sizes)->capture_default_str();
  command->add_option("--T", options->T, "Tokens")->delimiter(',')->check(sizes)->capture_default_str();
  command->add_option("--H", options->H, "Heads")->check(sizes)->capture_default_str();
  command->add_option("--device", options->device, "cpu, cuda or cuda:N (default: the first GPU, else the CPU)");
  command->add_option("--fix", options->fixed, "NAME=VALUE: try this value of a setting alone")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--keep", options->keep, "Candidates of one T that the next longer one tries")
      ->check(sizes)
      ->capture_default_str();
  command->add_flag("--quick", options->quick, "Half of the work at most: the first B and the first half of T");
  command->add_option("--log", options->log, "File of measurements, one JSON object a line; continued if it exists");
  command->add_option("--output", options->output, "The table to write: the winners of all that the log holds");
  command->callback([options, &selected] { selected = [options] { tune(*options); }; });
}

}  // namespace delta_attention::cli
