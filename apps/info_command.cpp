// `delta-attention info`: what this build and this machine can do, and which kernel would take a problem.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "commands.h"
#include "delta_attention/softmax_attention.h"
#include "device_memory.h"
#include "errors.h"
#include "operands.h"

namespace delta_attention::cli {
namespace {

using nlohmann::ordered_json;

struct InfoOptions {
  bool json = false;
  std::string recurrence = "kda";
  std::int64_t B = 1, T = 2048, H = 8, HV = 0, K = 128, V = 128;  // HV = 0: as H
  std::string dtype = "bf16";
  std::string device = "cpu";
  bool asks_dispatch = false;
};

constexpr const char* kFooter =
    "Examples:\n"
    "  delta-attention info\n"
    "      version, devices, kernels and recurrences\n"
    "  delta-attention info --recurrence kda --T 4096 --H 16 --K 128 --V 128 --dtype bf16 --device cuda\n"
    "      which kernel would run this, and why the others would not; looks at sizes only, nothing is computed\n"
    "  delta-attention info --json\n"
    "      the same for a program to read";

constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16, DType::f64};

std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (DType dtype : kDTypes) names.emplace_back(name(dtype));
  return names;
}

DType find_dtype(const std::string& text) {
  for (DType dtype : kDTypes) {
    if (text == name(dtype)) return dtype;
  }
  return DType::f32;
}

/// A made-up address: dispatch looks at sizes, strides and alignment, and reads nothing. Operands lie 2^48 bytes apart.
void* address(std::uintptr_t operand) { return reinterpret_cast<void*>(operand << 48); }

/// Sizes whose products do not fit 64 bits have no strides to speak of.
void require_sensible(std::initializer_list<std::int64_t> shape) {
  constexpr std::int64_t kMostElements = std::int64_t{1} << 44;
  std::int64_t elements = 1;
  for (std::int64_t extent : shape) {
    if (__builtin_mul_overflow(elements, extent, &elements) || elements > kMostElements) {
      throw BadInput("a tensor of these sizes is too large: more than 2^44 elements");
    }
  }
}

ForwardArgs problem_of(const InfoOptions& options) {
  const Device device = parse_device(options.device);
  const DType dtype = find_dtype(options.dtype);
  const std::int64_t HV = options.HV > 0 ? options.HV : options.H;
  const auto [B, T, H, K, V] = std::tuple(options.B, options.T, options.H, options.K, options.V);
  require_sensible({B, T, H, K});
  require_sensible({B, T, HV, V});
  require_sensible({B, T, HV, K});
  ForwardArgs args;
  args.recurrence = find_preset(options.recurrence).recurrence;
  args.q = tensor(address(1), dtype, {B, T, H, K}, device);
  args.k = tensor(address(2), dtype, {B, T, H, K}, device);
  args.v = tensor(address(3), dtype, {B, T, HV, V}, device);
  args.out = tensor(address(4), dtype, {B, T, HV, V}, device);
  args.beta = tensor(address(5), DType::f32, {B, T, HV}, device);
  if (args.recurrence.gate == Gate::scalar) args.log_decay = tensor(address(6), DType::f32, {B, T, HV}, device);
  if (args.recurrence.gate == Gate::channel) args.log_decay = tensor(address(6), DType::f32, {B, T, HV, K}, device);
  return args;
}

/// The smallest legal problem: its report lists every kernel of the build.
std::vector<KernelReport> all_kernels() {
  InfoOptions smallest;
  smallest.T = smallest.H = smallest.K = smallest.V = 1;
  smallest.dtype = name(DType::f32);
  return dispatch_info(problem_of(smallest)).kernels;
}

std::vector<KernelReport> all_softmax_kernels() {
  SoftmaxArgs smallest;
  smallest.q = smallest.k = smallest.v = tensor(address(1), DType::f32, {1, 1, 1, 1}, cpu());
  smallest.out = tensor(address(2), DType::f32, {1, 1, 1, 1}, cpu());
  return softmax_dispatch_info(smallest).kernels;
}

ordered_json kernel_facts(const std::vector<KernelReport>& kernels) {
  ordered_json facts = ordered_json::array();
  for (const KernelReport& kernel : kernels) {
    ordered_json settings = ordered_json::array();
    for (const Setting& setting : kernel.settings) {
      settings.push_back({{"name", setting.name}, {"meaning", setting.meaning}, {"values", setting.values}});
    }
    facts.push_back({{"name", kernel.kernel}, {"summary", kernel.summary}, {"settings", settings}});
  }
  return facts;
}

ordered_json facts() {
  ordered_json facts;
  facts["version"] = DELTA_ATTENTION_VERSION;
  facts["cuda_architectures"] = cuda_architectures();
  facts["cpu_threads"] = std::thread::hardware_concurrency();
  std::string reason;
  facts["gpus"] = ordered_json::array();
  for (const GpuFacts& gpu : list_gpus(reason)) {
    facts["gpus"].push_back({{"name", gpu.name}, {"capability", gpu.capability}, {"memory_bytes", gpu.memory}});
  }
  facts["why_no_gpu"] = reason;
  facts["kernels"] = kernel_facts(all_kernels());
  facts["softmax_kernels"] = kernel_facts(all_softmax_kernels());
  facts["recurrences"] = ordered_json::array();
  for (const Preset& preset : kPresets) {
    facts["recurrences"].push_back({{"name", preset.name}, {"formula", preset.formula}});
  }
  return facts;
}

