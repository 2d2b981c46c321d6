#pragma once

// What makes problems alike, for tables that know something of the problems that were measured and are asked about others.

#include <cstdint>
#include <vector>

#include "api/kernel.h"

namespace delta_attention {

/// Sizes as logarithms, which are taken once a row and once a call.
struct ProblemFeatures {
  int capability;  // DeviceProperties::capability
  DType dtype;
  Update update;
  Gate gate;
  double key_tile, key_dim, value_dim;
  double chains;  // sequences times value heads
  double tokens;  // of a sequence; their mean where sequences are packed

  ProblemFeatures(int capability, DType dtype, Update update, Gate gate, std::int64_t key_dim, std::int64_t value_dim, std::int64_t chains,
                  std::int64_t tokens);
  ProblemFeatures(const Problem& problem, const DeviceProperties& device);
};

/// Of entries with `features` the one nearest to what is asked by distance(features, features), the first of equals. Only those measured on
/// a device of the same generation count; null if there are none.
template <class Entry, class Distance>
const Entry* nearest(const std::vector<Entry>& entries, const ProblemFeatures& asked, const Distance& distance) {
  const Entry* found = nullptr;
  decltype(distance(asked, asked)) least = {};
  for (const Entry& entry : entries) {
    if (entry.features.capability / 10 != asked.capability / 10) continue;
    const auto far = distance(entry.features, asked);
    if (found == nullptr || far < least) {
      found = &entry;
      least = far;
    }
  }
  return found;
}

}  // namespace delta_attention
