#include "api/problem_features.h"

#include <algorithm>
#include <cmath>

namespace delta_attention {
namespace {

/// Kernels hold K rows in tiles of 32, 64, 128, ...
std::int64_t tile_of(std::int64_t key_dim) {
  std::int64_t tile = 32;
  while (tile < key_dim) tile *= 2;
  return tile;
}

double logarithm(std::int64_t x) { return std::log2(static_cast<double>(std::max<std::int64_t>(x, 1))); }

std::int64_t tokens_of_a_sequence(const Problem& p) {
  return p.cu_seqlens.present ? p.tokens / std::max<std::int64_t>(p.sequences, 1) : p.tokens;
}

}  // namespace

ProblemFeatures::ProblemFeatures(int capability, DType dtype, Update update, Gate gate, std::int64_t key_dim, std::int64_t value_dim,
                                 std::int64_t chains, std::int64_t tokens)
    : capability(capability),
      dtype(dtype),
      update(update),
      gate(gate),
      key_tile(logarithm(tile_of(key_dim))),
      key_dim(logarithm(key_dim)),
      value_dim(logarithm(value_dim)),
      chains(logarithm(chains)),
      tokens(logarithm(tokens)) {}

ProblemFeatures::ProblemFeatures(const Problem& p, const DeviceProperties& device)
    : ProblemFeatures(device.capability, p.dtype, p.update, p.gate, p.key_dim, p.value_dim, p.sequences * p.value_heads,
                      tokens_of_a_sequence(p)) {}

}  // namespace delta_attention