ordered_json dispatch_facts(const InfoOptions& options) {
  const ForwardArgs args = problem_of(options);
  const DispatchInfo info = dispatch_info(args);
  ordered_json facts;
  facts["problem"] = fmt::format("{}, q and k {}, v {}, on {}", options.recurrence, describe(args.q), describe(args.v),
                                 text_of(args.q.device));
  facts["kernel"] = info.kernel;
  facts["reason"] = info.reason;
  facts["settings"] = info.settings;
  facts["kernels"] = ordered_json::array();
  for (const KernelReport& report : info.kernels) {
    facts["kernels"].push_back({{"name", report.kernel}, {"supported", report.supported}, {"reason", report.reason}});
  }
  return facts;
}

std::string text(const ordered_json& value) { return value.get<std::string>(); }

void print_kernels(const char* title, const ordered_json& kernels) {
  fmt::print("{}", title);
  for (const ordered_json& kernel : kernels) {
    fmt::print("  {:<20} {}\n", text(kernel["name"]), text(kernel["summary"]));
  }
}

void print_settings(const char* title, const ordered_json& kernels) {
  for (const ordered_json& kernel : kernels) {
    for (const ordered_json& setting : kernel["settings"]) {
      fmt::print("{}", std::exchange(title, ""));
      fmt::print("  {:<30} {:<12} {:<20} {}\n", text(kernel["name"]), text(setting["name"]),
                 fmt::format("{}", fmt::join(setting["values"].get<std::vector<int>>(), " ")),
                 text(setting["meaning"]));
    }
  }
}

void print_facts(const ordered_json& facts) {
  const std::string architectures = text(facts["cuda_architectures"]);
  fmt::print("delta-attention {}, {}\n\nDevices\n", text(facts["version"]),
             architectures.empty() ? "CPU only" : "with CUDA kernels for " + architectures);
  fmt::print("  cpu      {} threads\n", facts["cpu_threads"].get<unsigned>());
  int index = 0;
  for (const ordered_json& gpu : facts["gpus"]) {
    fmt::print("  cuda:{}   {}, compute capability {}, {:.0f} GiB\n", index++, text(gpu["name"]),
               text(gpu["capability"]), gpu["memory_bytes"].get<double>() / (1 << 30));
  }
  if (index == 0) fmt::print("  cuda     none: {}\n", text(facts["why_no_gpu"]));
  print_kernels("\nKernels (run --kernel NAME)\n", facts["kernels"]);
  print_settings("\nSettings (run --kernel NAME --settings NAME=INT,...); `delta-attention tune` measures them\n",
                 facts["kernels"]);
  print_kernels("\nSoftmax attention, to compare with (Execution::kernel of softmax_attention_forward)\n",
                facts["softmax_kernels"]);
  print_settings("\nTheir settings (Execution::settings)\n", facts["softmax_kernels"]);
  fmt::print("\nRecurrences (run --recurrence NAME). S is the state, K x V; out = scale S^T q\n");
  for (const ordered_json& preset : facts["recurrences"]) {
    fmt::print("  {:<20} {}\n", text(preset["name"]), text(preset["formula"]));
  }
}

void print_dispatch(const ordered_json& facts) {
  const std::string kernel = text(facts["kernel"]);
  fmt::print("problem   {}\n", text(facts["problem"]));
  fmt::print("kernel    {}: {}\n", kernel.empty() ? "none" : kernel, text(facts["reason"]));
  if (const std::string settings = text(facts["settings"]); !settings.empty()) fmt::print("settings  {}\n", settings);
  fmt::print("\n");
  for (const ordered_json& report : facts["kernels"]) {
    const bool supported = report["supported"].get<bool>();
    const bool chosen = text(report["name"]) == kernel;
    fmt::print("  {:<20} {}\n", text(report["name"]),
               chosen      ? "runs"
               : supported ? "could run"
                           : "no: " + text(report["reason"]));
  }
}

void info(const InfoOptions& options) {
  if (!options.json) {
    options.asks_dispatch ? print_dispatch(dispatch_facts(options)) : print_facts(facts());
    return;
  }
  ordered_json all = facts();
  if (options.asks_dispatch) all["dispatch"] = dispatch_facts(options);
  fmt::print("{}\n", all.dump(2));
}

}  // namespace

void add_info_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<InfoOptions>();
  CLI::App* command =
      app.add_subcommand("info", "Show devices, kernels and recurrences, or which kernel would run a problem");
  command->footer(kFooter);
  command->add_flag("--json", options->json, "Print JSON");
  CLI::App* group = command->add_option_group("Problem", "Any of these asks which kernel would run it");
  const CLI::Validator sizes = CLI::PositiveNumber;
  group->add_option("-r,--recurrence", options->recurrence, "Recurrence")
      ->check(CLI::IsMember(preset_names()))
      ->capture_default_str();
  group->add_option("--B", options->B, "Batch")->check(sizes)->capture_default_str();
  group->add_option("--T", options->T, "Tokens")->check(sizes)->capture_default_str();
  group->add_option("--H", options->H, "Query/key heads")->check(sizes)->capture_default_str();
  group->add_option("--HV", options->HV, "Value heads, a multiple of H (default: H)")->check(sizes);
  group->add_option("--K", options->K, "Key dimension")->check(sizes)->capture_default_str();
  group->add_option("--V", options->V, "Value dimension")->check(sizes)->capture_default_str();
  group->add_option("--dtype", options->dtype, "Storage of q, k, v, out")
      ->check(CLI::IsMember(dtype_names()))
      ->capture_default_str();
  group->add_option("--device", options->device, "cpu, cuda or cuda:N")->capture_default_str();
  command->callback([options, group, &selected] {
    options->asks_dispatch = group->count_all() > 0;
    selected = [options] { info(*options); };
  });
}

}  // namespace delta_attention::cli
