// The float64 oracle of softmax attention, as a kernel.

#include "api/softmax_kernel.h"
#include "softmax_attention_reference.h"

namespace delta_attention {

extern const SoftmaxKernel softmax_reference_kernel;
const SoftmaxKernel softmax_reference_kernel = {
    "softmax_reference",
    "float64, one row after another: the oracle",
    DeviceType::cpu,
    true,
    0,
    no_settings,
    [](const SoftmaxProblem&, const DeviceProperties&, const Settings&) { return std::string(); },
    no_workspace,
    [](const SoftmaxLaunch& launch) { reference::softmax_forward(launch.args); },
};

}  // namespace delta_attention
