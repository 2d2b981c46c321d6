#pragma once

// What a kernel tells the rest of the library about itself. A kernel file exports one descriptor; api/kernels.cpp lists them.
// Dispatch, the test suite, the benchmarks and `delta-attention info` all read that one list.

#include <cstddef>
#include <string>
#include <vector>

#include "api/settings.h"
#include "problem/problem.h"

namespace delta_attention {

/// The facts about a device that decide what can run on it. Plain values, so that tests can invent devices.
struct DeviceProperties {
  DeviceType type = DeviceType::cpu;
  std::string name;
  int capability = 0;             // CUDA compute capability, 10 * major + minor
  int code = 0;                   // CUDA: the capability that the code it runs was made for; 0 if this build has none (code_for)
  int multiprocessors = 0;        // CUDA
  std::size_t shared_memory = 0;  // CUDA: the most a block can opt in to, bytes
};

/// One launch: the checked problem and where it runs.
struct Launch {
  const Problem& problem;
  const ForwardArgs& args;  // the caller's own words, for the float64 reference alone
  const DeviceProperties& device;
  void* workspace = nullptr;  // at least workspace(problem, device, settings) bytes
  void* stream = nullptr;
  int threads = 1;    // CPU
  Settings settings;  // what the caller or the tuned table chose
};

struct Kernel {
  const char* name;
  const char* summary;
  DeviceType device;
  /// Results are the same to the last bit from run to run; see also `unrepeatable`.
  bool repeatable;
  /// Dispatch takes the supported kernel with the highest priority where none was measured; negative means only when asked for by name.
  int priority;
  /// What can be chosen: every setting with every value that it can take.
  std::vector<Setting> (*settings)();
  /// "" if the kernel can run this problem on this device with these settings, else the reason why not.
  std::string (*unsupported)(const Problem&, const DeviceProperties&, const Settings&);
  std::size_t (*workspace)(const Problem&, const DeviceProperties&, const Settings&);
  void (*launch)(const Launch&);
  /// Whether these settings make a repeatable kernel's last bits differ from run to run. Null: no setting does.
  bool (*unrepeatable)(const Settings&) = nullptr;
  /// Bits that operands of products, the state among them, are rounded to, by the dtype of q. Sums, and the state itself, stay f32.
  /// Null: f32 throughout.
  int (*product_bits)(DType) = nullptr;
};

/// Every kernel of this build.
const std::vector<const Kernel*>& kernels();

/// The reason that all f32-arithmetic kernels share.
inline std::string needs_f32(const Problem& problem) {
  return problem.has_f64 ? "f64 operands run on the kernel 'reference' only" : "";
}

/// The reason of kernels that write states at the end of a sequence only.
inline std::string lacks_intermediate_states(const Problem& problem) {
  return problem.intermediate_states.present ? "this kernel writes no intermediate states" : "";
}

inline std::vector<Setting> no_settings() { return {}; }

inline std::size_t no_workspace(const Problem&, const DeviceProperties&, const Settings&) { return 0; }

}  // namespace delta_attention
