#include "correctness.h"

#include <algorithm>
#include <cmath>

#include "operands.h"
#include "problem/element.h"

namespace delta_attention::cli {
namespace {

using Values = std::vector<double>;

/// The outputs of a call, each as [outer, value heads, inner].
struct Output {
  const char* name;
  Tensor ForwardArgs::*view;
  int head_axis;
};
constexpr Output kOutputs[] = {{"out", &ForwardArgs::out, 2},
                               {"final_state", &ForwardArgs::final_state, 1},
                               {"final_normalizer", &ForwardArgs::final_normalizer, 1}};

double rounded(double value, DType dtype) {
  if (dtype == DType::f32) return value;
  float stored = 0.0f;
  store_element(&stored, dtype, 0, static_cast<float>(value));
  return load_element(&stored, dtype, 0);
}

/// What f32 arithmetic may add, relative. Each product and sum rounds by 2^-24 and a dot product over K channels makes a random walk
/// of them; with what lies around it, 2e-6 sqrt(K) is the bar for updates that contract, where errors die out. An additive state
/// keeps them: T additions walk by sqrt(T) steps of some 4 roundings. Normalising divides by a second such sum.
double arithmetic_bar(const RandomProblem& problem) {
  const Recurrence recurrence = find_preset(problem.recurrence).recurrence;
  double bar = 2e-6 * std::sqrt(static_cast<double>(problem.size.K));
  if (recurrence.update == Update::additive) bar += 4 * 0x1p-24 * std::sqrt(static_cast<double>(problem.size.T));
  return recurrence.normalize ? 2 * bar : bar;
}

/// 16-bit storage: 1.2 times the rounding of the exact result, which no kernel can avoid, and at most 1e-2.
double allowed_error(double arithmetic, double rounding, DType dtype) {
  return dtype == DType::f32 ? arithmetic : std::min(1e-2, 1.2 * rounding + arithmetic);
}

constexpr double kAbsolute = 1e-2, kRelative = 1e-2;

/// Fills in the errors of the head that is worst by its own bar.
void compare(const Values& got, const Values& exact, const Tensor& shape, const Output& output,
             CorrectnessCheck& check) {
  const std::int64_t heads = shape.shape[output.head_axis];
  std::int64_t inner = 1;
  for (int axis = output.head_axis + 1; axis < shape.rank; ++axis) inner *= shape.shape[axis];
  struct Sums {
    double error = 0, rounding = 0, size = 0;
  };
  std::vector<Sums> sums(static_cast<std::size_t>(heads));
  for (std::size_t i = 0; i < exact.size(); ++i) {
    Sums& head = sums[i / static_cast<std::size_t>(inner) % static_cast<std::size_t>(heads)];
    const double difference = got[i] - exact[i], step = rounded(exact[i], shape.dtype) - exact[i];
    head.error += difference * difference;
    head.rounding += step * step;
    head.size += exact[i] * exact[i];
    const double distance = std::fabs(difference) / (kAbsolute + kRelative * std::fabs(exact[i]));
    if (!(distance <= check.furthest)) check.furthest = distance;  // a NaN stays
  }
  double worst = -1.0;
  for (const Sums& head : sums) {
    const double error = std::sqrt(head.error / head.size);
    const double allowed =
        allowed_error(arithmetic_bar(check.problem), std::sqrt(head.rounding / head.size), shape.dtype);
    if (error / allowed <= worst) continue;
    worst = error / allowed;
    check.error = error;
    check.allowed = allowed;
    if (std::isnan(worst)) return;
  }
}

std::vector<RandomProblem> draw_problems(std::mt19937_64& random) {
  const auto between = [&](std::int64_t low, std::int64_t high) {
    return std::uniform_int_distribution<std::int64_t>(low, high)(random);
  };
  std::vector<RandomProblem> problems;
  for (const Preset& preset : kPresets) {
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      // One with grouped heads and odd sizes, one of the size that models have.
      const std::int64_t H = between(1, 2);
      problems.push_back({preset.name, {2, between(65, 300), H, 2 * H, between(33, 96), between(33, 96)}, dtype});
      problems.push_back({preset.name, {1, between(200, 400), 2, 2, 128, 128}, dtype});
    }
  }
  return problems;
}

std::vector<KernelChoice> able_kernels(const ForwardArgs& there) {
  std::vector<KernelChoice> able;
  for (const KernelReport& kernel : dispatch_info(there).kernels) {
    if (kernel.supported) able.push_back({kernel.kernel, "", false});
  }
  return able;
}

/// One problem with its exact outputs, ready to be run on kernels.
class Trial {
 public:
  Trial(const RandomProblem& problem, std::mt19937_64& random, CorrectnessReport& report)
      : problem_(problem), call_(draw_call(problem, random)), exact_(in_f64(call_.args)), report_(report) {
    forward_on({"reference", "", false}, exact_.args);
  }

  /// Every kernel that takes the problem on this device.
  void check_all(Device device) {
    for (const KernelChoice& choice : able_kernels(as_stored(call_.args, device).args)) check(choice, device);
  }

  /// A kernel on the devices that take it.
  void check_asked_for(const KernelChoice& choice, const std::vector<Device>& devices) {
    std::string reasons;
    for (Device device : devices) {
      try {
        check(choice, device);
        return;
      } catch (const Unsupported& reason) {
        reasons += (reasons.empty() ? "" : "; ") + std::string(reason.what());
      }
    }
    report_.refusals.push_back({choice, problem_, reasons});
  }

 private:
  void check(const KernelChoice& choice, Device device) {
    const OwnedCall call = as_stored(call_.args, device);
    forward_on(choice, call.args);
    for (const Output& output : kOutputs) {
      const Tensor& view = call.args.*output.view;
      if (!view.present()) continue;
      CorrectnessCheck result{choice, device, problem_, output.name};
      compare(downloaded(view), downloaded(exact_.args.*output.view), view, output, result);
      report_.checks.push_back(result);
    }
  }

  const RandomProblem& problem_;
  OwnedCall call_, exact_;
  CorrectnessReport& report_;
};

}  // namespace

CorrectnessReport check_correctness(const std::vector<Device>& devices, const std::vector<KernelChoice>& choices,
                                    std::uint64_t seed, const std::function<void(double fraction)>& progress) {
  CorrectnessReport report;
  report.seed = seed;
  std::mt19937_64 random(seed);
  const std::vector<RandomProblem> problems = draw_problems(random);
  for (const RandomProblem& problem : problems) {
    Trial trial(problem, random, report);
    for (const KernelChoice& choice : choices) trial.check_asked_for(choice, devices);
    if (choices.empty()) {
      for (Device device : devices) trial.check_all(device);
    }
    progress(static_cast<double>(++report.problems) / static_cast<double>(problems.size()));
  }
  return report;
}

}  // namespace delta_attention::cli
