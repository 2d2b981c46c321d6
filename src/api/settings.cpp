#include "api/settings.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <stdexcept>

namespace delta_attention {
namespace {

/// "'v3_on_chip' with run_tokens=8|16, slice=16|32".
std::string what_it_has(const char* kernel, const std::vector<Setting>& known) {
  if (known.empty()) return fmt::format("\"\": the kernel '{}' has no settings", kernel);
  std::string list;
  for (const Setting& setting : known) {
    list += fmt::format("{}{}={}", list.empty() ? "" : ", ", setting.name, fmt::join(setting.values, "|"));
  }
  return fmt::format("name=int,name=int for the kernel '{}': {}", kernel, list);
}

/// Splits at the first `separator`; what follows it is left in `text`.
std::string_view take_until(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view head = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return head;
}

bool parse_int(std::string_view text, int& value) {
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  return error == std::errc() && stop == end;
}

}  // namespace

int Settings::get(std::string_view name, int otherwise) const {
  for (std::size_t i = 0; i < count_; ++i) {
    if (name == choices_[i].name) return choices_[i].value;
  }
  return otherwise;
}

bool Settings::has(std::string_view name) const {
  return std::any_of(choices_.begin(), choices_.begin() + count_, [&](const Choice& c) { return name == c.name; });
}

void Settings::set(const char* name, int value) {
  std::size_t i = 0;
  while (i < count_ && std::string_view(name) != choices_[i].name) ++i;
  if (i == kMost) throw std::length_error("more settings than a kernel may have");
  choices_[i] = {name, value};
  count_ = std::max(count_, i + 1);
}

void Settings::override_with(const Settings& other) {
  for (std::size_t i = 0; i < other.count_; ++i) set(other.choices_[i].name, other.choices_[i].value);
}

std::string Settings::text() const {
  std::string text;
  for (std::size_t i = 0; i < count_; ++i) {
    text += fmt::format("{}{}={}", i == 0 ? "" : ",", choices_[i].name, choices_[i].value);
  }
  return text;
}

Settings parse_settings(std::string_view text, const char* kernel, const std::vector<Setting>& known) {
  const auto refuse = [&](const std::string& got) {
    throw InvalidArgument("settings", what_it_has(kernel, known), got);
  };
  Settings settings;
  if (text.empty()) return settings;
  if (text.back() == ',') refuse(fmt::format("\"{}\"", text));
  while (!text.empty()) {
    const std::string_view pair = take_until(text, ',');
    std::string_view number = pair;
    const std::string_view name = take_until(number, '=');
    int value = 0;
    if (!parse_int(number, value)) refuse(fmt::format("\"{}\"", pair));
    const auto setting =
        std::find_if(known.begin(), known.end(), [&](const Setting& other) { return name == other.name; });
    if (setting == known.end()) refuse(fmt::format("the unknown name '{}'", name));
    if (std::find(setting->values.begin(), setting->values.end(), value) == setting->values.end()) {
      refuse(fmt::format("{}={}", name, value));
    }
    if (settings.has(name)) refuse(fmt::format("'{}' twice", name));
    settings.set(setting->name, value);
  }
  return settings;
}

}  // namespace delta_attention
