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
    [](const SoftmaxProblem&, const DeviceProperties&) { return std::string(); },
    [](const SoftmaxProblem&, const DeviceProperties&) -> std::size_t { return 0; },
    [](const SoftmaxLaunch& launch) { reference::softmax_forward(launch.args); },
};

}  // namespace delta_attention
