#pragma once

// The checked problem of the fused projection.

#include "delta_attention/fused_qkv.h"
#include "problem/problem.h"

namespace delta_attention {

struct FusedQkvProblem {
  std::int64_t batch = 0, tokens = 0, channels = 0;  // B, N, C
  std::int64_t heads = 0, key_heads = 0, head_dim = 0;

  InputOperand x, w, bias;  // (batch, token, channel), (channel, column), (column)
  OutputOperand q, k, v;    // (batch, token, head, channel of the head)

  DType dtype = DType::f32;
  Device device;

  std::int64_t rows() const { return batch * tokens; }
  DELTA_ATTENTION_HOST_DEVICE std::int64_t columns() const { return (heads + 2 * key_heads) * head_dim; }

  /// Where a column of the product belongs: its operand, head and channel.
  struct Place {
    const OutputOperand* operand;
    std::int64_t head, channel;
  };
  DELTA_ATTENTION_HOST_DEVICE Place place_of(std::int64_t column) const {
    const std::int64_t head = column / head_dim, channel = column % head_dim;
    if (head < heads) return {&q, head, channel};
    if (head < heads + key_heads) return {&k, head - heads, channel};
    return {&v, head - heads - key_heads, channel};
  }
};

}  // namespace delta_attention
