#include "api/tuned_table.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace delta_attention {
namespace {

/// Kernels hold K rows in tiles of 32, 64, 128, ... : settings carry over within a tile, hardly beyond.
std::int64_t key_tile(std::int64_t key_dim) {
  std::int64_t tile = 32;
  while (tile < key_dim) tile *= 2;
  return tile;
}

double logarithm(std::int64_t x) { return std::log2(static_cast<double>(std::max<std::int64_t>(x, 1))); }

TunedFeatures features_of(const TunedRow& row) {
  return {row.capability, row.gate, row.key_dim, row.value_dim, row.chains, row.tokens};
}

TunedFeatures features_of(const Problem& p, const DeviceProperties& device) {
  const std::int64_t tokens = p.cu_seqlens.present ? p.tokens / std::max<std::int64_t>(p.sequences, 1) : p.tokens;
  return {device.capability, p.gate, p.key_dim, p.value_dim, p.sequences * p.value_heads, tokens};
}

/// How far a row is from a problem: the first number decides, a later one only between equals.
using Distance = std::array<double, 7>;

Distance distance(const TunedFeatures& a, const TunedFeatures& b) {
  return {a.capability == b.capability ? 0.0 : 1.0,
          std::abs(a.key_tile - b.key_tile),
          a.gate == b.gate ? 0.0 : 1.0,
          std::abs(a.key_dim - b.key_dim),
          std::abs(a.value_dim - b.value_dim),
          std::abs(a.chains - b.chains),
          std::abs(a.tokens - b.tokens)};
}

}  // namespace

TunedFeatures::TunedFeatures(int capability, Gate gate, std::int64_t key_dim, std::int64_t value_dim, std::int64_t chains,
                             std::int64_t tokens)
    : capability(capability),
      gate(gate),
      key_tile(logarithm(delta_attention::key_tile(key_dim))),
      key_dim(logarithm(key_dim)),
      value_dim(logarithm(value_dim)),
      chains(logarithm(chains)),
      tokens(logarithm(tokens)) {}

TunedTable::TunedTable(const std::vector<TunedRow>& rows, const std::vector<const Kernel*>& kernels) {
  for (const Kernel* kernel : kernels) {
    KernelRows own = {kernel, {}};
    for (const TunedRow& row : rows) {
      if (std::string_view(kernel->name) != row.kernel) continue;
      own.entries.push_back({features_of(row), parse_settings(row.settings, kernel->name, kernel->settings())});
    }
    if (!own.entries.empty()) rows_.push_back(std::move(own));
  }
}

Settings TunedTable::find(const Kernel& kernel, const Problem& problem, const DeviceProperties& device) const {
  const auto own = std::find_if(rows_.begin(), rows_.end(), [&](const KernelRows& r) { return r.kernel == &kernel; });
  if (own == rows_.end()) return {};
  const TunedFeatures asked = features_of(problem, device);
  const Entry* nearest = nullptr;
  Distance least = {};
  for (const Entry& entry : own->entries) {
    if (entry.features.capability / 10 != device.capability / 10) continue;
    const Distance far = distance(entry.features, asked);
    if (nearest == nullptr || far < least) {
      nearest = &entry;
      least = far;
    }
  }
  return nearest == nullptr ? Settings() : nearest->settings;
}

const TunedTable& tuned_table() {
  static const TunedTable table(
      {
#include "api/tuned/nvidia_h200.inc"
      },
      kernels());
  return table;
}

}  // namespace delta_attention
