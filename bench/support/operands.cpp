#include "support/operands.h"

#include <cmath>
#include <map>
#include <numeric>
#include <sstream>
#include <stdexcept>

namespace bench {
namespace {

/// What the latest benchmark used.
struct Latest {
  std::string operands_name, call_name;
  std::unique_ptr<Operands> operands;
  std::unique_ptr<CudaCall> call;
  double error = 0.0;
  std::optional<double> state_error;
};

std::vector<double> run(CudaCall& call, Variant variant, std::int64_t calls) {
  return variant == Variant::cold ? call.time_cold(calls) : call.time_graph(calls);
}

/// A wrong result is not worth timing.
void check(const Operands& operands, Latest* latest) {
  latest->error = operands.relative_error();
  latest->state_error = operands.state_relative_error();
  const double allowed = operands.allowed_error(), state_error = latest->state_error.value_or(0.0);
  if (latest->error <= allowed && state_error <= allowed) return;
  std::ostringstream text;
  text << "wrong result: relative error " << latest->error << ", of the state " << state_error << ", allowed " << allowed;
  throw std::runtime_error(text.str());
}

/// Old memory goes before new memory comes: either may need most of the GPU's.
Latest& prepare(const TimedCall& timed) {
  static Latest latest;
  const std::string call_name = timed.operands_name + " " + timed.kernel + " " + timed.settings + " " + name(timed.variant);
  if (latest.call && latest.call_name == call_name) return latest;
  latest.call.reset();
  if (latest.operands_name != timed.operands_name) {
    latest.operands.reset();
    latest.operands_name.clear();
    latest.operands = timed.make_operands();
    latest.operands_name = timed.operands_name;
  }
  std::unique_ptr<CudaCall> call = latest.operands->call(timed.kernel, timed.settings);
  call->time_cold(1);  // loads the kernels, which must not happen while a graph is captured
  latest.operands->poison_outputs();
  run(*call, timed.variant, 1);
  check(*latest.operands, &latest);
  latest.call = std::move(call);
  latest.call_name = call_name;
  return latest;
}

}  // namespace

double allowed_error(delta_attention::DType dtype, std::int64_t dim) {
  return dtype == delta_attention::DType::f32 ? 2e-6 * std::sqrt(static_cast<double>(dim)) : 1e-2;
}

const char* name(Variant variant) { return variant == Variant::cold ? "cold" : "graph"; }

double time_call(benchmark::State& state, const TimedCall& timed) {
  Latest& latest = prepare(timed);
  const std::vector<double> seconds = run(*latest.call, timed.variant, static_cast<std::int64_t>(state.max_iterations));
  std::size_t next = 0;
  for (auto _ : state) state.SetIterationTime(seconds[next++]);
  state.counters["operands"] = latest.operands->bytes();
  state.counters["workspace"] = static_cast<double>(latest.call->workspace_bytes());
  state.counters["relative_error"] = latest.error;
  if (latest.state_error) state.counters["state_relative_error"] = *latest.state_error;
  return std::accumulate(seconds.begin(), seconds.end(), 0.0) / static_cast<double>(seconds.size());
}

}  // namespace bench
