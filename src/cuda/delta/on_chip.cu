// v3_on_chip: the state in shared memory for the whole sequence, exchanged sums every F tokens (V3). The story is told in
// on_chip_kernel.cuh; here the state is kept in plain f32 sums.

#include "cuda/delta/on_chip.h"

#include "cuda/delta/on_chip_kernel.cuh"

namespace delta_attention {

const Kernel on_chip_kernel = {
    "v3_on_chip",
    "state on chip from first token to last, split over blocks that exchange sums every F tokens (V3)",
    DeviceType::cuda,
    true,
    5,
    on_chip::settings<PlainSum>,
    on_chip::unsupported<PlainSum>,
    on_chip::workspace<PlainSum>,
    [](const Launch& call) { on_chip::launch<PlainSum>(call, true); },
    on_chip::unrepeatable,
};

void launch_on_chip_without_decay(const Launch& call) { on_chip::launch<PlainSum>(call, false); }

}  // namespace delta_attention
