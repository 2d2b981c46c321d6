#include "tune_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "operands.h"
#include "random_problem.h"

namespace delta_attention::cli {
namespace {

constexpr std::int64_t kBlockTokens = 512;

// The check: more tokens than any tile holds and no multiple of one, two batch rows, two heads.
constexpr std::int64_t kCheckTokens = 300, kCheckBatch = 2, kCheckHeads = 2;

// One time is that of calls launched back to back, so that the GPU does not wait for the CPU between them.
constexpr double kBatchUs = 1000.0;
constexpr int kMostCalls = 10;

double relative_error(const std::vector<double>& actual, const std::vector<double>& exact) {
  double difference = 0.0, norm = 0.0;
  for (std::size_t i = 0; i < exact.size(); ++i) {
    difference += (actual[i] - exact[i]) * (actual[i] - exact[i]);
    norm += exact[i] * exact[i];
  }
  return std::sqrt(difference / norm);
}

/// NaN is the largest.
double larger(double a, double b) { return std::isnan(a) || a > b ? a : b; }

/// Only settings that repeat to the last bit are tuned: a table must not take that from who has not asked for it.
Execution execution_of(const TuneCandidate& candidate) {
  Execution execution;
  execution.deterministic = true;
  execution.kernel = candidate.kernel;
  execution.settings = candidate.settings;
  return execution;
}

OwnedCall draw(const TuneProblem& p) {
  RandomProblem problem;
  problem.recurrence = p.recurrence;
  problem.size = {p.B, p.T, p.H, p.H, p.D, p.D};
  std::mt19937_64 random(1);  // times and errors hardly depend on it
  return draw_call(problem, random);
}

}  // namespace

const ForwardArgs& DeviceBench::block_of(const TuneProblem& p) {
  const auto [at, is_new] = blocks_.emplace(fmt::format("{} {} {}", p.recurrence, p.D, p.H), OwnedCall());
  if (is_new) at->second = draw({p.recurrence, p.D, 1, kBlockTokens, p.H});
  return at->second.args;
}

const ForwardArgs& DeviceBench::call_of(const TuneProblem& p) {
  const std::string name = fmt::format("{} {} {} {} {}", p.recurrence, p.D, p.B, p.T, p.H);
  if (name == call_name_) return call_.args;
  call_name_.clear();
  call_ = OwnedCall();  // frees first
  ForwardArgs args = block_of(p);
  const auto resized = [&](const ConstTensor& x) {
    ConstTensor like = x;
    like.shape[0] = p.B;
    like.shape[1] = p.T;
    call_.storage.push_back(repeated(x, like, device_));
    return call_.storage.back().view;
  };
  for (const NamedOperand& operand : input_operands()) {
    ConstTensor& view = args.*operand.view;
    if (view.present()) view = resized(view);
  }
  args.out = resized(args.out);
  args.final_state = args.final_normalizer = Tensor();
  call_.args = args;
  call_name_ = name;
  return call_.args;
}

const DeviceBench::Check& DeviceBench::check_of(const TuneProblem& p) {
  const auto [at, is_new] = checks_.emplace(fmt::format("{} {}", p.recurrence, p.D), Check());
  Check& check = at->second;
  if (!is_new) return check;
  check.call = draw({p.recurrence, p.D, kCheckBatch, kCheckTokens, kCheckHeads});
  const OwnedCall exact = in_f64(check.call.args);
  Execution execution;
  execution.kernel = "reference";
  delta_attention_forward(exact.args, execution);
  check.out = downloaded(exact.args.out);
  check.state = downloaded(exact.args.final_state);
  return check;
}

void DeviceBench::reserve_workspace(const ForwardArgs& args, Execution& execution) {
  const std::size_t bytes = delta_attention_workspace(args, execution);
  if (bytes > workspace_.bytes()) {
    workspace_ = Buffer();  // frees first
    workspace_ = Buffer(bytes, device_);
  }
  execution.workspace = workspace_.data();
  execution.workspace_bytes = workspace_.bytes();
}

std::string DeviceBench::refusal(const TuneCandidate& candidate) {
  const DispatchInfo info = dispatch_info(call_of(candidate.problem), execution_of(candidate));
  if (!info.kernel.empty()) return "";
  for (const KernelReport& report : info.kernels) {
    if (report.kernel == candidate.kernel) return report.reason;
  }
  return info.reason;
}

double DeviceBench::error(const TuneCandidate& candidate) {
  const Check& check = check_of(candidate.problem);
  // Outputs of its own, all zero: a kernel that writes nothing must not pass by what another has written.
  const OwnedCall call = as_stored(check.call.args, device_);
  delta_attention_forward(call.args, execution_of(candidate));
  return larger(relative_error(downloaded(call.args.out), check.out),
                relative_error(downloaded(call.args.final_state), check.state));
}

std::vector<double> DeviceBench::times_us(const TuneCandidate& candidate, int runs, double give_up_us) {
  const ForwardArgs& args = call_of(candidate.problem);
  Execution execution = execution_of(candidate);
  reserve_workspace(args, execution);
  const auto time = [&](int calls) {
    const double ms = time_ms(device_, [&] {
      for (int i = 0; i < calls; ++i) delta_attention_forward(args, execution);
    });
    return 1000.0 * ms / calls;
  };
  const double warm_up = time(1);
  if (warm_up > give_up_us) return {warm_up};
  const int calls = std::clamp(static_cast<int>(kBatchUs / std::max(warm_up, 1.0)), 1, kMostCalls);
  std::vector<double> times;
  for (int run = 0; run < runs; ++run) times.push_back(time(calls));
  return times;
}

}  // namespace delta_attention::cli
