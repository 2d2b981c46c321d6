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

double distance(std::int64_t a, std::int64_t b) {
  const auto at_least_one = [](std::int64_t x) { return static_cast<double>(std::max<std::int64_t>(x, 1)); };
  return std::abs(std::log2(at_least_one(a) / at_least_one(b)));
}

/// How far a row is from a problem: the first number decides, a later one only between equals.
using Distance = std::array<double, 7>;

Distance distance(const TunedRow& row, const Problem& p, const DeviceProperties& device) {
  const std::int64_t tokens = p.cu_seqlens.present ? p.tokens / std::max<std::int64_t>(p.sequences, 1) : p.tokens;
  return {row.capability == device.capability ? 0.0 : 1.0,
          distance(key_tile(row.key_dim), key_tile(p.key_dim)),
          row.gate == p.gate ? 0.0 : 1.0,
          distance(row.key_dim, p.key_dim),
          distance(row.value_dim, p.value_dim),
          distance(row.chains, p.sequences * p.value_heads),
          distance(row.tokens, tokens)};
}

}  // namespace

TunedTable::TunedTable(const std::vector<TunedRow>& rows, const std::vector<const Kernel*>& kernels) {
  for (const Kernel* kernel : kernels) {
    KernelRows own = {kernel, {}};
    for (const TunedRow& row : rows) {
      if (std::string_view(kernel->name) != row.kernel) continue;
      own.entries.push_back({row, parse_settings(row.settings, kernel->name, kernel->settings())});
    }
    if (!own.entries.empty()) rows_.push_back(std::move(own));
  }
}

Settings TunedTable::find(const Kernel& kernel, const Problem& problem, const DeviceProperties& device) const {
  const auto own = std::find_if(rows_.begin(), rows_.end(), [&](const KernelRows& r) { return r.kernel == &kernel; });
  if (own == rows_.end()) return {};
  const Entry* nearest = nullptr;
  Distance least = {};
  for (const Entry& entry : own->entries) {
    if (entry.row.capability / 10 != device.capability / 10) continue;
    const Distance far = distance(entry.row, problem, device);
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
