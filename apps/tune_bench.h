#pragma once

// The device side of `delta-attention tune`: random operands, one call of a candidate, its error and its times.

#include <map>

#include "owned_call.h"
#include "tuning.h"

namespace delta_attention::cli {

class DeviceBench : public TuneBench {
 public:
  explicit DeviceBench(Device device) : device_(device) {}

  std::string refusal(const TuneCandidate& candidate) override;
  double error(const TuneCandidate& candidate) override;
  std::vector<double> times_us(const TuneCandidate& candidate, int runs, double give_up_us) override;

 private:
  /// A short problem, in CPU memory, and its exact results.
  struct Check {
    OwnedCall call;
    std::vector<double> out, state;
  };

  /// Tokens in CPU memory, of which larger problems are made by repetition.
  const ForwardArgs& block_of(const TuneProblem& problem);
  /// The problem on the device.
  const ForwardArgs& call_of(const TuneProblem& problem);
  const Check& check_of(const TuneProblem& problem);
  void reserve_workspace(const ForwardArgs& args, Execution& execution);

  Device device_;
  std::map<std::string, OwnedCall> blocks_;
  std::map<std::string, Check> checks_;
  OwnedCall call_;  // of the last problem: the largest ones leave no room for two
  std::string call_name_;
  Buffer workspace_;
};

}  // namespace delta_attention::cli
