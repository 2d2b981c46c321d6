// `delta-attention run`: one forward call on the tensors of a file.

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <optional>
#include <thread>

#include "commands.h"
#include "device_memory.h"
#include "errors.h"
#include "operands.h"
#include "progress.h"
#include "safetensors.h"
#include "slices.h"

namespace delta_attention::cli {
namespace {

struct RunOptions {
  std::string input;
  std::string output;
  std::string recurrence;
  std::string kernel = "automatic";
  std::string settings;
  std::string device = "cpu";
  std::string beta_space = "value";
  std::string gate_space = "log";
  float gate_lower_bound = ForwardArgs{}.gate_lower_bound;
  std::optional<float> scale;
  bool l2norm = false;
  bool final_state = false;
  bool check_values = false;
  int threads = 0;
  std::int64_t heads = 0;
  std::vector<std::string> tensors;
};

constexpr const char* kFooter =
    "The input file holds q and k [B,T,H,K], v [B,T,HV,V] and, if there are any, log_decay [B,T,HV] or [B,T,HV,K],\n"
    "beta [B,T,HV], initial_state [N,HV,K,V], initial_normalizer [N,HV,K], cu_seqlens [N+1], a_log [HV] and dt_bias.\n"
    "What the file does not hold is left out. The output file gets `out` and, if asked for, `final_state`.\n"
    "\n"
    "Examples:\n"
    "  delta-attention run in.safetensors out.safetensors --recurrence kda --l2norm\n"
    "      Kimi Delta Attention with unit-length queries and keys\n"
    "  delta-attention run in.safetensors out.safetensors --recurrence gated_delta_net \\\n"
    "      --tensor log_decay=log_decay_scalar --final-state --device cuda\n"
    "      another tensor of the file as the gate; keep the last state; on the first GPU\n"
    "  delta-attention run in.safetensors out.safetensors --recurrence delta_net --tensor log_decay=\n"
    "      a file with a gate, read without it\n"
    "  delta-attention run in.safetensors out.safetensors --recurrence kda --l2norm --heads 3 --tensor beta=beta_d128\n"
    "      12 heads of 32 that lie side by side, read as 3 heads of 128";

constexpr std::pair<const char*, BetaSpace> kBetaSpaces[] = {
    {"value", BetaSpace::value}, {"sigmoid", BetaSpace::sigmoid}, {"twice_sigmoid", BetaSpace::twice_sigmoid}};
constexpr std::pair<const char*, GateSpace> kGateSpaces[] = {{"log", GateSpace::log},
                                                             {"log2", GateSpace::log2},
                                                             {"linear", GateSpace::linear},
                                                             {"softplus", GateSpace::softplus},
                                                             {"lower_bound", GateSpace::lower_bound}};

template <class Table>
std::vector<std::string> names_of(const Table& table) {
  std::vector<std::string> names;
  for (const auto& entry : table) names.emplace_back(entry.first);
  return names;
}

template <class Table>
auto value_of(const Table& table, const std::string& name) {
  return std::find_if(std::begin(table), std::end(table), [&](const auto& entry) { return name == entry.first; })
      ->second;
}

ForwardArgs arguments_of(const RunOptions& options, const SafetensorsFile& file) {
  ForwardArgs args;
  read_operands(file, parse_operand_names(options.tensors), args);
  if (options.heads > 0) regroup_heads(args, options.heads);
  args.recurrence = find_preset(options.recurrence).recurrence;
  args.scale = options.scale;
  args.qk_l2norm = options.l2norm;
  args.beta_space = value_of(kBetaSpaces, options.beta_space);
  args.gate_space = value_of(kGateSpaces, options.gate_space);
  args.gate_lower_bound = options.gate_lower_bound;
  return args;
}

ConstTensor shaped(std::initializer_list<std::int64_t> shape) {
  return tensor(static_cast<const void*>(nullptr), DType::f32, shape);
}

/// The outputs of a call, on its device.
struct Outputs {
  OwnedTensor out, final_state, final_normalizer;
};

Outputs make_outputs(ForwardArgs& args, bool with_state) {
  Outputs outputs;
  const Device device = args.q.device;
  outputs.out = zeros(args.v, args.q.dtype, device);
  args.out = outputs.out.view;
  const bool sizes_known = args.q.rank == 4 && args.v.rank == 4;
  const bool packed = args.cu_seqlens.present();
  if (!with_state || !sizes_known || (packed && args.cu_seqlens.shape[0] < 1)) return outputs;

  const std::int64_t sequences = packed ? args.cu_seqlens.shape[0] - 1 : args.q.shape[0];
  const DType dtype = args.q.dtype == DType::f64 ? DType::f64 : DType::f32;
  outputs.final_state = zeros(shaped({sequences, args.v.shape[2], args.q.shape[3], args.v.shape[3]}), dtype, device);
  args.final_state = outputs.final_state.view;
  if (args.recurrence.normalize) {
    outputs.final_normalizer = zeros(shaped({sequences, args.v.shape[2], args.q.shape[3]}), dtype, device);
    args.final_normalizer = outputs.final_normalizer.view;
  }
  return outputs;
}

/// Copies the inputs to the device; the copies live in `storage`.
void move_inputs(ForwardArgs& args, Device device, std::vector<OwnedTensor>& storage) {
  if (device.type == DeviceType::cpu) return;
  for (const NamedOperand& operand : input_operands()) {
    ConstTensor& view = args.*operand.view;
    if (!view.present()) continue;
    storage.push_back(copy_to(view, device));
    view = storage.back().view;
  }
}

/// One call for a few heads at a time, so that progress can be shown. Heads do not know of each other, so the result is the
/// same to the last bit; a part has at least as many (sequence, head) pairs as there are threads, so no core goes idle.
void forward_in_parts(const ForwardArgs& args, const Execution& execution) {
  const std::int64_t threads =
      execution.threads > 0 ? execution.threads : std::max(1u, std::thread::hardware_concurrency());
  const std::int64_t sequences = args.cu_seqlens.present() ? args.cu_seqlens.shape[0] - 1 : args.q.shape[0];
  const std::int64_t heads = args.q.shape[2];
  const std::int64_t pairs_per_head = std::max<std::int64_t>(1, sequences * (args.v.shape[2] / heads));
  const std::int64_t heads_per_part = (threads + pairs_per_head - 1) / pairs_per_head;
  Progress progress(execution.kernel);
  for (std::int64_t first = 0; first < heads; first += heads_per_part) {
    delta_attention_forward(head_slice(args, first, std::min(heads_per_part, heads - first)), execution);
    progress.set(static_cast<double>(std::min(first + heads_per_part, heads)) / static_cast<double>(heads));
  }
}

/// Runs the call and returns its milliseconds. `execution.kernel` becomes the kernel that ran.
double forward(const ForwardArgs& args, Execution& execution) {
  const DispatchInfo dispatch = dispatch_info(args, execution);
  const bool runs = !dispatch.kernel.empty();
  if (runs) execution.kernel = dispatch.kernel;
  // Values are checked in one call, so that a message counts heads from the file's first.
  const bool in_parts =
      runs && stderr_is_terminal() && args.q.device.type == DeviceType::cpu && !execution.check_values;
  return time_ms(args.q.device, [&] {
    if (in_parts) {
      forward_in_parts(args, execution);
    } else {
      delta_attention_forward(args, execution);
    }
  });
}

std::string tensors_of(const SafetensorsFile& file) {
  std::string text;
  for (const auto& [name, entry] : file.header().tensors) text += fmt::format("\n    {:<24} {}", name, describe(entry));
  return text.empty() ? " no tensors" : text;
}

/// The library's words, with what a user of the program can do about it.
BadInput explained(const InvalidArgument& error, const SafetensorsFile& file) {
  const std::string& argument = error.argument();
  std::string text = fmt::format("{}: {}", file.path(), error.what());
  for (const NamedOperand& operand : input_operands()) {
    if (argument != operand.name) continue;
    text +=
        fmt::format("\n  --tensor {0}=NAME takes another tensor of the file, --tensor {0}= none. The file holds:{1}",
                    argument, tensors_of(file));
  }
  return BadInput(text);
}

std::string names_of_inputs(const ForwardArgs& args, bool present) {
  std::string text;
  for (const NamedOperand& operand : input_operands()) {
    if ((args.*operand.view).present() == present) text += (text.empty() ? "" : " ") + std::string(operand.name);
  }
  return text;
}

void write_outputs(SafetensorsWriter& writer, const Outputs& outputs, const RunOptions& options,
                   const std::string& kernel) {
  std::vector<OwnedTensor> on_cpu;
  std::vector<NamedTensor> tensors;
  const auto add = [&](const char* name, const OwnedTensor& output) {
    if (!output.view.present()) return;
    on_cpu.push_back(copy_to(output.view, cpu()));
    tensors.push_back({name, on_cpu.back().view});
  };
  add("out", outputs.out);
  add("final_state", outputs.final_state);
  add("final_normalizer", outputs.final_normalizer);
  writer.write(tensors, {{"producer", "delta-attention " DELTA_ATTENTION_VERSION},
                         {"recurrence", options.recurrence},
                         {"kernel", kernel},
                         {"device", options.device}});
}

void run(const RunOptions& options) {
  const SafetensorsFile file(options.input);
  ForwardArgs args = arguments_of(options, file);
  const Preset& preset = find_preset(options.recurrence);
  const Device device = parse_device(options.device);
  SafetensorsWriter writer(options.output);
  std::vector<OwnedTensor> storage;
  move_inputs(args, device, storage);

  Execution execution;
  execution.kernel = options.kernel;
  execution.settings = options.settings;
  execution.threads = options.threads;
  execution.check_values = options.check_values;
  Outputs outputs;
  double ms = 0.0;
  try {
    outputs = make_outputs(args, options.final_state);
    ms = forward(args, execution);
  } catch (const InvalidArgument& error) {
    throw explained(error, file);
  }
  write_outputs(writer, outputs, options, execution.kernel);

  fmt::print("recurrence  {}: {}\n", preset.name, preset.formula);
  fmt::print("read        {}\n", names_of_inputs(args, true));
  fmt::print("not given   {}\n", names_of_inputs(args, false));
  fmt::print("sizes       q {}, v {}\n", describe(args.q), describe(args.v));
  fmt::print("kernel      {} on {}, {:.3f} ms\n", execution.kernel, text_of(device), ms);
  fmt::print(
      "wrote       {}: out {}{}{}\n", options.output, describe(ConstTensor(outputs.out.view)),
      outputs.final_state.view.present() ? ", final_state " + describe(ConstTensor(outputs.final_state.view)) : "",
      outputs.final_normalizer.view.present()
          ? ", final_normalizer " + describe(ConstTensor(outputs.final_normalizer.view))
          : "");
}

}  // namespace

void add_run_command(CLI::App& app, Work& selected) {
  const auto options = std::make_shared<RunOptions>();
  CLI::App* command = app.add_subcommand("run", "Run a recurrence on the tensors of a safetensors file");
  command->footer(kFooter);
  command->add_option("input", options->input, "safetensors file with q, k, v, ...")->required();
  command->add_option("output", options->output, "safetensors file to write; replaced as a whole, or not at all")
      ->required();
  command
      ->add_option("-r,--recurrence", options->recurrence,
                   "What is computed; `delta-attention info` gives the formulas")
      ->required()
      ->check(CLI::IsMember(preset_names()));
  command
      ->add_option("--tensor", options->tensors,
                   "OPERAND=NAME: read this operand from the tensor NAME; no NAME means none")
      ->take_all()
      ->allow_extra_args(false);
  command->add_option("--device", options->device, "cpu, cuda or cuda:N")->capture_default_str();
  command->add_option("--kernel", options->kernel, "A kernel's name (`delta-attention info` lists them)")
      ->capture_default_str();
  command->add_option("--settings", options->settings,
                      "NAME=INT,NAME=INT: settings of that kernel (`delta-attention info` lists them)");
  command->add_option("--scale", options->scale, "Factor of the output (default: 1/sqrt(K))");
  command->add_flag("--l2norm", options->l2norm, "Scale every q and k to unit length first");
  command->add_option("--beta-space", options->beta_space, "What beta holds: itself, or a logit")
      ->check(CLI::IsMember(names_of(kBetaSpaces)))
      ->capture_default_str();
  command
      ->add_option("--gate-space", options->gate_space,
                   "What log_decay holds; softplus and lower_bound use a_log and dt_bias")
      ->check(CLI::IsMember(names_of(kGateSpaces)))
      ->capture_default_str();
  command->add_option("--gate-lower-bound", options->gate_lower_bound, "The bound of --gate-space lower_bound")
      ->capture_default_str();
  command
      ->add_option("--heads", options->heads,
                   "Read q, k (and v, log_decay alike) as this many heads lying side by side")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 20));
  command->add_flag("--final-state", options->final_state, "Also write the state after the last token");
  command->add_option("--threads", options->threads, "CPU threads; 0 means all cores")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--check-values", options->check_values, "Also check the values of gates and cu_seqlens");
  command->callback([options, &selected] { selected = [options] { run(*options); }; });
}

}  // namespace delta_attention::cli
