#pragma once

// Problems with random numbers in the ranges of real models, for `verify` and `call`.

#include <cstdint>
#include <random>
#include <string>

#include "owned_call.h"

namespace delta_attention::cli {

struct ProblemSize {
  std::int64_t B = 1, T = 2048, H = 8, HV = 0, K = 128, V = 128;  // HV = 0: as H
};

struct RandomProblem {
  std::string recurrence = "gated_delta_net";
  ProblemSize size;
  DType dtype = DType::f32;  // of q, k, v and out; gates, beta and states are f32

  /// "kda bf16 B:1 T:300 H:2 HV:4 K:64 V:64"
  std::string text() const;
};

/// Keys of unit length, queries half along their key, values with a heavy tail, beta in (0, 1), a quarter of the decays strong;
/// final states asked for. In CPU memory.
OwnedCall draw_call(const RandomProblem& problem, std::mt19937_64& random);

}  // namespace delta_attention::cli
