#pragma once

// A kernel as the command line names it, "v3_on_chip:flush=8,layout=1", the diagnostic ones included.

#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention::cli {

struct KernelChoice {
  std::string kernel;
  std::string settings;  // "": the library's choice
  bool diagnostic = false;

  /// As it was written.
  std::string text() const { return settings.empty() ? kernel : kernel + ":" + settings; }
};

/// Splits NAME or NAME:SETTINGS. Throws Unsupported for a name that this build does not have.
KernelChoice parse_kernel_choice(const std::string& text);

/// Kernels that are wrong on purpose; none in a program that links the shared library.
std::vector<std::string> diagnostic_names();

/// delta_attention_forward on that kernel. Throws Unsupported if it cannot run these arguments.
void forward_on(const KernelChoice& choice, const ForwardArgs& args);

}  // namespace delta_attention::cli
