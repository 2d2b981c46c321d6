#pragma once

// The inputs of `delta-attention error-growth`: regimes in which rounding errors are kept, forgotten or amplified.

#include <cstdint>
#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"
#include "device_memory.h"
#include "safetensors.h"

namespace delta_attention::cli {

struct Regime {
  const char* name;
  const char* preset;
  const char* description;
  bool long_run;  // cheap enough for a million tokens
};

const std::vector<Regime>& regimes();

struct RegimeSize {
  std::int64_t tokens = 0, heads = 1, dim = 32;  // H = HV = heads, K = V = dim
};

/// Inputs in CPU memory, one sequence, no outputs. q, k and v are rounded to `dtype`, and everything that depends on them is computed
/// from the rounded numbers; beta and log_decay are f32.
struct RegimeInputs {
  ForwardArgs args;
  std::vector<OwnedTensor> storage;
};

/// Equal seeds give equal numbers before rounding, whatever the dtype. The regime `activations` reads heads of `data` instead,
/// others for every `repeat`, and has their size.
RegimeInputs make_regime(const std::string& name, const RegimeSize& size, DType dtype, std::uint64_t seed, int repeat,
                         const SafetensorsFile& data);

}  // namespace delta_attention::cli
