#pragma once

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>

namespace bench {

/// Runs a benchmark program: repetitions and minimum time unless the command line says otherwise, context fields that
/// say what was measured where, then whatever `register_all` registered.
int run_main(int argc, char** argv, const std::function<void()>& register_all);

/// The seed of all inputs: DELTA_ATTENTION_SEED, or a fresh one. It is printed and kept in the results.
std::uint64_t seed();

/// The device that CUDA benchmarks run on.
bool has_cuda();

}  // namespace bench
