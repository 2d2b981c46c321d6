#pragma once

// Settings found by `delta-attention tune`, compiled in. For a problem the nearest measured one on a device of the same
// generation answers; kernels that were not tuned there follow their own rules.

#include <vector>

#include "api/kernel.h"
#include "api/problem_features.h"

namespace delta_attention {

/// One tuned problem. Rows are written by `delta-attention tune` (api/tuned/*.inc).
struct TunedRow {
  const char* kernel;
  int capability;  // DeviceProperties::capability
  Gate gate;
  std::int64_t key_dim;
  std::int64_t value_dim;
  std::int64_t tokens;   // of a sequence
  std::int64_t chains;   // sequences times value heads
  const char* settings;  // "name=int,name=int"
};

class TunedTable {
 public:
  /// Rows of kernels that are not among `kernels` are left out. Throws InvalidArgument for a setting that its kernel does not
  /// have.
  TunedTable(const std::vector<TunedRow>& rows, const std::vector<const Kernel*>& kernels);

  /// The settings of the nearest row: of this kernel, for a device of the same major compute capability. Empty if there is none.
  Settings find(const Kernel& kernel, const Problem& problem, const DeviceProperties& device) const;

 private:
  struct Entry {
    ProblemFeatures features;
    Settings settings;
  };
  struct KernelRows {
    const Kernel* kernel;
    std::vector<Entry> entries;
  };
  std::vector<KernelRows> rows_;
};

/// The table that this build carries.
const TunedTable& tuned_table();

}  // namespace delta_attention
