#include "api/architectures.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace delta_attention {
namespace {

constexpr int kLowestCapability = 80;

/// One entry of the list.
struct Entry {
  int number = 0;      // 0: native, all, all-major
  char specific = 0;   // 'a', 'f' or none
  bool code = true, ptx = true;
};

Entry parse(std::string_view text) {
  Entry entry;
  const auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), entry.number);
  if (error != std::errc()) return entry;  // made for the GPUs at hand
  std::string_view suffix(rest, static_cast<std::size_t>(text.data() + text.size() - rest));
  if (!suffix.empty() && (suffix[0] == 'a' || suffix[0] == 'f')) {
    entry.specific = suffix[0];
    entry.ptx = false;
    return entry;
  }
  entry.code = suffix != "-virtual";
  entry.ptx = suffix != "-real";
  return entry;
}

bool code_runs_on(const Entry& entry, int capability) {
  if (entry.number == 0) return true;
  if (entry.specific == 'a') return capability == entry.number;
  return entry.code && capability / 10 == entry.number / 10 && capability >= entry.number;
}

bool ptx_runs_on(const Entry& entry, int capability) { return entry.ptx && capability >= entry.number; }

/// Calls visit(entry) for every entry.
template <class Visit>
void for_entries(std::string_view architectures, const Visit& visit) {
  while (!architectures.empty()) {
    const std::size_t end = std::min(architectures.find_first_of("; "), architectures.size());
    if (end > 0) visit(parse(architectures.substr(0, end)));
    architectures.remove_prefix(std::min(end + 1, architectures.size()));
  }
}

}  // namespace

bool runs_on(std::string_view architectures, int capability) { return code_for(architectures, capability) > 0; }

int code_for(std::string_view architectures, int capability) {
  if (capability < kLowestCapability) return 0;
  int code = 0, ptx = 0;
  for_entries(architectures, [&](const Entry& entry) {
    const int number = entry.number == 0 ? capability : entry.number;
    if (code_runs_on(entry, capability)) code = std::max(code, number);
    if (ptx_runs_on(entry, capability)) ptx = std::max(ptx, number);
  });
  return code > 0 ? code : ptx;
}

std::string_view built_architectures() {
#if defined(DELTA_ATTENTION_ARCHITECTURES)
  return DELTA_ATTENTION_ARCHITECTURES;
#else
  return "";
#endif
}

std::string missing_code_reason(const DeviceProperties& device) {
  if (device.code > 0) return "";
  return fmt::format(
      "this build holds CUDA code for {} and the kernels need compute capability 8.0 or later; {} has {}.{}",
      built_architectures(), device.name, device.capability / 10, device.capability % 10);
}

}  // namespace delta_attention
