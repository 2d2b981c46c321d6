#include "api/tuned_table.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

namespace delta_attention {
namespace {

/// `delta-attention tune` measures f32; what else a row does not tell is the same for all rows, and so decides nothing.
ProblemFeatures features_of(const TunedRow& row) {
  return {row.capability, DType::f32, Update::delta, row.gate, row.key_dim, row.value_dim, row.chains, row.tokens};
}

/// How far a row is from a problem: the first number decides, a later one only between equals. Settings carry over within a tile of K,
/// hardly beyond.
std::array<double, 7> distance(const ProblemFeatures& a, const ProblemFeatures& b) {
  return {a.capability == b.capability ? 0.0 : 1.0,
          std::abs(a.key_tile - b.key_tile),
          a.gate == b.gate ? 0.0 : 1.0,
          std::abs(a.key_dim - b.key_dim),
          std::abs(a.value_dim - b.value_dim),
          std::abs(a.chains - b.chains),
          std::abs(a.tokens - b.tokens)};
}

}  // namespace

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
  const Entry* row = nearest(own->entries, ProblemFeatures(problem, device), distance);
  return row == nullptr ? Settings() : row->settings;
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
