// The float64 oracle of reference/, as a kernel that can be asked for by name.

#include "api/kernel.h"
#include "delta_attention_reference.h"

namespace delta_attention {

extern const Kernel reference_kernel;
const Kernel reference_kernel = {
    "reference",
    "float64, one token after another: the oracle (Eigen)",
    DeviceType::cpu,
    true,
    0,
    no_settings,
    [](const Problem&, const DeviceProperties&, const Settings&) { return std::string(); },
    no_workspace,
    [](const Launch& launch) { reference::forward(launch.args); },
};

}  // namespace delta_attention
