#pragma once

// A roofline model of the softmax kernels: the bytes that a kernel moves between device memory and chip, its arithmetic, and the time
// that the slower of both takes on a device. It counts what a kernel asks for. Hits in L2 are not modelled: where keys and values stay
// there, measured times are below the prediction. Nor are exponentials, launches and idle multiprocessors, which put them above.

#include <cstdint>
#include <optional>
#include <string>

namespace bench {

/// [B,Nq,H,D] on [B,Nkv,Hkv,D]; causal counts from the bottom right.
struct SoftmaxShape {
  std::int64_t batch = 1, queries = 0, keys = 0, heads = 1, key_heads = 1, dim = 0;
  std::int64_t element_bytes = 4;
  bool causal = false;
};

struct Traffic {
  double bytes = 0.0;
  double flops = 0.0;  // of both products: 2 D each time that a pair is scored or its value weighed
  bool tensor_cores = false;
};

/// What a device was measured to do per second.
struct Ceilings {
  double bytes = 0.0, f32_flops = 0.0, bf16_mma_flops = 0.0;
};

/// Pairs of a row and a key that it sees, of one head of one sequence.
double visible_pairs(const SoftmaxShape& shape);

/// The model of a kernel; none for a kernel that it does not know.
std::optional<Traffic> softmax_traffic(const std::string& kernel, const SoftmaxShape& shape);

/// The roofline: memory and arithmetic overlap, and the slower one sets the time.
double predicted_seconds(const Traffic& traffic, const Ceilings& ceilings);

}  // namespace bench
