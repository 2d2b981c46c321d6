#pragma once

// The sweep behind `delta-attention tune`: which settings are tried on which problem, what is remembered, and which win. It knows
// no device: it asks a TuneBench, so that tests can invent kernels.

#include <cstdint>
#include <deque>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "delta_attention/delta_attention.h"

namespace delta_attention::cli {

struct TuneProblem {
  std::string recurrence;
  std::int64_t D = 0;  // K = V
  std::int64_t B = 0, T = 0, H = 0;
};

/// A problem with a kernel and its settings; no settings means whatever the library chooses today.
struct TuneCandidate {
  TuneProblem problem;
  std::string kernel;
  std::string settings;
};

enum class TuneStatus { ok, slow, wrong, failed };

struct TuneRecord {
  std::string device;
  TuneCandidate candidate;
  TuneStatus status = TuneStatus::ok;  // slow: given up after the first time
  double us = 0.0;                     // of one call: the median, or the first time of a slow one
  double error = 0.0;                  // of the check, relative
  double seconds = 0.0;                // that all of this took
  std::string reason;                  // of wrong and failed
};

/// What has been measured, in memory and, if it has a path, as lines of JSON in a file that a later run continues. A line that
/// was cut off at the end of the file is dropped. Throws IoError, and BadInput for a file that is no such log.
class TuneLog {
 public:
  TuneLog() = default;
  explicit TuneLog(const std::string& path);

  const TuneRecord* find(const std::string& device, const TuneCandidate& candidate) const;
  const TuneRecord& add(TuneRecord record);
  const std::deque<TuneRecord>& records() const { return records_; }

 private:
  void read();
  void remember(TuneRecord record);

  std::string path_;
  std::ofstream file_;
  std::deque<TuneRecord> records_;
  std::map<std::string, const TuneRecord*> by_key_;
};

/// What the sweep asks of a device.
class TuneBench {
 public:
  virtual ~TuneBench() = default;
  /// "" if the kernel takes the problem with these settings.
  virtual std::string refusal(const TuneCandidate& candidate) = 0;
  /// Relative error against the float64 reference on a short problem of the same recurrence and D.
  virtual double error(const TuneCandidate& candidate) = 0;
  /// Microseconds of a call, `runs` times, after a warm-up. If that one takes longer than `give_up_us`, its time alone.
  virtual std::vector<double> times_us(const TuneCandidate& candidate, int runs, double give_up_us) = 0;
};

struct TunedKernel {
  std::string name;
  std::vector<Setting> settings;
};

struct TunePlan {
  std::string device;  // its name
  int capability = 0;  // 10 * major + minor; 0 for the CPU
  std::vector<TunedKernel> kernels;
  std::vector<std::string> recurrences;
  std::vector<std::int64_t> D, B, T;
  std::int64_t H = 0;
  std::int64_t keep = 0;  // how many candidates of one T go on to the next
};

/// The outcome of one problem on one kernel.
struct TuneOutcome {
  TuneProblem problem;
  std::string kernel;
  int tried = 0, wrong = 0, failed = 0;
  double seconds = 0.0;
  double slowest_seconds = 0.0;      // of a single candidate
  const TuneRecord* now = nullptr;   // without settings; null if it was not measured
  const TuneRecord* best = nullptr;  // null if nothing ran
};

/// Every combination of the values: "rows=8,columns=4", ...
std::vector<std::string> combinations(const std::vector<Setting>& settings);

struct TuneEvents {
  std::function<void(double fraction)> progress;
  std::function<void(const TuneOutcome&)> outcome;
};

/// Measures what the log does not hold yet. For each D, recurrence and B, the shortest T tries every combination; a longer one
/// tries the `keep` fastest of the T before.
void sweep(const TunePlan& plan, TuneBench& bench, TuneLog& log, const TuneEvents& events);

/// The winners of all that the log holds of this device, in the form of src/api/tuned/*.inc.
std::string tuned_rows(const TuneLog& log, const std::string& device, int capability);

}  // namespace delta_attention::cli
