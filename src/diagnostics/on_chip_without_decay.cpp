// v3_without_decay: v3_on_chip that forgets to apply the gate. Right for recurrences without one, wrong for the others; what it saves in
// time says whether v3_on_chip waits for that arithmetic.

#include "cuda/delta/on_chip.h"

namespace delta_attention {

extern const Kernel on_chip_without_decay_kernel;

const Kernel on_chip_without_decay_kernel = {
    "v3_without_decay",
    "diagnostic: v3_on_chip with the decay dropped",
    DeviceType::cuda,
    true,
    -1,
    [] { return on_chip_kernel.settings(); },
    [](const Problem& problem, const DeviceProperties& device, const Settings& settings) {
      return on_chip_kernel.unsupported(problem, device, settings);
    },
    [](const Problem& problem, const DeviceProperties& device, const Settings& settings) {
      return on_chip_kernel.workspace(problem, device, settings);
    },
    launch_on_chip_without_decay,
    [](const Settings& settings) { return on_chip_kernel.unrepeatable(settings); },
};

}  // namespace delta_attention
