#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "api/settings.h"

namespace delta_attention::test {

/// Every combination of the values, as Execution::settings: "a=1,b=2", ...
inline std::vector<std::string> combinations(const std::vector<Setting>& settings) {
  std::vector<std::string> texts = {""};
  for (const Setting& setting : settings) {
    std::vector<std::string> longer;
    for (const std::string& text : texts) {
      for (const int value : setting.values) {
        longer.push_back(text + (text.empty() ? "" : ",") + setting.name + "=" + std::to_string(value));
      }
    }
    texts = longer;
  }
  return texts;
}

/// Whether one of a kernel's settings says into how many parts its sums are split: that decides the last bits, tiles and places in memory do not.
inline bool splits_sums(const std::vector<Setting>& settings) {
  return std::any_of(settings.begin(), settings.end(), [](const Setting& setting) { return std::string(setting.name) == "row_blocks"; });
}

}  // namespace delta_attention::test
