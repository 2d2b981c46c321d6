#include "machine.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <cstdlib>
#include <ctime>
#include <fstream>

namespace delta_attention::cli {

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const std::size_t colon = line.find(": ");
    if (line.rfind("model name", 0) == 0 && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string commit() {
  const char* value = std::getenv("DELTA_ATTENTION_COMMIT");
  return value != nullptr && *value != '\0' ? value : "unknown";
}

std::string now() { return fmt::format("{:%Y-%m-%dT%H:%M:%S+00:00}", fmt::gmtime(std::time(nullptr))); }

}  // namespace delta_attention::cli
