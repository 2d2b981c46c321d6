#include "support/context.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "support/parallel.h"
#include "support/reference_error.h"
#if defined(DELTA_ATTENTION_WITH_CUDA)
#include "support/cuda_clock.h"
#endif

namespace bench {
namespace {

std::string environment(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : otherwise;
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown";
}

void add_context() {
  benchmark::AddCustomContext("commit", environment("DELTA_ATTENTION_COMMIT", "unknown"));
  benchmark::AddCustomContext("library_version", DELTA_ATTENTION_VERSION);
  benchmark::AddCustomContext("seed", std::to_string(seed()));
  benchmark::AddCustomContext("cpu", cpu_model());
  benchmark::AddCustomContext("threads", std::to_string(hardware_threads()));
#if defined(DELTA_ATTENTION_WITH_CUDA)
  if (has_cuda()) {
    const GpuFacts& gpu = gpu_facts();
    benchmark::AddCustomContext("gpu", gpu.name);
    benchmark::AddCustomContext("driver", gpu.driver);
    benchmark::AddCustomContext("cuda", gpu.cuda);
    benchmark::AddCustomContext("l2_bytes", std::to_string(gpu.l2_bytes));
    benchmark::AddCustomContext("memory_bytes_per_second",
                                std::to_string(static_cast<long long>(gpu.bytes_per_second)));
    return;
  }
#endif
  for (const char* field : {"gpu", "driver", "cuda"}) benchmark::AddCustomContext(field, "none");
}

}  // namespace

std::uint64_t seed() {
  static const std::uint64_t value = [] {
    const std::string given = environment("DELTA_ATTENTION_SEED", "");
    return given.empty() ? std::uint64_t{std::random_device{}()} : std::strtoull(given.c_str(), nullptr, 10);
  }();
  return value;
}

bool has_cuda() {
#if defined(DELTA_ATTENTION_WITH_CUDA)
  return gpu_facts().present;
#else
  return false;
#endif
}

void add_benchmark(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body](benchmark::State& state) {
                                 try {
                                   body(state);
                                 } catch (const std::exception& error) {
                                   state.SkipWithError(error.what());
                                 }
                               })
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

int run_main(int argc, char** argv, const std::function<void()>& register_all, double min_seconds) {
  // Defaults first: the command line overrides them.
  std::string repetitions = "--benchmark_repetitions=5", min_time = "--benchmark_min_time=" + std::to_string(min_seconds);
  std::string aggregates_only = "--benchmark_display_aggregates_only=true";
  std::vector<char*> arguments = {argv[0], repetitions.data(), min_time.data(), aggregates_only.data()};
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  int count = static_cast<int>(arguments.size());

  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;
  add_context();
  register_all();
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

int run_gpu_main(int argc, char** argv, const char* program, const std::function<void()>& register_all) {
  constexpr double kMinSeconds = 0.002;
  if (has_cuda()) return run_main(argc, argv, register_all, kMinSeconds);
  std::fprintf(stderr, "%s: no GPU here\n", program);
  return kNoGpu;
}

}  // namespace bench
