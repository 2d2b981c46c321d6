#pragma once

// Settings: the numbers a kernel lets others choose (tile sizes, flush intervals, ...). They change speed, and rounding at most.
// A kernel lists its own in its descriptor and asks for each with the value of its own heuristic as the fallback.

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention {

/// Chosen values by name. Names point to the kernel's own literals, so that copies cost no allocation.
class Settings {
 public:
  /// The value chosen for `name`, or `otherwise` if nobody chose one.
  int get(std::string_view name, int otherwise) const;

  bool has(std::string_view name) const;

  /// Chooses a value; a later choice replaces an earlier one. `name` must outlive this object.
  void set(const char* name, int value);

  /// Takes every choice of `other` over its own.
  void override_with(const Settings& other);

  bool empty() const { return count_ == 0; }
  std::size_t size() const { return count_; }

  /// "run_tokens=64,slice=16": the form of Execution::settings.
  std::string text() const;

 private:
  struct Choice {
    const char* name = nullptr;
    int value = 0;
  };
  static constexpr std::size_t kMost = 12;
  std::array<Choice, kMost> choices_;
  std::size_t count_ = 0;
};

/// Reads "name=int,name=int" for a kernel that has the settings `known`. Throws InvalidArgument("settings", ...) on anything
/// else: malformed text, a name or value that the kernel does not have, a name given twice.
Settings parse_settings(std::string_view text, const char* kernel, const std::vector<Setting>& known);

}  // namespace delta_attention
