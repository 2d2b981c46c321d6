#pragma once

// The checked problem: what every kernel is handed. Named operands with 64-bit strides, sizes, and the options as plain
// values, in one trivially copyable struct, so that a CUDA kernel takes it by value. All arithmetic on shapes that kernels
// share lives here and is tested on its own.

#include <cstdint>

#include "delta_attention/delta_attention.h"
#include "problem/element.h"
#include "problem/host_device.h"

namespace delta_attention {

/// One operand in memory. The order of the indices of offset() is the order of axes in ForwardArgs.
template <class Pointer>
struct BasicOperand {
  Pointer data = nullptr;
  DType dtype = DType::f32;
  bool present = false;
  std::int64_t strides[kMaxRank] = {};

  DELTA_ATTENTION_HOST_DEVICE std::int64_t offset(std::int64_t i, std::int64_t j = 0, std::int64_t k = 0,
                                                  std::int64_t l = 0) const {
    return i * strides[0] + j * strides[1] + k * strides[2] + l * strides[3];
  }
  DELTA_ATTENTION_HOST_DEVICE float load(std::int64_t offset) const { return load_element(data, dtype, offset); }
};

struct InputOperand : BasicOperand<const void*> {};

struct OutputOperand : BasicOperand<void*> {
  DELTA_ATTENTION_HOST_DEVICE void store(std::int64_t offset, float value) const {
    store_element(data, dtype, offset, value);
  }
};

/// Tokens [begin, begin + length) of one batch row.
struct Sequence {
  std::int64_t batch = 0;
  std::int64_t begin = 0;
  std::int64_t length = 0;
};

struct Problem {
  std::int64_t batch = 0;        // B
  std::int64_t tokens = 0;       // T: of each batch row, or of all packed sequences together
  std::int64_t sequences = 0;    // N
  std::int64_t heads = 0;        // H
  std::int64_t value_heads = 0;  // HV
  std::int64_t key_dim = 0;      // K
  std::int64_t value_dim = 0;    // V

  InputOperand q, k, v, log_decay, beta;           // (batch, token, head, feature)
  InputOperand initial_state, initial_normalizer;  // (sequence, value head, key channel, value column)
  InputOperand cu_seqlens;                         // (sequence)
  InputOperand a_log, dt_bias;                     // (value head, key channel)
  OutputOperand out, final_state, final_normalizer;
  OutputOperand intermediate_states;  // (intermediate state, value head, key channel, value column)
  std::int64_t state_interval = 0;    // tokens; 1 or more where intermediate_states is present

  Update update = Update::additive;
  Gate gate = Gate::none;  // none also where a gated recurrence came without log_decay
  bool normalize = false;
  bool qk_l2norm = false;
  bool has_f64 = false;  // some operand is f64
  BetaSpace beta_space = BetaSpace::value;
  GateSpace gate_space = GateSpace::log;
  float gate_lower_bound = 0.0f;
  float scale = 1.0f;

  DType dtype = DType::f32;  // of q, k, v and out
  Device device;

  /// The query/key head that a value head reads.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t key_head(std::int64_t value_head) const {
    return value_head / (value_heads / heads);
  }

  /// Entry `index` of cu_seqlens, kept inside [0, T]: offsets in device memory are not checked before launch, and a wrong
  /// one must not become a wild access.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t sequence_offset(std::int64_t index) const {
    const std::int64_t at = index * cu_seqlens.strides[0];
    const std::int64_t offset = cu_seqlens.dtype == DType::i32
                                    ? static_cast<std::int64_t>(static_cast<const std::int32_t*>(cu_seqlens.data)[at])
                                    : static_cast<const std::int64_t*>(cu_seqlens.data)[at];
    return offset < 0 ? 0 : (offset > tokens ? tokens : offset);
  }

  /// Sequence n. With cu_seqlens this reads memory of the problem's device.
  DELTA_ATTENTION_HOST_DEVICE Sequence sequence(std::int64_t n) const {
    if (!cu_seqlens.present) return {n, 0, tokens};
    const std::int64_t begin = sequence_offset(n);
    const std::int64_t end = sequence_offset(n + 1);
    return {0, begin, end > begin ? end - begin : 0};
  }

  /// How many intermediate states a sequence has.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t intermediate_count(const Sequence& sequence) const {
    return intermediate_states.present ? sequence.length / state_interval : 0;
  }

  /// How many intermediate states there is room for: as many as all sequences have, or more if they are packed. Wrong offsets in
  /// device memory can ask for more; nothing may be written past this.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t intermediate_capacity() const {
    return intermediate_states.present ? batch * (tokens / state_interval) : 0;
  }

  /// Elements of all states together.
  DELTA_ATTENTION_HOST_DEVICE std::int64_t state_elements() const {
    return sequences * value_heads * key_dim * value_dim;
  }
};

DELTA_ATTENTION_HOST_DEVICE std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

}  // namespace delta_attention
