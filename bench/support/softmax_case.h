#pragma once

// One softmax problem of a benchmark, with its operands laid out on the GPU.

#include <cstdint>
#include <memory>
#include <string>

#include "delta_attention/softmax_attention.h"
#include "support/operands.h"
#include "support/traffic.h"

namespace bench {

struct SoftmaxCase {
  delta_attention::DType dtype = delta_attention::DType::f32;
  std::int64_t batch = 2, queries = 1024, keys = 1024, heads = 8, key_heads = 8, dim = 64;
  bool causal = false;
  std::int64_t page_size = 0;  // 0: keys and values are contiguous

  /// "B:2 Nq:1024 Nkv:1024 H:8 Hkv:8 D:64 mask:full"
  std::string name() const;
  SoftmaxShape shape() const;
};

/// Arguments good for asking which kernels would run; nothing may be launched on them.
delta_attention::SoftmaxArgs shape_only_args(const SoftmaxCase& c);

/// Normal q, k and v, pages in scattered order. Checked are the first, the middle and the last row of the first and the last head.
std::unique_ptr<Operands> softmax_operands(const SoftmaxCase& c, std::uint64_t seed);

}  // namespace bench
