#include "error_growth_measure.h"

#include <algorithm>
#include <cmath>

#include "delta_attention_reference.h"
#include "device_memory.h"
#include "emulation.h"
#include "owned_call.h"
#include "slices.h"
#include "tensor_values.h"

namespace delta_attention::cli {
namespace {

using Values = std::vector<double>;

/// Collects one Error over parts of an array.
class ErrorSum {
 public:
  void add(double got, double truth) {
    const double difference = std::fabs(got - truth);
    if (!(difference <= largest_)) largest_ = difference;  // keeps NaN
    largest_truth_ = std::max(largest_truth_, std::fabs(truth));
    squares_ += difference * difference;
    truth_squares_ += truth * truth;
  }
  Error error() const { return {largest_, largest_ / largest_truth_, std::sqrt(squares_ / truth_squares_)}; }

 private:
  double largest_ = 0.0, largest_truth_ = 0.0, squares_ = 0.0, truth_squares_ = 0.0;
};

/// The sequence in float64: all outputs, and the states where a length ends.
struct Truth {
  Values out;                               // [T,H,V]
  std::vector<Values> states, normalizers;  // [H,K,V] and [H,K], one for each length
};

struct Sizes {
  std::int64_t heads, key_dim, value_dim;
  std::int64_t per_token() const { return heads * value_dim; }
};
Sizes sizes_of(const ForwardArgs& args) { return {args.v.shape[2], args.q.shape[3], args.v.shape[3]}; }

Truth compute_truth(const ForwardArgs& inputs, const std::vector<std::int64_t>& lengths) {
  const Sizes s = sizes_of(inputs);
  Truth truth;
  truth.out.resize(static_cast<std::size_t>(lengths.back() * s.per_token()));
  Values state(static_cast<std::size_t>(s.heads * s.key_dim * s.value_dim));
  Values normalizer(static_cast<std::size_t>(s.heads * s.key_dim));
  ForwardArgs args = inputs;
  args.out = tensor(truth.out.data(), {1, lengths.back(), s.heads, s.value_dim});
  args.final_state = tensor(state.data(), {1, s.heads, s.key_dim, s.value_dim});
  args.initial_state = args.final_state;
  args.final_normalizer = tensor(normalizer.data(), {1, s.heads, s.key_dim});
  args.initial_normalizer = args.final_normalizer;
  std::int64_t begin = 0;
  for (std::int64_t end : lengths) {
    reference::forward(token_slice(args, begin, end - begin));
    truth.states.push_back(state);
    truth.normalizers.push_back(normalizer);
    begin = end;
  }
  return truth;
}

/// Outputs of tokens [begin, end), wherever `out` keeps them.
void add_outputs(const ConstTensor& out, const Truth& truth, const Sizes& s, std::int64_t begin, std::int64_t end,
                 ErrorSum& sum) {
  for (std::int64_t i = begin * s.per_token(); i < end * s.per_token(); ++i) {
    sum.add(value_at(out.data, out.dtype, i), truth.out[static_cast<std::size_t>(i)]);
  }
}

template <class Got>
Error error_of(const Values& truth, Got got) {
  ErrorSum sum;
  for (std::size_t i = 0; i < truth.size(); ++i) sum.add(got(static_cast<std::int64_t>(i)), truth[i]);
  return sum.error();
}

/// float64 arithmetic with results rounded to their storage: the least error that any kernel can have.
Growth rounded_truth(const ForwardArgs& args, const std::vector<std::int64_t>& lengths, const Truth& truth) {
  Growth growth{"reference", "cpu", {}};
  const auto rounded = [](const Values& values, DType dtype) {
    return [&values, dtype](std::int64_t i) {
      float stored;
      store_element(&stored, dtype, 0, static_cast<float>(values[static_cast<std::size_t>(i)]));
      return value_at(&stored, dtype, 0);
    };
  };
  const auto out = rounded(truth.out, args.q.dtype);
  const std::int64_t per_token = sizes_of(args).per_token();
  ErrorSum outputs;
  std::int64_t done = 0;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    for (; done < lengths[n] * per_token; ++done) outputs.add(out(done), truth.out[static_cast<std::size_t>(done)]);
    LengthErrors errors{
        lengths[n], outputs.error(), error_of(truth.states[n], rounded(truth.states[n], DType::f32)), {}};
    if (args.recurrence.normalize) {
      errors.normalizer = error_of(truth.normalizers[n], rounded(truth.normalizers[n], DType::f32));
    }
    growth.lengths.push_back(errors);
  }
  return growth;
}

/// One pass over the sequence; the state is looked at where a length ends.
template <class Sum>
Growth emulate(const ForwardArgs& inputs, const std::vector<std::int64_t>& lengths, const Truth& truth,
               const emulation::StagedKernel& kernel) {
  const Sizes s = sizes_of(inputs);
  const OwnedTensor out = zeros(inputs.v, inputs.q.dtype, cpu());
  ForwardArgs args = inputs;
  args.out = out.view;
  std::vector<emulation::HeadEmulation<Sum>> heads;
  for (std::int64_t head = 0; head < s.heads; ++head) heads.emplace_back(args, kernel.schedule, 0, head);

  Growth growth{kernel.name, "emulation", {}};
  ErrorSum outputs;
  std::int64_t begin = 0;
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    for (auto& head : heads) head.run(0, begin, lengths[n]);
    add_outputs(out.view, truth, s, begin, lengths[n], outputs);
    const std::int64_t per_head = s.key_dim * s.value_dim;
    const Error state = error_of(truth.states[n], [&](std::int64_t i) {
      return heads[static_cast<std::size_t>(i / per_head)].state(i % per_head / s.value_dim, i % s.value_dim);
    });
    LengthErrors errors{lengths[n], outputs.error(), state, {}};
    if (args.recurrence.normalize) {
      errors.normalizer = error_of(truth.normalizers[n], [&](std::int64_t i) {
        return heads[static_cast<std::size_t>(i / s.key_dim)].normalizer(i % s.key_dim);
      });
    }
    growth.lengths.push_back(errors);
    begin = lengths[n];
  }
  return growth;
}

