#include "api/architectures.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace delta_attention {
namespace {

constexpr int kLowestCapability = 80;

bool entry_runs_on(std::string_view entry, int capability) {
  int number = 0;
  const auto [rest, error] = std::from_chars(entry.data(), entry.data() + entry.size(), number);
  if (error != std::errc()) return true;  // native, all, all-major: made for the GPUs at hand
  const std::string_view suffix(rest, static_cast<std::size_t>(entry.data() + entry.size() - rest));
  const bool specific = !suffix.empty() && (suffix[0] == 'a' || suffix[0] == 'f');
  if (specific) return suffix[0] == 'a' ? capability == number : capability / 10 == number / 10 && capability >= number;
  const bool code = suffix != "-virtual" && capability / 10 == number / 10 && capability >= number;
  const bool ptx = suffix != "-real" && capability >= number;
  return code || ptx;
}

}  // namespace

bool runs_on(std::string_view architectures, int capability) {
  if (capability < kLowestCapability) return false;
  while (!architectures.empty()) {
    const std::size_t end = std::min(architectures.find_first_of("; "), architectures.size());
    if (end > 0 && entry_runs_on(architectures.substr(0, end), capability)) return true;
    architectures.remove_prefix(std::min(end + 1, architectures.size()));
  }
  return false;
}

std::string_view built_architectures() {
#if defined(DELTA_ATTENTION_ARCHITECTURES)
  return DELTA_ATTENTION_ARCHITECTURES;
#else
  return "";
#endif
}

std::string missing_code_reason(const DeviceProperties& device) {
  if (runs_on(built_architectures(), device.capability)) return "";
  return fmt::format(
      "this build holds CUDA code for {} and the kernels need compute capability 8.0 or later; {} has {}.{}",
      built_architectures(), device.name, device.capability / 10, device.capability % 10);
}

}  // namespace delta_attention
