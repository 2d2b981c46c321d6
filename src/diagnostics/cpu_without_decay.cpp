// cpu_without_decay: cpu_sequential that forgets to apply the gate. Right for recurrences without one, wrong for the others.

#include "api/kernel.h"

namespace delta_attention {

extern const Kernel cpu_sequential_kernel;
extern const Kernel cpu_without_decay_kernel;

const Kernel cpu_without_decay_kernel = {
    "cpu_without_decay",
    "diagnostic: cpu_sequential with the decay dropped",
    DeviceType::cpu,
    true,
    -1,
    no_settings,
    [](const Problem& problem, const DeviceProperties&, const Settings&) { return needs_f32(problem); },
    no_workspace,
    [](const Launch& launch) {
      Problem without_decay = launch.problem;
      without_decay.gate = Gate::none;
      cpu_sequential_kernel.launch({without_decay, launch.args, launch.device, launch.workspace, launch.stream,
                                    launch.threads, launch.settings});
    },
};

}  // namespace delta_attention
