#pragma once

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

}  // namespace delta_attention::test
