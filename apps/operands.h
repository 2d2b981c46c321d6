#pragma once

// From the tensors of a file to the operands of a call, by name.

#include <map>
#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"
#include "safetensors.h"

namespace delta_attention::cli {

/// The names of the recurrences, for checks of the command line.
std::vector<std::string> preset_names();
const Preset& find_preset(const std::string& name);

/// operand -> name in the file; "" means none. Operands that are not here go by their own name.
using OperandNames = std::map<std::string, std::string>;

/// Reads "operand=name" words. Throws BadInput for an operand that does not exist.
OperandNames parse_operand_names(const std::vector<std::string>& words);

/// Fills the input operands with views of the file's tensors; what the file does not hold stays "none".
void read_operands(const SafetensorsFile& file, const OperandNames& names, ForwardArgs& args);

/// Reads q, k, v and a per-channel log_decay as `heads` query/key heads: the channels of neighbouring heads, side by side in
/// memory, become the channels of one. Throws BadInput if they do not divide.
void regroup_heads(ForwardArgs& args, std::int64_t heads);

/// The path of the shipped activations, minilm_attention.safetensors.
std::string shipped_data();

/// The input operands of a call, with their names: q, k, v, ...
struct NamedOperand {
  const char* name;
  ConstTensor ForwardArgs::*view;
};
const std::vector<NamedOperand>& input_operands();

/// "f16 [1,1024,12,32]"
std::string describe(const ConstTensor& x);

}  // namespace delta_attention::cli
