// `delta-attention demo`: every kernel that this machine can run, on the activations of a trained transformer.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "commands.h"
#include "demo_measure.h"
#include "device_memory.h"
#include "errors.h"
#include "operands.h"
#include "progress.h"
#include "safetensors.h"

namespace delta_attention::cli {
namespace {

using nlohmann::ordered_json;

struct DemoOptions {
  std::string data;
  std::string json;
  std::string device = "all";
};

constexpr const char* kFooter =
    "The data file holds q, k, v, log_decay [1,T,H,K], beta and log_decay_scalar [1,T,H]; with beta_d128 and\n"
    "log_decay_scalar_d128 [1,T,3] in it, its heads are also read side by side as wider heads.\n"
    "\n"
    "Examples:\n"
    "  delta-attention demo\n"
    "  delta-attention demo --json demo.json && scripts/plot_demo.py demo.json demo.png\n"
    "  delta-attention demo --device cpu --data my_layer.safetensors";

constexpr const char* kWhatIsComputed =
    "What is computed\n"
    "  A head reads tokens one after another. Each brings a query q, a key k and a value v. The head keeps a memory S, "
    "a matrix\n"
    "  of K x V numbers. At each token it lets S fade (decay a), moves what S answers for the key k towards v (by "
    "beta), and\n"
    "  answers the query: out = S^T q / sqrt(K). So the cost of a token does not grow with how many came before.\n";

constexpr const char* kHowToRead =
    "How to read it\n"
    "  error {0:<5} ||out - exact|| / ||exact||, where exact is computed in float64 from the same input. Input and "
    "output are\n"
    "              stored in {0}, as models do. `reference` computes in float64, so its error is the rounding of the "
    "output\n"
    "              alone: a kernel that shows the same number loses nothing that matters.\n"
    "  error f32   the same with input and output stored in f32: what is left is the kernel's own arithmetic. An f32 "
    "number\n"
    "              is itself exact to 6e-08 only, so a few times that is good.\n"
    "  time        of one call on all {1} tokens and heads, stored in {0}: the median of several runs\n"
    "  speed       compared with the kernel marked 1.0x in the same group\n"
    "  softmax     causal softmax attention of the same q, k and v, to compare with: a token costs the more, the more "
    "came\n"
    "              before it. On GPUs only: on the CPU there is just the float64 oracle, whose time says nothing\n";

/// One way to read the file: as stored, or with its heads side by side as wider heads.
struct Reading {
  std::string suffix;  // of the names of beta and log_decay_scalar
  std::int64_t heads;  // 0: as stored
};

struct Case {
  std::string title;
  Preset preset;
  ForwardArgs args;
};

struct Result {
  Case problem;
  Exact exact;
  std::vector<Measurement> measurements;
};

/// Softmax attention beside the cases of one title.
struct SoftmaxResult {
  std::string title;
  std::vector<SoftmaxTime> times;
};

ConstTensor require(const SafetensorsFile& file, const std::string& name) {
  const ConstTensor tensor = file.find(name);
  if (!tensor.present()) throw BadInput(fmt::format("{}: the demo needs a tensor {}", file.path(), name));
  return tensor;
}

std::vector<Reading> readings_of(const SafetensorsFile& file) {
  std::vector<Reading> readings = {{"", 0}};
  const ConstTensor wide = file.find("beta_d128");
  if (wide.rank == 3) readings.push_back({"_d128", wide.shape[2]});
  return readings;
}

Case make_case(const SafetensorsFile& file, const Reading& reading, const char* recurrence) {
  Case result{"", find_preset(recurrence), {}};
  ForwardArgs& args = result.args;
  args.recurrence = result.preset.recurrence;
  args.q = require(file, "q");
  args.k = require(file, "k");
  args.v = require(file, "v");
  if (args.recurrence.gate == Gate::channel) args.log_decay = require(file, "log_decay");
  if (reading.heads > 0) regroup_heads(args, reading.heads);
  if (args.recurrence.gate == Gate::scalar) args.log_decay = require(file, "log_decay_scalar" + reading.suffix);
  // The delta rule is bounded for keys of unit length, and takes beta; GLA has neither.
  args.qk_l2norm = args.recurrence.update == Update::delta;
  if (args.recurrence.update == Update::delta) args.beta = require(file, "beta" + reading.suffix);
  result.title = fmt::format("{} head{} of {}", args.q.shape[2], args.q.shape[2] == 1 ? "" : "s", args.q.shape[3]);
  return result;
}

std::vector<Case> cases_of(const SafetensorsFile& file) {
  std::vector<Case> cases;
  for (const Reading& reading : readings_of(file)) {
    for (const char* recurrence : {"kda", "gated_delta_net", "delta_net", "gla"}) {
      cases.push_back(make_case(file, reading, recurrence));
    }
  }
  return cases;
}

std::vector<Device> devices_of(const std::string& text, std::string& why_no_gpu) {
  if (text != "all") return {parse_device(text)};
  std::vector<Device> devices = {cpu()};
  if (!list_gpus(why_no_gpu).empty()) devices.push_back(cuda(0));
  return devices;
}

/// The kernels that can run the problem on the device.
std::vector<std::string> able_kernels(const ForwardArgs& args, Device device) {
  std::vector<OwnedTensor> storage;
  ForwardArgs there = args;
  for (const NamedOperand& operand : input_operands()) {
    ConstTensor& view = there.*operand.view;
    if (!view.present()) continue;
    storage.push_back(zeros(view, view.dtype, device));
    view = storage.back().view;
  }
  storage.push_back(zeros(args.v, args.q.dtype, device));
  there.out = storage.back().view;
  std::vector<std::string> names;
  for (const KernelReport& report : dispatch_info(there).kernels) {
    if (report.supported) names.push_back(report.kernel);
  }
  return names;
}

Result run_case(const Case& problem, const std::vector<Device>& devices) {
  able_kernels(problem.args, cpu());  // names what is wrong with the file's shapes before they are cut into blocks
  Result result{problem, compute_exact(problem.args), {}};
  for (Device device : devices) {
    for (const std::string& kernel : able_kernels(problem.args, device)) {
      result.measurements.push_back(measure(problem.args, kernel, device, result.exact));
    }
  }
  return result;
}

std::vector<Result> run_cases(const std::vector<Case>& cases, const std::vector<Device>& devices) {
  std::vector<Result> results;
  Progress progress("demo");
  for (const Case& problem : cases) {
    results.push_back(run_case(problem, devices));
    progress.set(static_cast<double>(results.size()) / static_cast<double>(cases.size()));
  }
  return results;
}

bool same_shape(const ConstTensor& a, const ConstTensor& b) { return a.rank == b.rank && a.shape == b.shape; }

/// One entry a title; without times where there is no GPU, or where the file's v has other sizes than k.
std::vector<SoftmaxResult> softmax_results(const std::vector<Case>& cases, const std::vector<Device>& devices) {
  std::vector<SoftmaxResult> results;
  for (const Case& each : cases) {
    if (!results.empty() && results.back().title == each.title) continue;
    results.push_back({each.title, {}});
    if (!same_shape(each.args.k, each.args.v)) continue;
    for (Device device : devices) {
      if (device.type == DeviceType::cuda) results.back().times.push_back(time_softmax(each.args, device));
    }
  }
  return results;
}

/// What the others' speed is compared with: the plain f32 recurrence if it ran, otherwise the slowest.
const Measurement& baseline(const std::vector<Measurement>& measurements) {
  for (const Measurement& each : measurements) {
    if (each.kernel == "cpu_sequential") return each;
  }
  return *std::max_element(measurements.begin(), measurements.end(),
                           [](const Measurement& a, const Measurement& b) { return a.median_ms < b.median_ms; });
}

std::string metadata(const SafetensorsFile& file, const char* key) {
  const auto found = file.header().metadata.find(key);
  return found != file.header().metadata.end() ? found->second : "";
}

void print_introduction(const SafetensorsFile& file, const std::vector<Case>& cases, const std::vector<Device>& devices,
                        const std::string& why_no_gpu) {
  fmt::print("{}\n", kWhatIsComputed);
  for (const Case& each : cases) {
    if (each.title == cases.front().title) fmt::print("    {:<16} {}\n", each.preset.name, each.preset.formula);
  }
  fmt::print("\nInput\n  {}\n", file.path());
  const std::string model = metadata(file, "model"), text = metadata(file, "text");
  if (!model.empty()) fmt::print("  q, k and v of an attention layer of {}\n", model);
  if (!text.empty()) fmt::print("  reading {}\n", text);
  if (!metadata(file, "rule").empty()) {
    fmt::print("  beta and decays made from these by the rule in the file's metadata\n");
  }
  fmt::print("  for the delta rule q and k are scaled to unit length\n");
  fmt::print("\nMachine\n");
  std::string unused;
  const std::vector<GpuFacts> gpus = list_gpus(unused);
  for (Device device : devices) {
    if (device.type == DeviceType::cpu) {
      fmt::print("  cpu      {} threads\n", std::thread::hardware_concurrency());
    } else {
      fmt::print("  {:<8} {}\n", text_of(device), gpus.at(static_cast<std::size_t>(device.index)).name);
    }
  }
  if (!why_no_gpu.empty()) fmt::print("  no GPU   {}\n", why_no_gpu);
  std::fflush(stdout);
}

std::string duration(double ms) {
  return ms < 1.0 ? fmt::format("{:.1f} us", 1000.0 * ms) : fmt::format("{:.2f} ms", ms);
}

double tokens_per_second(const ConstTensor& q, double ms) {
  return static_cast<double>(q.shape[0] * q.shape[1]) / (ms * 1e-3);
}

void print_result(const Result& result) {
  if (result.measurements.empty()) {
    fmt::print("  {:<16} no kernel can run this here\n", result.problem.preset.name);
    return;
  }
  const double base_ms = baseline(result.measurements).median_ms;
  const char* recurrence = result.problem.preset.name;
  for (const Measurement& each : result.measurements) {
    fmt::print("  {:<16} {:<30} {:<7} {:>9.1e} {:>10.1e} {:>11} {:>12.0f} {:>7.1f}x\n", recurrence, each.kernel,
               text_of(each.device), each.error, each.error_f32, duration(each.median_ms),
               tokens_per_second(result.problem.args.q, each.median_ms), base_ms / each.median_ms);
    recurrence = "";
  }
}

void print_softmax(const ConstTensor& q, const std::vector<SoftmaxTime>& times) {
  const char* what = "softmax";
  for (const SoftmaxTime& each : times) {
    fmt::print("  {:<16} {:<30} {:<7} {:>9} {:>10} {:>11} {:>12.0f}\n", what, each.kernel, text_of(each.device), "", "",
               duration(each.median_ms), tokens_per_second(q, each.median_ms));
    what = "";
  }
}

void print_results(const std::vector<Result>& results, const std::vector<SoftmaxResult>& softmax) {
  std::string title;
  auto beside = softmax.begin();
  for (const Result& result : results) {
    const ConstTensor& q = result.problem.args.q;
    if (result.problem.title != title) {
      title = result.problem.title;
      fmt::print("\n{}, {} tokens\n", title, q.shape[1]);
      fmt::print("  {:<16} {:<30} {:<7} {:>9} {:>10} {:>11} {:>12} {:>8}\n", "recurrence", "kernel", "device",
                 fmt::format("error {}", name(q.dtype)), "error f32", "time", "tokens/s", "speed");
      print_softmax(q, (beside++)->times);
    }
    print_result(result);
  }
  const ConstTensor& q = results.front().problem.args.q;
  fmt::print("\n");
  fmt::print(kHowToRead, name(q.dtype), q.shape[1]);
}

ordered_json to_json(const Result& result) {
  const ForwardArgs& args = result.problem.args;
  ordered_json json = {{"recurrence", result.problem.preset.name},
                       {"formula", result.problem.preset.formula},
                       {"title", result.problem.title},
                       {"dtype", name(args.q.dtype)},
                       {"tokens", args.q.shape[1]},
                       {"heads", args.q.shape[2]},
                       {"key_dim", args.q.shape[3]},
                       {"value_dim", args.v.shape[3]},
                       {"qk_l2norm", args.qk_l2norm},
                       {"state_norm_by_block", result.exact.state_norm}};
  json["kernels"] = ordered_json::array();
  for (const Measurement& each : result.measurements) {
    json["kernels"].push_back({{"kernel", each.kernel},
                               {"device", text_of(each.device)},
                               {"error", each.error},
                               {"error_f32", each.error_f32},
                               {"error_f32_by_block", each.error_f32_by_block},
                               {"median_ms", each.median_ms},
                               {"runs", each.runs},
                               {"tokens_per_second", tokens_per_second(args.q, each.median_ms)}});
  }
  return json;
}

ordered_json to_json(const SoftmaxResult& result) {
  ordered_json json = {{"title", result.title}, {"kernels", ordered_json::array()}};
  for (const SoftmaxTime& each : result.times) {
    json["kernels"].push_back(
        {{"kernel", each.kernel}, {"device", text_of(each.device)}, {"median_ms", each.median_ms}, {"runs", each.runs}});
  }
  return json;
}

void write_json(const std::string& path, const SafetensorsFile& file, const std::vector<Result>& results,
                const std::vector<SoftmaxResult>& softmax) {
  ordered_json json = {{"version", DELTA_ATTENTION_VERSION},
                       {"metadata", file.header().metadata},
                       {"cpu_threads", std::thread::hardware_concurrency()},
                       {"block", kBlock}};
  std::string reason;
  json["gpus"] = ordered_json::array();
  for (const GpuFacts& gpu : list_gpus(reason)) json["gpus"].push_back(gpu.name);
  json["cases"] = ordered_json::array();
  for (const Result& result : results) json["cases"].push_back(to_json(result));
  json["softmax"] = ordered_json::array();
  for (const SoftmaxResult& result : softmax) json["softmax"].push_back(to_json(result));

  const std::string text = json.dump(1) + "\n";
  std::FILE* out = std::fopen(path.c_str(), "w");
  if (out == nullptr) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  const bool written = std::fwrite(text.data(), 1, text.size(), out) == text.size();
  if (std::fclose(out) != 0 || !written) throw IoError(fmt::format("{}: {}", path, std::strerror(errno)));
  fmt::print("\nNumbers written to {}; scripts/plot_demo.py draws them.\n", path);
}

void demo(const DemoOptions& options) {
  const SafetensorsFile file(options.data.empty() ? shipped_data() : options.data);
  const std::vector<Case> cases = cases_of(file);
  std::string why_no_gpu;
  const std::vector<Device> devices = devices_of(options.device, why_no_gpu);
  print_introduction(file, cases, devices, why_no_gpu);
  std::vector<Result> results;
  std::vector<SoftmaxResult> softmax;
  try {
    results = run_cases(cases, devices);
    softmax = softmax_results(cases, devices);
  } catch (const InvalidArgument& error) {
    throw BadInput(file.path() + ": " + error.what());
  }
  print_results(results, softmax);
  if (!options.json.empty()) write_json(options.json, file, results, softmax);
}

}  // namespace

void add_demo_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<DemoOptions>();
  CLI::App* command = app.add_subcommand("demo", "Run every kernel of this machine on real data: errors and times");
  command->footer(kFooter);
  command->add_option(
      "--data", options->data,
      "safetensors file (default: minilm_attention.safetensors in $DELTA_ATTENTION_DATA_DIR or the source tree)");
  command->add_option("--json", options->json, "Write every number to this file");
  command->add_option("--device", options->device, "all, cpu, cuda or cuda:N")->capture_default_str();
  command->callback([options, &selected] { selected = [options] { demo(*options); }; });
}

}  // namespace delta_attention::cli
