#pragma once

// Kernels that are wrong on purpose. A verifier that lets one pass checks nothing; and what a kernel takes without some of its
// arithmetic says whether that arithmetic is what it waits for. They are in no list of the library: nothing dispatches to them, and
// programs that do not ask for this target do not contain them.

#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention::diagnostics {

struct Diagnostic {
  std::string name;
  std::string summary;
  DeviceType device;
};

/// The diagnostic kernels of this build.
std::vector<Diagnostic> list();

/// delta_attention_forward with the diagnostic kernel execution.kernel. Throws Unsupported for any other name.
void forward(const ForwardArgs& args, const Execution& execution);

}  // namespace delta_attention::diagnostics
