#include "demo_measure.h"

#include <algorithm>
#include <cmath>
#include <functional>

#include "delta_attention/softmax_attention.h"
#include "owned_call.h"
#include "slices.h"
#include "tensor_values.h"

namespace delta_attention::cli {
namespace {

constexpr double kTimeBudgetMs = 300.0;
constexpr int kFewestRuns = 3;
constexpr int kMostRuns = 50;

std::vector<double> output_of(const OwnedCall& call) { return downloaded(call.args.out); }

/// Relative error of each block of tokens; the last entry is that of all of them.
std::vector<double> errors(const std::vector<double>& out, const std::vector<double>& exact, const ForwardArgs& args) {
  const std::int64_t tokens = args.v.shape[1], per_token = args.v.shape[2] * args.v.shape[3];
  const std::size_t blocks = static_cast<std::size_t>((tokens + kBlock - 1) / kBlock);
  std::vector<double> difference(blocks + 1, 0.0), norm(blocks + 1, 0.0);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const std::int64_t token = static_cast<std::int64_t>(i) / per_token % tokens;
    for (const std::size_t slot : {static_cast<std::size_t>(token / kBlock), blocks}) {
      difference[slot] += (out[i] - exact[i]) * (out[i] - exact[i]);
      norm[slot] += exact[i] * exact[i];
    }
  }
  for (std::size_t slot = 0; slot <= blocks; ++slot) difference[slot] = std::sqrt(difference[slot] / norm[slot]);
  return difference;
}

double median(std::vector<double> values) {
  const std::size_t middle = values.size() / 2;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(middle), values.end());
  return values[middle];
}

std::vector<double> repeat(Device device, const std::function<void()>& call) {
  std::vector<double> times;
  double total = 0.0;
  while (static_cast<int>(times.size()) < kMostRuns &&
         (static_cast<int>(times.size()) < kFewestRuns || total < kTimeBudgetMs)) {
    times.push_back(time_ms(device, call));
    total += times.back();
  }
  return times;
}

double norm_per_head(const ConstTensor& state) {
  double sum = 0.0;
  for (double value : values_of(state)) sum += value * value;
  return std::sqrt(sum / static_cast<double>(state.shape[0] * state.shape[1]));
}

}  // namespace

Exact compute_exact(const ForwardArgs& args) {
  OwnedCall call = in_f64(args);
  const ConstTensor shape =
      tensor(static_cast<const double*>(nullptr), {args.q.shape[0], args.v.shape[2], args.q.shape[3], args.v.shape[3]});
  const OwnedTensor state = zeros(shape, DType::f64, cpu());
  call.args.initial_state = state.view;
  call.args.final_state = state.view;
  Execution execution;
  execution.kernel = "reference";
  Exact exact;
  const std::int64_t tokens = args.q.shape[1];
  for (std::int64_t first = 0; first < tokens; first += kBlock) {
    delta_attention_forward(token_slice(call.args, first, std::min(kBlock, tokens - first)), execution);
    exact.state_norm.push_back(norm_per_head(state.view));
  }
  exact.out = output_of(call);
  return exact;
}

Measurement measure(const ForwardArgs& args, const std::string& kernel, Device device, const Exact& exact) {
  Execution execution;
  execution.kernel = kernel;
  Measurement result;
  result.kernel = kernel;
  result.device = device;

  const OwnedCall stored = as_stored(args, device);
  delta_attention_forward(stored.args, execution);  // also the warm-up
  result.error = errors(output_of(stored), exact.out, args).back();
  const std::vector<double> times = repeat(device, [&] { delta_attention_forward(stored.args, execution); });
  result.median_ms = median(times);
  result.runs = static_cast<int>(times.size());

  const OwnedCall wide = in_f32(args, device);
  delta_attention_forward(wide.args, execution);
  result.error_f32_by_block = errors(output_of(wide), exact.out, args);
  result.error_f32 = result.error_f32_by_block.back();
  result.error_f32_by_block.pop_back();
  return result;
}

SoftmaxTime time_softmax(const ForwardArgs& args, Device device) {
  ForwardArgs operands;
  operands.q = args.q, operands.k = args.k, operands.v = args.v;
  const OwnedCall stored = as_stored(operands, device);
  SoftmaxArgs softmax;
  softmax.q = stored.args.q, softmax.k = stored.args.k, softmax.v = stored.args.v;
  softmax.out = stored.args.out;
  softmax.causal = true;
  softmax_attention_forward(softmax);  // the warm-up
  const std::vector<double> times = repeat(device, [&] { softmax_attention_forward(softmax); });
  return {softmax_dispatch_info(softmax).kernel, device, median(times), static_cast<int>(times.size())};
}

}  // namespace delta_attention::cli
