#pragma once

// Operands of a call on the GPU, and the timing of one kernel on them: what the programs that compare different calls share.

#include <benchmark/benchmark.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "delta_attention/tensor.h"
#include "support/cuda_clock.h"

namespace bench {

/// Operands in GPU memory whose results can be checked.
class Operands {
 public:
  virtual ~Operands() = default;
  virtual std::unique_ptr<CudaCall> call(const std::string& kernel, const std::string& settings) const = 0;
  virtual void poison_outputs() = 0;
  /// ||x - reference|| / ||reference|| over the part of the output that is checked, in float64.
  virtual double relative_error() const = 0;
  /// The same of the final state, where it is checked.
  virtual std::optional<double> state_relative_error() const { return std::nullopt; }
  virtual double allowed_error() const = 0;
  /// Of all operands.
  virtual double bytes() const = 0;
};

/// The library's bars: 2e-6 sqrt(D) in f32, 1e-2 with 16-bit storage.
double allowed_error(delta_attention::DType dtype, std::int64_t dim);

/// cold: device time of the whole call, L2 flushed before it. graph: device time of a graph replay, L2 warm.
enum class Variant { cold, graph };
const char* name(Variant variant);

/// One kernel on one set of operands.
struct TimedCall {
  std::string operands_name;
  std::function<std::unique_ptr<Operands>()> make_operands;
  std::string kernel, settings;
  Variant variant = Variant::graph;
};

/// Times the call, unless its result is wrong, with `operands`, `workspace` (bytes), `relative_error` and, where the final state is
/// checked, `state_relative_error` as counters. Returns the mean in seconds. Operands and call stay until other ones are asked for:
/// benchmarks are registered case by case.
double time_call(benchmark::State& state, const TimedCall& timed);

}  // namespace bench
