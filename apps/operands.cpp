#include "operands.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>

#include "errors.h"

namespace delta_attention::cli {
namespace {

/// [B,T,H,D] as [B,T,heads,H D / heads], without moving a byte.
void regroup(ConstTensor& x, const char* name, std::int64_t heads) {
  if (x.rank != 4) return;  // the library's own message says more
  const std::int64_t channels = x.shape[2] * x.shape[3];
  if (heads < 1 || channels % heads != 0) {
    throw BadInput(fmt::format("--heads: {} {} cannot be read as {} heads", name, describe(x), heads));
  }
  x.shape[2] = heads;
  x.shape[3] = channels / heads;
  x.strides[2] = x.shape[3];
}

}  // namespace

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& preset : kPresets) names.emplace_back(preset.name);
  return names;
}

const Preset& find_preset(const std::string& name) {
  for (const Preset& preset : kPresets) {
    if (name == preset.name) return preset;
  }
  throw BadInput(fmt::format("recurrence: expected one of {}, got '{}'", fmt::join(preset_names(), ", "), name));
}

const std::vector<NamedOperand>& input_operands() {
  static const std::vector<NamedOperand> operands = {
      {"q", &ForwardArgs::q},
      {"k", &ForwardArgs::k},
      {"v", &ForwardArgs::v},
      {"log_decay", &ForwardArgs::log_decay},
      {"beta", &ForwardArgs::beta},
      {"initial_state", &ForwardArgs::initial_state},
      {"initial_normalizer", &ForwardArgs::initial_normalizer},
      {"cu_seqlens", &ForwardArgs::cu_seqlens},
      {"a_log", &ForwardArgs::a_log},
      {"dt_bias", &ForwardArgs::dt_bias},
  };
  return operands;
}

OperandNames parse_operand_names(const std::vector<std::string>& words) {
  OperandNames names;
  for (const std::string& word : words) {
    const std::size_t equals = word.find('=');
    const std::string operand = word.substr(0, equals);
    std::vector<std::string> known;
    for (const NamedOperand& each : input_operands()) known.emplace_back(each.name);
    if (equals == std::string::npos || std::find(known.begin(), known.end(), operand) == known.end()) {
      throw BadInput(
          fmt::format("--tensor: expected OPERAND=NAME with one of {}, got '{}'", fmt::join(known, ", "), word));
    }
    names[operand] = word.substr(equals + 1);
  }
  return names;
}

void read_operands(const SafetensorsFile& file, const OperandNames& names, ForwardArgs& args) {
  for (const NamedOperand& operand : input_operands()) {
    const auto named = names.find(operand.name);
    const std::string name = named != names.end() ? named->second : operand.name;
    if (name.empty()) continue;
    args.*operand.view = file.find(name);
    const bool asked_for = named != names.end();
    if (asked_for && !(args.*operand.view).present()) {
      throw BadInput(
          fmt::format("{}: --tensor {}={}: the file has no tensor of this name", file.path(), operand.name, name));
    }
  }
}

void regroup_heads(ForwardArgs& args, std::int64_t heads) {
  if (args.q.rank != 4 || args.v.rank != 4 || args.q.shape[2] < 1) return;
  const std::int64_t grouped = args.v.shape[2] * heads;
  if (grouped % args.q.shape[2] != 0) {
    throw BadInput(fmt::format("--heads: v {} cannot be regrouped as q {} is", describe(args.v), describe(args.q)));
  }
  const std::int64_t value_heads = grouped / args.q.shape[2];
  regroup(args.q, "q", heads);
  regroup(args.k, "k", heads);
  regroup(args.v, "v", value_heads);
  regroup(args.log_decay, "log_decay", value_heads);
}

std::string shipped_data() {
  const char* folder = std::getenv("DELTA_ATTENTION_DATA_DIR");
  return fmt::format("{}/minilm_attention.safetensors", folder != nullptr ? folder : DELTA_ATTENTION_DATA_DIR);
}

std::string describe(const ConstTensor& x) {
  if (!x.present()) return "none";
  return fmt::format("{} [{}]", name(x.dtype), fmt::join(x.shape.begin(), x.shape.begin() + x.rank, ","));
}

}  // namespace delta_attention::cli
