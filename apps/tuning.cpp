#include "tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "delta_attention/error.h"
#include "errors.h"
#include "operands.h"

namespace delta_attention::cli {
namespace {

using nlohmann::ordered_json;

/// A candidate whose first time is this much behind the best is not timed again: noise is a few per cent. The warm-up alone
/// rules out what is further behind; it also pays for cold caches and for the launch.
constexpr double kSlow = 1.25, kVerySlow = 1.5, kLaunchUs = 50.0;
constexpr int kRuns = 5;
constexpr double kNever = std::numeric_limits<double>::infinity();

constexpr const char* kStatusNames[] = {"ok", "slow", "wrong", "failed"};

const char* name_of(TuneStatus status) { return kStatusNames[static_cast<int>(status)]; }

TuneStatus status_named(const std::string& text) {
  const auto found = std::find(std::begin(kStatusNames), std::end(kStatusNames), text);
  if (found == std::end(kStatusNames)) throw BadInput("unknown status " + text);
  return static_cast<TuneStatus>(found - std::begin(kStatusNames));
}

std::string key_of(const std::string& device, const TuneCandidate& c) {
  const TuneProblem& p = c.problem;
  return fmt::format("{}|{}|{}|{}|{}|{}|{}|{}", device, c.kernel, p.recurrence, p.D, p.B, p.T, p.H, c.settings);
}

ordered_json json_of(const TuneRecord& record) {
  const TuneProblem& p = record.candidate.problem;
  return {{"device", record.device},
          {"kernel", record.candidate.kernel},
          {"recurrence", p.recurrence},
          {"D", p.D},
          {"B", p.B},
          {"T", p.T},
          {"H", p.H},
          {"settings", record.candidate.settings},
          {"status", name_of(record.status)},
          {"us", record.us},
          {"error", record.error},
          {"seconds", record.seconds},
          {"reason", record.reason}};
}

/// JSON has no NaN and writes null.
double number(const ordered_json& value) {
  return value.is_null() ? std::numeric_limits<double>::quiet_NaN() : value.get<double>();
}

TuneRecord record_of(const ordered_json& json) {
  TuneRecord record;
  TuneProblem& p = record.candidate.problem;
  json.at("device").get_to(record.device);
  json.at("kernel").get_to(record.candidate.kernel);
  json.at("recurrence").get_to(p.recurrence);
  json.at("D").get_to(p.D);
  json.at("B").get_to(p.B);
  json.at("T").get_to(p.T);
  json.at("H").get_to(p.H);
  json.at("settings").get_to(record.candidate.settings);
  record.status = status_named(json.at("status").get<std::string>());
  record.us = number(json.at("us"));
  record.error = number(json.at("error"));
  record.seconds = number(json.at("seconds"));
  json.at("reason").get_to(record.reason);
  return record;
}

std::string text_of_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError(fmt::format("{}: cannot be read", path));
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Whether a line of a log may start like this.
bool is_cut_off_line(const std::string& text) {
  const std::string start = "{\"device\":";
  const std::size_t length = std::min(text.size(), start.size());
  return text.compare(0, length, start, 0, length) == 0;
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The library's bar for f32 kernels on contractive input: 2e-6 sqrt(K).
double error_limit(std::int64_t key_dim) { return 2e-6 * std::sqrt(static_cast<double>(key_dim)); }

bool runs(const TuneRecord& record) { return record.status == TuneStatus::ok || record.status == TuneStatus::slow; }

class Sweep {
 public:
  Sweep(const TunePlan& plan, TuneBench& bench, TuneLog& log, const TuneEvents& events)
      : plan_(plan), bench_(bench), log_(log), events_(events) {
    std::sort(plan_.T.begin(), plan_.T.end());
    total_ = static_cast<double>(plan_.D.size() * plan_.recurrences.size() * plan_.B.size() * plan_.T.size() *
                                 plan_.kernels.size());
    for (const TuneRecord& record : log.records()) {
      if (record.device == plan.device && record.status != TuneStatus::failed) {
        errors_[check_key(record.candidate)] = record.error;
      }
    }
  }

  void run() {
    for (std::int64_t D : plan_.D) {
      for (const std::string& recurrence : plan_.recurrences) {
        for (std::int64_t B : plan_.B) run_lengths({recurrence, D, B, 0, plan_.H});
      }
    }
  }

 private:
  void run_lengths(TuneProblem problem) {
    std::vector<std::vector<std::string>> candidates;
    for (const TunedKernel& kernel : plan_.kernels) candidates.push_back(combinations(kernel.settings));
    for (std::int64_t T : plan_.T) {
      problem.T = T;
      for (std::size_t i = 0; i < plan_.kernels.size(); ++i) {
        candidates[i] = run_kernel(problem, plan_.kernels[i].name, candidates[i]);
        events_.progress(++done_ / total_);
      }
    }
  }

  /// Returns the fastest candidates.
  std::vector<std::string> run_kernel(const TuneProblem& problem, const std::string& kernel,
                                      const std::vector<std::string>& settings) {
    TuneOutcome outcome;
    outcome.problem = problem;
    outcome.kernel = kernel;
    std::vector<const TuneRecord*> ran;
    outcome.now = measure({problem, kernel, ""}, nullptr, outcome);
    for (std::size_t i = 0; i < settings.size(); ++i) {
      const TuneRecord* record = measure({problem, kernel, settings[i]}, outcome.best, outcome);
      events_.progress((done_ + static_cast<double>(i + 1) / static_cast<double>(settings.size())) / total_);
      if (record == nullptr || !runs(*record)) continue;
      ran.push_back(record);
      const bool better = outcome.best == nullptr || record->us < outcome.best->us;
      if (better && record->status == TuneStatus::ok) outcome.best = record;
    }
    events_.outcome(outcome);
    std::stable_sort(ran.begin(), ran.end(), [](const TuneRecord* a, const TuneRecord* b) { return a->us < b->us; });
    if (ran.size() > static_cast<std::size_t>(plan_.keep)) ran.resize(static_cast<std::size_t>(plan_.keep));
    std::vector<std::string> fastest;
    for (const TuneRecord* record : ran) fastest.push_back(record->candidate.settings);
    return fastest;
  }

  /// From the log, or measured; null if the kernel refuses.
  const TuneRecord* measure(const TuneCandidate& candidate, const TuneRecord* best, TuneOutcome& outcome) {
    const TuneRecord* record = log_.find(plan_.device, candidate);
    if (record == nullptr) {
      if (!bench_.refusal(candidate).empty()) return nullptr;
      record = &measure_now(candidate, best);
    }
    ++outcome.tried;
    outcome.wrong += record->status == TuneStatus::wrong;
    outcome.failed += record->status == TuneStatus::failed;
    outcome.seconds += record->seconds;
    outcome.slowest_seconds = std::max(outcome.slowest_seconds, record->seconds);
    return record;
  }

  const TuneRecord& measure_now(const TuneCandidate& candidate, const TuneRecord* best) {
    const auto begin = std::chrono::steady_clock::now();
    TuneRecord record;
    record.device = plan_.device;
    record.candidate = candidate;
    const auto add = [&]() -> const TuneRecord& {
      record.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      return log_.add(record);
    };
    try {
      check_and_time(record, best);
    } catch (const Unsupported& error) {  // the check's problem, which is not this one
      record.status = TuneStatus::failed;
      record.reason = error.what();
    } catch (const OutOfMemory& error) {
      record.status = TuneStatus::failed;
      record.reason = error.what();
    } catch (const CudaError& error) {
      // The device may be unusable from here on. The log remembers the culprit, and the next run passes it by.
      record.status = TuneStatus::failed;
      record.reason = error.what();
      add();
      throw;
    }
    return add();
  }

  void check_and_time(TuneRecord& record, const TuneRecord* best) {
    const std::int64_t D = record.candidate.problem.D;
    record.error = checked_error(record.candidate);
    if (!(record.error <= error_limit(D))) {  // also when it is NaN
      record.status = TuneStatus::wrong;
      record.reason = fmt::format("relative error {:.1e}, more than {:.1e}", record.error, error_limit(D));
      return;
    }
    const double give_up = best == nullptr ? kNever : kVerySlow * best->us + kLaunchUs;
    record.us = bench_.times_us(record.candidate, 1, give_up).front();
    if (best != nullptr && record.us > kSlow * best->us) {
      record.status = TuneStatus::slow;
      return;
    }
    record.us = median(bench_.times_us(record.candidate, kRuns, kNever));
  }

  /// T and B do not change what is computed, so one check serves all of them.
  static std::string check_key(TuneCandidate candidate) {
    candidate.problem.B = candidate.problem.T = 0;
    return key_of("", candidate);
  }

  double checked_error(const TuneCandidate& candidate) {
    const std::string key = check_key(candidate);
    const auto found = errors_.find(key);
    return found != errors_.end() ? found->second : errors_[key] = bench_.error(candidate);
  }

  TunePlan plan_;
  TuneBench& bench_;
  TuneLog& log_;
  const TuneEvents& events_;
  std::map<std::string, double> errors_;
  double total_ = 0.0, done_ = 0.0;
};

/// The fastest of each kernel and problem, in the order in which the log met them.
std::vector<const TuneRecord*> winners(const TuneLog& log, const std::string& device) {
  std::vector<const TuneRecord*> best;
  std::map<std::string, std::size_t> place;
  for (const TuneRecord& record : log.records()) {
    if (record.device != device || record.candidate.settings.empty() || record.status != TuneStatus::ok) continue;
    TuneCandidate any = record.candidate;
    any.settings.clear();
    const auto [at, is_new] = place.emplace(key_of(device, any), best.size());
    if (is_new) {
      best.push_back(&record);
    } else if (record.us < best[at->second]->us) {
      best[at->second] = &record;
    }
  }
  return best;
}

const char* gate_text(Gate gate) {
  switch (gate) {
    case Gate::scalar: return "Gate::scalar";
    case Gate::channel: return "Gate::channel";
    case Gate::none: break;
  }
  return "Gate::none";
}

}  // namespace

TuneLog::TuneLog(const std::string& path) : path_(path) {
  if (std::filesystem::exists(path)) read();
  file_.open(path, std::ios::app);
  if (!file_) throw IoError(fmt::format("{}: cannot be written", path));
}

void TuneLog::read() {
  const std::string text = text_of_file(path_);
  std::size_t begin = 0;
  int line = 1;
  const auto refuse = [&](const char* why) {
    throw BadInput(fmt::format("{}: line {} is not a measurement of `delta-attention tune`: {}", path_, line, why));
  };
  for (std::size_t end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1, ++line) {
    try {
      remember(record_of(ordered_json::parse(text.substr(begin, end - begin))));
    } catch (const std::exception& error) {
      refuse(error.what());
    }
  }
  if (!is_cut_off_line(text.substr(begin))) refuse("it has no end");
  std::filesystem::resize_file(path_, begin);
}

const TuneRecord* TuneLog::find(const std::string& device, const TuneCandidate& candidate) const {
  const auto found = by_key_.find(key_of(device, candidate));
  return found == by_key_.end() ? nullptr : found->second;
}

const TuneRecord& TuneLog::add(TuneRecord record) {
  if (file_.is_open()) {
    file_ << json_of(record).dump() << '\n' << std::flush;
    if (!file_) throw IoError(fmt::format("{}: cannot be written", path_));
  }
  remember(std::move(record));
  return records_.back();
}

void TuneLog::remember(TuneRecord record) {
  records_.push_back(std::move(record));
  by_key_[key_of(records_.back().device, records_.back().candidate)] = &records_.back();
}

std::vector<std::string> combinations(const std::vector<Setting>& settings) {
  std::vector<std::string> texts = {""};
  for (const Setting& setting : settings) {
    std::vector<std::string> longer;
    for (const std::string& text : texts) {
      for (int value : setting.values) {
        longer.push_back(fmt::format("{}{}{}={}", text, text.empty() ? "" : ",", setting.name, value));
      }
    }
    texts = std::move(longer);
  }
  return texts;
}

void sweep(const TunePlan& plan, TuneBench& bench, TuneLog& log, const TuneEvents& events) {
  Sweep(plan, bench, log, events).run();
}

std::string tuned_rows(const TuneLog& log, const std::string& device, int capability) {
  std::string text = fmt::format(
      "// Settings measured by `delta-attention tune` on {}, one row a problem (TunedRow, api/tuned_table.h):\n"
      "// kernel, compute capability, gate, K, V, tokens, sequences times value heads, settings.\n",
      device);
  for (const TuneRecord* record : winners(log, device)) {
    const TuneProblem& p = record->candidate.problem;
    text += fmt::format("{{\"{}\", {}, {}, {}, {}, {}, {}, \"{}\"}},  // {}: {:.1f} us\n", record->candidate.kernel,
                        capability, gate_text(find_preset(p.recurrence).recurrence.gate), p.D, p.D, p.T, p.B * p.H,
                        record->candidate.settings, p.recurrence, record->us);
  }
  return text;
}

}  // namespace delta_attention::cli
