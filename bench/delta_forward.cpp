// delta_attention_forward: every kernel that this machine can run, on the shapes of models, timed and checked.
//
//   CPU kernels    wall time of the call
//   CUDA kernels   cold: device time of the whole call, L2 flushed before it
//                  graph: device time of a graph replay, L2 warm
//
// A benchmark's name is delta_forward/<recurrence>/<kernel>/<dtype>/<shape> [gate:strong|weak] [cold|graph].

#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>

#include "support/case.h"
#include "support/context.h"
#include "support/inputs.h"
#include "support/reference_error.h"
#if defined(DELTA_ATTENTION_WITH_CUDA)
#include "support/cuda_clock.h"
#endif

namespace bench {
namespace {

/// A case made real: inputs, what the reference makes of them, and the errors found so far.
struct Prepared {
  explicit Prepared(const Case& c) : host(c, seed()), expected(c, host.args()) {}
  HostOperands host;
  Expected expected;
  std::map<std::string, Errors> errors;  // by kernel and variant
#if defined(DELTA_ATTENTION_WITH_CUDA)
  std::unique_ptr<DeviceOperands> device;
#endif
};

/// Only the latest case is kept: benchmarks are registered case by case.
Prepared& prepare(const Case& c) {
  static std::string name;
  static std::unique_ptr<Prepared> latest;
  if (c.name("") != name) {
    latest.reset();
    latest = std::make_unique<Prepared>(c);
    name = c.name("");
  }
  return *latest;
}

/// A wrong result is not worth timing. The bars are the library's: 2e-6 sqrt(K) in f32, 1e-2 with 16-bit storage.
Errors require_right(const Errors& errors, const Case& c) {
  const double bar = c.dtype == DType::f32 ? 2e-6 * std::sqrt(static_cast<double>(c.dim)) : 1e-2;
  if (errors.out <= bar && errors.final_state <= bar) return errors;
  std::ostringstream text;
  text << "wrong result: relative error " << errors.out << ", of the state " << errors.final_state << ", allowed "
       << bar;
  throw std::runtime_error(text.str());
}

void set_counters(benchmark::State& state, const Case& c, const Errors& errors) {
  state.counters["bytes"] = least_bytes(c);
  state.counters["flops"] = recurrence_flops(c);
  state.counters["relative_error"] = errors.out;
  state.counters["state_relative_error"] = errors.final_state;
}

void time_on_cpu(benchmark::State& state, const Case& c, const std::string& kernel) {
  Prepared& prepared = prepare(c);
  const ForwardArgs args = prepared.host.args();
  delta_attention::Execution execution;
  execution.kernel = kernel;
  if (prepared.errors.count(kernel) == 0) {
    prepared.host.poison_outputs();
    delta_attention_forward(args, execution);
    prepared.errors[kernel] = require_right(prepared.expected.errors(args), c);
  }
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    delta_attention_forward(args, execution);
    state.SetIterationTime(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  set_counters(state, c, prepared.errors[kernel]);
}

#if defined(DELTA_ATTENTION_WITH_CUDA)

enum class Variant { cold, graph };

void time_on_cuda(benchmark::State& state, const Case& c, const std::string& kernel, Variant variant) {
  Prepared& prepared = prepare(c);
  if (!prepared.device) prepared.device = std::make_unique<DeviceOperands>(c, prepared.host);
  CudaCall call(prepared.device->args(), kernel);
  const auto timed = [&](std::int64_t calls) {
    return variant == Variant::cold ? call.time_cold(calls) : call.time_graph(calls);
  };

  const std::string key = kernel + (variant == Variant::cold ? " cold" : " graph");
  if (prepared.errors.count(key) == 0) {
    prepared.device->poison_outputs();
    timed(1);
    prepared.device->copy_checked_outputs_to(prepared.host);
    prepared.errors[key] = require_right(prepared.expected.errors(prepared.host.args()), c);
  }

  const std::vector<double> seconds = timed(static_cast<std::int64_t>(state.max_iterations));
  double total = 0.0;
  std::size_t next = 0;
  for (auto _ : state) {
    state.SetIterationTime(seconds[next]);
    total += seconds[next++];
  }
  set_counters(state, c, prepared.errors[key]);
  if (variant == Variant::cold) {
    const double floor = least_bytes(c) / gpu_facts().bytes_per_second;
    state.counters["vs_floor"] = total / static_cast<double>(seconds.size()) / floor;
  }
}

#endif

/// Kernels whose time grows too fast for the larger shapes: a launch a token, or float64 on one core.
bool takes_too_long(const Case& c, const std::string& kernel) {
  if (kernel == "step_loop") return c.tokens > 2048 && c.batch > 1;
  return kernel == "reference" && c.tokens > 512;
}

void add_case(const Case& c, Device device) {
  const std::vector<std::int64_t> offsets = c.offsets();
  const std::vector<std::int32_t> cu_seqlens(offsets.begin(), offsets.end());
  const ForwardArgs args = shape_only_args(c, device, cu_seqlens);
  for (const delta_attention::KernelReport& report : dispatch_info(args).kernels) {
    const std::string kernel = report.kernel;
    if (!report.supported || takes_too_long(c, kernel)) continue;
    if (device.type == delta_attention::DeviceType::cpu) {
      add_benchmark(c.name(kernel), [c, kernel](benchmark::State& state) { time_on_cpu(state, c, kernel); });
      continue;
    }
#if defined(DELTA_ATTENTION_WITH_CUDA)
    add_benchmark(c.name(kernel) + " cold",
                  [c, kernel](benchmark::State& state) { time_on_cuda(state, c, kernel, Variant::cold); });
    add_benchmark(c.name(kernel) + " graph",
                  [c, kernel](benchmark::State& state) { time_on_cuda(state, c, kernel, Variant::graph); });
#endif
  }
}

Case gated(const char* preset, DType dtype) {
  Case c;
  c.preset = preset;
  c.dtype = dtype;
  c.decay = Decay::strong;
  return c;
}

std::vector<Case> cpu_cases() {
  std::vector<Case> cases;
  for (const char* preset : {"gated_delta_net", "kda"}) {
    for (std::int64_t tokens : {512, 2048}) {
      cases.push_back(gated(preset, DType::f32));
      cases.back().tokens = tokens;
    }
    cases.push_back(gated(preset, DType::f32));
    cases.back().decay = Decay::weak;
  }
  return cases;
}

/// The grid on which the staged kernels are compared.
std::vector<Case> staged_grid(const char* preset) {
  std::vector<Case> cases;
  for (std::int64_t dim : {128, 64}) {
    for (std::int64_t batch : {1, 4, 16}) {
      for (std::int64_t tokens : {512, 1024, 2048, 4096, 8192}) {
        cases.push_back(gated(preset, DType::f32));
        cases.back().dim = dim;
        cases.back().batch = batch;
        cases.back().tokens = tokens;
      }
    }
  }
  return cases;
}

/// What the grid leaves out: long memory, large heads, packed sequences, 16-bit storage.
std::vector<Case> beside_the_grid(const char* preset) {
  std::vector<Case> cases(5, gated(preset, DType::f32));
  cases[0].decay = Decay::weak;
  cases[1].dim = 256;
  cases[2].lengths = {1300, 547, 2048, 963, 271, 3063};
  cases[2].tokens = cases[2].offsets().back();
  cases[3].dtype = cases[4].dtype = DType::bf16;
  cases[4].batch = 16;
  return cases;
}

/// Decoding and short prompts, where launches cost as much as the work. Few sequences and many.
std::vector<Case> short_sequences(const char* preset) {
  std::vector<Case> cases;
  for (std::int64_t tokens : {1, 16, 64, 128}) {
    for (std::int64_t batch : {1, 16}) {
      Case c = gated(preset, DType::f32);
      c.tokens = tokens;
      c.batch = batch;
      cases.push_back(c);
      c.dtype = DType::bf16;
      if (tokens != 64) cases.push_back(c);
    }
  }
  return cases;
}

std::vector<Case> cuda_cases() {
  std::vector<Case> cases;
  for (const char* preset : {"gated_delta_net", "kda"}) {
    for (const Case& c : staged_grid(preset)) cases.push_back(c);
    for (const Case& c : beside_the_grid(preset)) cases.push_back(c);
    for (const Case& c : short_sequences(preset)) cases.push_back(c);
  }
  const std::pair<const char*, Decay> others[] = {
      {"linear", Decay::none}, {"retention", Decay::fixed}, {"gla", Decay::strong}, {"delta_net", Decay::none}};
  for (const auto& [preset, decay] : others) {
    cases.push_back(gated(preset, DType::f32));
    cases.back().decay = decay;
  }
  return cases;
}

void register_all() {
  benchmark::AddCustomContext("relative_error_over", kCheckedPairs);
  for (const Case& c : cpu_cases()) add_case(c, delta_attention::cpu());
  if (!has_cuda()) return;
  for (const Case& c : cuda_cases()) add_case(c, delta_attention::cuda());
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) {
  constexpr double kMinSeconds = 0.004;  // a flush of the L2 before each takes ten times as long as the shortest calls
  return bench::run_main(argc, argv, bench::register_all, kMinSeconds);
}
