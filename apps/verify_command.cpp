// `delta-attention verify`: is this build right on this machine, and are its kernels what they are said to be? Three parts: results
// against float64, profiler metrics within limits, machine code as claimed. One report.

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "child_process.h"
#include "commands.h"
#include "correctness.h"
#include "delta_attention/version.h"
#include "errors.h"
#include "problem_options.h"
#include "progress.h"

namespace delta_attention::cli {
namespace {

using nlohmann::ordered_json;

struct VerifyOptions {
  std::vector<std::string> kernels;
  std::vector<std::string> diagnostics;
  std::set<std::string> only;
  std::string json;
  std::uint64_t seed = 0;
  bool seed_given = false;
  RandomProblem problem;  // of the profile
  std::string dtype = "f32";
};

constexpr const char* kFooter =
    "The parts\n"
    "  correctness   every kernel that this machine can run, on every recurrence in f32, f16 and bf16, with fresh "
    "random numbers,\n"
    "                against the float64 reference. Bars: f32 what its rounding explains, 16 bits 1.2 times the "
    "rounding of the\n"
    "                output, and no element further off than 1e-2 + 1e-2 |exact|\n"
    "  profile       registers, spills, occupancy, bank conflicts, IPC, stalls and traffic of each CUDA kernel from "
    "Nsight Compute's\n"
    "                command line (ncu), within the limits of scripts/ncu_limits.py; skipped without a GPU, ncu or its "
    "permission\n"
    "  machine-code  what cuobjdump and nvdisasm see in this very program, against scripts/sass_claims.py; needs no "
    "GPU; skipped\n"
    "                where the tools are missing (scripts/setup installs them)\n"
    "The last two are Python scripts of the repository; DELTA_ATTENTION_SCRIPTS_DIR says where, if not where this was "
    "built.\n"
    "\n"
    "Exit codes: 0 all holds, 6 something does not (it is listed), others as in `delta-attention --help`.\n"
    "\n"
    "Examples:\n"
    "  delta-attention verify --json report.json\n"
    "  delta-attention verify --only correctness --kernel cpu_chunkwise --seed 7\n"
    "      one kernel; a report names its seed, and the same seed draws the same numbers\n"
    "  delta-attention verify --only profile --kernel v1_chunk_pipeline:slice=16 --kernel v1_chunk_pipeline:slice=32 "
    "--T 4096\n"
    "      variants of a kernel side by side, on one problem\n"
    "  delta-attention verify --only correctness --diagnostic cpu_without_decay\n"
    "      a kernel that is wrong on purpose: must end with exit code 6";

// -------------------------------------------------------------------------------------------------------- correctness

std::vector<Device> devices_here() {
  std::vector<Device> devices = {cpu()};
  std::string reason;
  if (!list_gpus(reason).empty()) devices.push_back(cuda(0));
  return devices;
}

ordered_json to_json(const CorrectnessCheck& check) {
  return {{"kernel", check.choice.text()},
          {"device", text_of(check.device)},
          {"problem", check.problem.text()},
          {"output", check.output},
          {"error", check.error},
          {"allowed", check.allowed},
          {"furthest", check.furthest},
          {"passed", check.passed()}};
}

/// One line a kernel and storage type: how near it came to its bar.
void print_correctness(const CorrectnessReport& report) {
  std::map<std::string, const CorrectnessCheck*> worst;
  std::map<std::string, int> counts;
  std::vector<std::string> order;
  for (const CorrectnessCheck& check : report.checks) {
    const std::string line =
        fmt::format("{:<40} {:<7} {:<5}", check.choice.text(), text_of(check.device), name(check.problem.dtype));
    if (counts[line]++ == 0) order.push_back(line);
    const CorrectnessCheck*& seen = worst[line];
    if (seen == nullptr || !(check.error / check.allowed <= seen->error / seen->allowed)) seen = &check;
  }
  std::stable_sort(order.begin(), order.end());
  fmt::print("Correctness: {} problems, seed {}\n", report.problems, report.seed);
  if (!order.empty()) {
    fmt::print("  {:<40} {:<7} {:<5} {:>7} {:>9} {:>9} {:>8}\n", "kernel", "device", "dtype", "outputs", "error",
               "allowed", "of it");
  }
  for (const std::string& line : order) {
    const CorrectnessCheck& check = *worst[line];
    fmt::print("  {} {:>7} {:>9.1e} {:>9.1e} {:>7.0f}%\n", line, counts[line], check.error, check.allowed,
               100.0 * check.error / check.allowed);
  }
}

void print_breaches(const CorrectnessReport& report) {
  constexpr int kMostPrinted = 20;
  int breaches = 0;
  for (const CorrectnessCheck& check : report.checks) {
    if (check.passed()) continue;
    if (breaches++ == 0) fmt::print("  Does not hold\n");
    if (breaches > kMostPrinted) continue;
    fmt::print("    {}: {}: {}: error {:.1e}, allowed {:.1e}; furthest element at {:.1e} of its bound\n",
               check.choice.text(), check.problem.text(), check.output, check.error, check.allowed, check.furthest);
  }
  if (breaches > kMostPrinted) fmt::print("    and {} more (--json has all)\n", breaches - kMostPrinted);
}

ordered_json verify_correctness(const std::vector<KernelChoice>& choices, std::uint64_t seed) {
  CorrectnessReport report;
  {
    Progress progress("correctness");
    report = check_correctness(devices_here(), choices, seed, [&](double done) { progress.set(done); });
  }
  print_correctness(report);
  print_breaches(report);
  ordered_json json = {{"seed", report.seed}, {"problems", report.problems}};
  json["checks"] = ordered_json::array();
  for (const CorrectnessCheck& check : report.checks) json["checks"].push_back(to_json(check));
  json["refused"] = ordered_json::array();
  for (const Refusal& refusal : report.refusals) {
    json["refused"].push_back(
        {{"kernel", refusal.choice.text()}, {"problem", refusal.problem.text()}, {"reason", refusal.reason}});
  }
  if (report.checks.empty()) {
    throw Unsupported(report.refusals.empty() ? "no kernel ran" : report.refusals.front().reason);
  }
  return json;
}

// ------------------------------------------------------------------------------------------- profile and machine code

ordered_json skipped(const char* title, const std::string& reason) {
  fmt::print("{}: skipped: {}\n", title, reason);
  return {{"skipped", reason}};
}

/// Where this program was built, as the environment says, or in the current folder.
std::string find_script(const std::string& script) {
  const char* folder = std::getenv("DELTA_ATTENTION_SCRIPTS_DIR");
  for (const std::string& candidate :
       {std::string(folder != nullptr ? folder : DELTA_ATTENTION_SCRIPTS_DIR), std::string("scripts")}) {
    const std::string path = candidate + "/" + script;
    if (std::filesystem::exists(path)) return path;
  }
  return "";
}

/// A file for a script's JSON, gone at the end.
class TemporaryFile {
 public:
  TemporaryFile() {
    std::string name = (std::filesystem::temp_directory_path() / "delta-attention-XXXXXX").string();
    const int descriptor = mkstemp(name.data());
    if (descriptor < 0) throw IoError("no temporary file can be made: " + name);
    close(descriptor);
    path_ = name;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

/// Runs a script of the repository, which prints its own part of the report and leaves JSON in a file.
ordered_json run_script(const char* title, const std::string& script, const std::vector<std::string>& arguments) {
  const std::string path = find_script(script);
  if (path.empty()) return skipped(title, script + " was not found; set DELTA_ATTENTION_SCRIPTS_DIR");
  const TemporaryFile file;
  std::vector<std::string> words = {"python3", path, "--json", file.path()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const int status = run_child(words);
  if (status == 127) return skipped(title, "python3 was not found");
  std::ifstream stream(file.path());
  ordered_json json = ordered_json::parse(stream, nullptr, false);
  if (json.is_discarded()) throw std::runtime_error(fmt::format("{} ended with {} and no report", path, status));
  return json;
}

/// The CUDA kernels that take the problem with the library's settings.
std::vector<std::string> kernels_to_profile(const RandomProblem& problem) {
  std::mt19937_64 random(1);
  const OwnedCall there = as_stored(draw_call(problem, random).args, cuda(0));
  std::vector<std::string> names;
  for (const KernelReport& kernel : dispatch_info(there.args).kernels) {
    if (kernel.supported) names.push_back(kernel.kernel);
  }
  return names;
}

ordered_json verify_profile(const VerifyOptions& options) {
  std::string reason;
  if (list_gpus(reason).empty()) return skipped("Profile", reason);
  RandomProblem problem = options.problem;
  problem.dtype = parse_dtype(options.dtype);
  std::vector<std::string> kernels = options.kernels;
  kernels.insert(kernels.end(), options.diagnostics.begin(), options.diagnostics.end());
  if (kernels.empty()) kernels = kernels_to_profile(problem);
  std::vector<std::string> arguments = {own_path()};
  arguments.insert(arguments.end(), kernels.begin(), kernels.end());
  const ProblemSize& n = problem.size;
  const std::string size =
      fmt::format("B={},T={},H={},HV={},K={},V={}", n.B, n.T, n.H, n.HV > 0 ? n.HV : n.H, n.K, n.V);
  for (const std::string& word : {std::string("--recurrence"), problem.recurrence, std::string("--dtype"),
                                  options.dtype, std::string("--size"), size}) {
    arguments.push_back(word);
  }
  return run_script("Profile", "ncu_profile.py", arguments);
}

ordered_json verify_machine_code() { return run_script("Machine code", "sass.py", {"check", own_path()}); }

// ------------------------------------------------------------------------------------------------------------ command

std::vector<KernelChoice> choices_of(const VerifyOptions& options) {
  std::vector<KernelChoice> choices;
  for (const std::string& text : options.kernels) choices.push_back(parse_kernel_choice(text));
  for (const std::string& text : options.diagnostics) choices.push_back(parse_kernel_choice(text));
  return choices;
}

/// Checks of all parts that do not hold. Each part has printed its own.
std::size_t count_breaches(const ordered_json& report) {
  std::size_t breaches = 0;
  for (const auto& [part, content] : report.items()) {
    if (!content.is_object() || !content.contains("checks")) continue;
    for (const ordered_json& check : content["checks"]) breaches += check["passed"].get<bool>() ? 0 : 1;
  }
  return breaches;
}

void write_json(const std::string& path, const ordered_json& report) {
  std::ofstream file(path);
  file << report.dump(1) << "\n";
  if (!file.flush()) throw IoError(path + ": could not be written");
}

void verify(const VerifyOptions& options) {
  const std::vector<KernelChoice> choices = choices_of(options);
  const auto wanted = [&](const char* part) { return options.only.empty() || options.only.count(part) > 0; };
  ordered_json report = {{"version", DELTA_ATTENTION_VERSION}};
  std::string reason;
  const std::vector<GpuFacts> gpus = list_gpus(reason);
  report["gpu"] = gpus.empty() ? ordered_json(nullptr) : ordered_json(gpus.front().name);
  if (wanted("correctness")) {
    const std::uint64_t seed = options.seed_given ? options.seed : std::random_device()();
    report["correctness"] = verify_correctness(choices, seed);
  }
  if (wanted("profile")) report["profile"] = verify_profile(options);
  if (wanted("machine-code")) report["machine_code"] = verify_machine_code();
  const std::size_t breaches = count_breaches(report);
  report["passed"] = breaches == 0;
  if (!options.json.empty()) write_json(options.json, report);
  if (breaches > 0) throw Breach(fmt::format("verify: {} checks do not hold", breaches));
  fmt::print("verify: all that was checked holds\n");
}

}  // namespace

void add_verify_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<VerifyOptions>();
  CLI::App* command = app.add_subcommand("verify", "Check results, profiler metrics and machine code of this build");
  command->footer(kFooter);
  command->add_option("--only", options->only, "correctness, profile or machine-code; several for more (default: all)")
      ->check(CLI::IsMember({"correctness", "profile", "machine-code"}))
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      ->add_option("--kernel", options->kernels,
                   "NAME or NAME:SETTING=VALUE,...; several for more (default: all that can run)")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--diagnostic", options->diagnostics, "Also a kernel that is wrong on purpose")
      ->check(CLI::IsMember(diagnostic_names()))
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--json", options->json, "Write the report there as JSON, too");
  CLI::Option* seed =
      command->add_option("--seed", options->seed, "Of the random numbers (default: another each time)");
  CLI::App* group = command->add_option_group("Problem", "What the profile runs");
  add_problem_options(*group, options->problem, options->dtype);
  command->callback([options, seed, &selected] {
    options->seed_given = seed->count() > 0;
    selected = [options] { verify(*options); };
  });
}

}  // namespace delta_attention::cli
