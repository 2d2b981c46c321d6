#pragma once

// One benchmark case: a recurrence on one shape, with its operands laid out. A case knows its part of the benchmark's
// name, the bytes that it must move at the very least and the arithmetic of the recurrence.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace bench {

using delta_attention::Device;
using delta_attention::DType;
using delta_attention::ForwardArgs;

/// How fast the state forgets. `fixed` is retention's constant per head; ungated recurrences have `none`.
enum class Decay { none, fixed, strong, weak };

struct Case {
  std::string preset;
  DType dtype = DType::f32;
  Decay decay = Decay::none;
  std::int64_t batch = 1;
  std::int64_t tokens = 2048;
  std::int64_t heads = 8;
  std::int64_t value_heads = 8;
  std::int64_t dim = 128;             // K and V
  std::vector<std::int64_t> lengths;  // packed sequences; empty: every batch row is one sequence

  /// What a model's projections hand over: beta and gate are logits, which have the dtype of q. Sigmoid, gate and the l2norm of q and k
  /// are part of the call. Bounded gates by channel (KDA), softplus gates by head (Gated DeltaNet).
  bool fused = false;
  bool initial_state = false, final_state = true;

  delta_attention::Recurrence recurrence() const;
  std::int64_t sequences() const;
  std::vector<std::int64_t> offsets() const;  // cu_seqlens of a packed case

  std::int64_t gates_per_head() const;                              // 0 without gates
  DType logit_dtype() const { return fused ? dtype : DType::f32; }  // of gates and beta

  /// "delta_forward/kda/<kernel>/f32/B:1 T:2048 H:8 HV:8 K:128 V:128 N:1 gate:strong"
  std::string name(const std::string& kernel, const std::string& program = "delta_forward") const;
};

/// Every operand of a call, inputs first.
enum Operand { kQ, kK, kV, kLogDecay, kBeta, kALog, kDtBias, kInitialState, kCuSeqlens, kOut, kFinalState, kOperands };
using Sizes = std::array<std::size_t, kOperands>;
using Addresses = std::array<void*, kOperands>;

/// Bytes of every operand; 0 for one that the case does not have. States are f32, gates and beta as well unless they are fused.
Sizes operand_sizes(const Case& c);

/// The least that the call moves: each input read once, each output written once.
double least_bytes(const Case& c);

/// Operations of the recurrence token by token: what it asks for, whatever a kernel spends on top.
double recurrence_flops(const Case& c);

ForwardArgs make_args(const Case& c, const Addresses& addresses, Device device);

/// Arguments good for asking which kernels would run; nothing may be launched on them. Packed cases need CPU offsets.
ForwardArgs shape_only_args(const Case& c, Device device, const std::vector<std::int32_t>& cu_seqlens);

}  // namespace bench
