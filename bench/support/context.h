#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <string>

namespace bench {

/// Runs a benchmark program: repetitions and minimum time (seconds a repetition) unless the command line says otherwise, context fields
/// that say what was measured where, then whatever `register_all` registered.
int run_main(int argc, char** argv, const std::function<void()>& register_all, double min_seconds);

/// Registers one benchmark, in microseconds of its own clock; a call that fails becomes an error in the results, not the end of the run.
void add_benchmark(const std::string& name, const std::function<void(benchmark::State&)>& body);

/// The seed of all inputs: DELTA_ATTENTION_SEED, or a fresh one. It is printed and kept in the results.
std::uint64_t seed();

/// The same for a program that is no use without a GPU: where there is none it says so, under its name, and ends with kNoGpu. Its calls are
/// short, and so is a repetition.
int run_gpu_main(int argc, char** argv, const char* program, const std::function<void()>& register_all);

/// The device that CUDA benchmarks run on.
bool has_cuda();

/// What a program that needs a GPU returns where there is none.
constexpr int kNoGpu = 77;

}  // namespace bench
