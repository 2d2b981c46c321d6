// When does delta attention pay? Delta recurrences and causal softmax attention on the same shapes in one run: H = 8, D = 128, from short
// sequences to long ones. Time grows with T for the former, with T^2 for the latter.
//
//   cold    device time of the whole call, L2 flushed before it
//
// A benchmark's name is softmax_vs_delta/<softmax or recurrence>/<kernel>/<dtype>/B:<B> T:<T> H:8 D:128 cold. Counters give the memory:
// operands and workspace. Skipped, with the reason, is what would take too long by the time of half as many tokens, and what does not fit.

#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "support/context.h"
#include "support/delta_operands.h"
#include "support/softmax_case.h"

namespace bench {
namespace {

using delta_attention::DType;

constexpr std::int64_t kHeads = 8, kDim = 128, kShortest = 128, kLongest = 131072;
constexpr double kLongestSeconds = 0.2;

/// What is compared: one kernel over all T.
struct Contender {
  std::string method, kernel;  // "softmax" or the name of a recurrence
  DType dtype;
  std::int64_t batch;
  bool quadratic() const { return method == "softmax"; }
  std::string series() const { return method + "/" + kernel + "/" + delta_attention::name(dtype) + "/B:" + std::to_string(batch); }
  std::string name(std::int64_t tokens) const {
    return "softmax_vs_delta/" + series() + " T:" + std::to_string(tokens) + " H:" + std::to_string(kHeads) +
           " D:" + std::to_string(kDim) + " cold";
  }
};

/// The latest time of a contender, for what twice as many tokens will take.
struct Measured {
  std::int64_t tokens = 0;
  double seconds = 0.0;
};
std::map<std::string, Measured> measured;

/// Throws where the case would take too long, as far as the time of fewer tokens tells.
void require_soon_done(const Contender& who, std::int64_t tokens) {
  const Measured& before = measured[who.series()];
  if (before.tokens == 0 || before.tokens >= tokens) return;
  const double growth = static_cast<double>(tokens) / static_cast<double>(before.tokens);
  const double expected = before.seconds * (who.quadratic() ? growth * growth : growth);
  if (expected <= kLongestSeconds) return;
  std::ostringstream text;
  text << "skipped: about " << expected * 1e3 << " ms by the time of " << before.tokens << " tokens";
  throw std::runtime_error(text.str());
}

Case delta_case(const Contender& who, std::int64_t tokens) {
  Case c;
  c.preset = who.method;
  c.dtype = who.dtype;
  c.decay = Decay::strong;
  c.batch = who.batch;
  c.tokens = tokens;
  c.heads = c.value_heads = kHeads;
  c.dim = kDim;
  return c;
}

SoftmaxCase softmax_case(const Contender& who, std::int64_t tokens) {
  SoftmaxCase c;
  c.dtype = who.dtype;
  c.batch = who.batch;
  c.queries = c.keys = tokens;
  c.dim = kDim;
  c.causal = true;
  return c;
}

std::unique_ptr<Operands> operands(const Contender& who, std::int64_t tokens) {
  if (who.method == "softmax") return softmax_operands(softmax_case(who, tokens), seed());
  return delta_operands(delta_case(who, tokens), seed());
}

void time_contender(benchmark::State& state, const Contender& who, std::int64_t tokens) {
  require_soon_done(who, tokens);
  const std::string operands_name = who.method + "/" + delta_attention::name(who.dtype) + "/" + std::to_string(who.batch) + "/" +
                                    std::to_string(tokens);
  try {
    const double seconds = time_call(state, {operands_name, [=] { return operands(who, tokens); }, who.kernel, "", Variant::cold});
    measured[who.series()] = {tokens, seconds};
  } catch (const delta_attention::OutOfMemory& error) {
    throw std::runtime_error(std::string("skipped: ") + error.what());
  }
}

/// The kernel that would run; empty if none can.
std::string chosen_kernel(const Contender& who, std::int64_t tokens) {
  delta_attention::Execution execution;
  execution.kernel = who.kernel;
  if (who.method == "softmax") return softmax_dispatch_info(shape_only_args(softmax_case(who, tokens)), execution).kernel;
  return dispatch_info(shape_only_args(delta_case(who, tokens), delta_attention::cuda(), {}), execution).kernel;
}

void add_contender(const Contender& who, std::int64_t tokens) {
  const std::string chosen = chosen_kernel(who, tokens);
  if (chosen.empty()) return;
  add_benchmark(who.name(tokens), [=](benchmark::State& state) {
    time_contender(state, who, tokens);
    if (chosen != who.kernel) state.SetLabel(chosen);  // what "automatic" means here
  });
}

std::vector<Contender> contenders(std::int64_t batch) {
  std::vector<Contender> all = {{"softmax", "flash_tc", DType::bf16, batch}, {"softmax", "vec_fused", DType::f32, batch}};
  for (const char* recurrence : {"gated_delta_net", "kda"}) {
    for (const DType dtype : {DType::bf16, DType::f32}) {
      for (const char* kernel : {"automatic", "v1_chunk_pipeline", "v3_on_chip"}) all.push_back({recurrence, kernel, dtype, batch});
    }
  }
  return all;
}

void register_all() {
  benchmark::AddCustomContext("relative_error_over",
                              "softmax: first, middle and last row of the first and the last head; delta: " + checked_part());
  for (const std::int64_t batch : {1, 16}) {
    for (std::int64_t tokens = kShortest; tokens <= kLongest; tokens *= 2) {
      for (const Contender& who : contenders(batch)) add_contender(who, tokens);
    }
  }
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::run_gpu_main(argc, argv, "softmax_vs_delta", bench::register_all); }
