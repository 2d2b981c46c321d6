// v4_on_chip_compensated: V3 with a compensation beside every number of the state and of the normaliser (V4). The story is told in
// on_chip_kernel.cuh. The compensation doubles the shared memory of the state and the work of each update, not the exchange.

#include "cuda/delta/on_chip_kernel.cuh"

namespace delta_attention {

extern const Kernel on_chip_compensated_kernel;

const Kernel on_chip_compensated_kernel = {
    "v4_on_chip_compensated",
    "V3 with a compensated state: sums keep what rounding drops (V4)",
    DeviceType::cuda,
    true,
    -1,
    on_chip::settings<CompensatedSum>,
    on_chip::unsupported<CompensatedSum>,
    on_chip::workspace<CompensatedSum>,
    [](const Launch& call) { on_chip::launch<CompensatedSum>(call, true); },
    on_chip::unrepeatable,
};

}  // namespace delta_attention
