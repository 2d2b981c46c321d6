#pragma once

#include <string>
#include <string_view>

#include "api/kernel.h"

namespace delta_attention {

/// Whether machine code or PTX built for `architectures` (CMAKE_CUDA_ARCHITECTURES, its entries parted by ";" or " ") runs on a
/// GPU of this compute capability. Machine code runs within its major version from its minor version up, an architecture-specific
/// target ("90a") on that exact one only; PTX runs on everything later.
bool runs_on(std::string_view architectures, int capability);

/// The compute capability that the code was made for which such a GPU would run: of machine code the latest, or else of PTX the latest;
/// `capability` itself where CMake chose the targets (native, all, all-major). 0 if there is none.
int code_for(std::string_view architectures, int capability);

/// "" if this build holds code for the device, else the reason that every CUDA kernel gives.
std::string missing_code_reason(const DeviceProperties& device);

/// The list this build was configured with; empty without CUDA.
std::string_view built_architectures();

}  // namespace delta_attention