Growth emulate(const ForwardArgs& inputs, const std::vector<std::int64_t>& lengths, const Truth& truth,
               const emulation::StagedKernel& kernel) {
  return kernel.compensated ? emulate<CompensatedSum>(inputs, lengths, truth, kernel)
                            : emulate<PlainSum>(inputs, lengths, truth, kernel);
}

/// The call with states, on a device, in memory of its own.
OwnedCall call_on(Device device, const ForwardArgs& inputs) {
  const Sizes s = sizes_of(inputs);
  float* const no_memory = nullptr;  // as_stored() looks at shapes only
  ForwardArgs args = inputs;
  args.final_state = tensor(no_memory, {1, s.heads, s.key_dim, s.value_dim});
  if (inputs.recurrence.normalize) args.final_normalizer = tensor(no_memory, {1, s.heads, s.key_dim});
  return as_stored(args, device);
}

Error error_of_tensor(const ConstTensor& x, const Values& truth) {
  const Values got = downloaded(x);
  return error_of(truth, [&](std::int64_t i) { return got[static_cast<std::size_t>(i)]; });
}

/// One call for each length: what a kernel does may depend on it.
Growth run_kernel(const ForwardArgs& args, const Execution& execution, const std::vector<std::int64_t>& lengths,
                  const Truth& truth) {
  Growth growth{execution.kernel, text_of(args.q.device), {}};
  for (std::size_t n = 0; n < lengths.size(); ++n) {
    const ForwardArgs part = token_slice(args, 0, lengths[n]);
    delta_attention_forward(part, execution);
    const OwnedTensor out = copy_to(part.out, cpu());  // waits for the kernel
    ErrorSum outputs;
    add_outputs(out.view, truth, sizes_of(args), 0, lengths[n], outputs);
    LengthErrors errors{lengths[n], outputs.error(), error_of_tensor(args.final_state, truth.states[n]), {}};
    if (args.recurrence.normalize) {
      errors.normalizer = error_of_tensor(args.final_normalizer, truth.normalizers[n]);
    }
    growth.lengths.push_back(errors);
  }
  return growth;
}

Execution kernel_alone(const char* kernel, const char* settings) {
  Execution execution;
  execution.kernel = kernel;
  execution.settings = settings;
  execution.threads = 1;  // several regimes run side by side
  return execution;
}

bool supports(const ForwardArgs& args, const Execution& execution) {
  return dispatch_info(args, execution).kernel == execution.kernel;
}

}  // namespace

std::vector<Growth> measure_growth(const ForwardArgs& args, const std::vector<std::int64_t>& lengths,
                                   const std::optional<Device>& gpu) {
  const Truth truth = compute_truth(args, lengths);
  std::vector<Growth> all = {rounded_truth(args, lengths, truth),
                             run_kernel(call_on(cpu(), args).args, kernel_alone("cpu_chunkwise", ""), lengths, truth)};
  std::optional<OwnedCall> on_gpu;
  if (gpu) on_gpu = call_on(*gpu, args);
  for (const emulation::StagedKernel& kernel : emulation::kStagedKernels) {
    const Execution execution = kernel_alone(kernel.name, kernel.settings);
    const bool runs = on_gpu && supports(on_gpu->args, execution);
    all.push_back(runs ? run_kernel(on_gpu->args, execution, lengths, truth) : emulate(args, lengths, truth, kernel));
  }
  return all;
}

}  // namespace delta_attention::cli
