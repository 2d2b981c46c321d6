// softmax_attention_forward: every CUDA kernel of the softmax articles, timed, checked, and beside what the roofline model predicts.
//
//   graph   device time of a graph replay, L2 warm: kernels beside one another, settings, storage types
//   cold    device time of the whole call, L2 flushed before it: where the operands' way from memory is the point, causal against full and
//           decoding
//
// A benchmark's name is softmax_forward/<kernel>/<dtype>/<shape> [settings:<name>=<value>,...] cold|graph. Kernels that refuse a problem
// are left out.

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "support/ceilings.h"
#include "support/context.h"
#include "support/softmax_case.h"

namespace bench {
namespace {

using delta_attention::DType;
using delta_attention::Execution;
using delta_attention::KernelReport;
using delta_attention::Setting;

constexpr std::int64_t kHeadDims[] = {32, 64, 128};

/// Bytes, operations and time by the model, and how many times longer the kernel took.
void set_model_counters(benchmark::State& state, const SoftmaxCase& c, const std::string& kernel, double seconds) {
  const std::optional<Traffic> traffic = softmax_traffic(kernel, c.shape());
  if (!traffic) return;
  const double predicted = predicted_seconds(*traffic, measured_ceilings());
  state.counters["model_bytes"] = traffic->bytes;
  state.counters["model_flops"] = traffic->flops;
  state.counters["predicted_us"] = 1e6 * predicted;
  state.counters["vs_predicted"] = seconds / predicted;
}

std::string operands_name(const SoftmaxCase& c) { return std::string(delta_attention::name(c.dtype)) + "/" + c.name(); }

/// Once, if groups overlap.
void add_timed(const SoftmaxCase& c, const std::string& kernel, const std::string& settings, Variant variant) {
  static std::set<std::string> added;
  const std::string name = "softmax_forward/" + kernel + "/" + operands_name(c) + (settings.empty() ? "" : " settings:" + settings) + " " +
                           bench::name(variant);
  if (!added.insert(name).second) return;
  add_benchmark(name, [=](benchmark::State& state) {
    const TimedCall timed = {operands_name(c), [c] { return softmax_operands(c, seed()); }, kernel, settings, variant};
    set_model_counters(state, c, kernel, time_call(state, timed));
  });
}

/// The CUDA kernels that can run the case. The oracle runs on the CPU, where it is not timed.
std::vector<KernelReport> kernels_for(const SoftmaxCase& c) {
  std::vector<KernelReport> kernels = softmax_dispatch_info(shape_only_args(c)).kernels;
  kernels.erase(std::remove_if(kernels.begin(), kernels.end(), [](const KernelReport& report) { return !report.supported; }),
                kernels.end());
  return kernels;
}

void add_kernel(const SoftmaxCase& c, const std::string& kernel, const std::vector<Variant>& variants) {
  for (const KernelReport& report : kernels_for(c)) {
    if (report.kernel != kernel) continue;
    for (const Variant variant : variants) add_timed(c, kernel, "", variant);
  }
}

/// Every combination of values, as Execution::settings.
std::vector<std::string> combinations(const std::vector<Setting>& settings) {
  std::vector<std::string> all = {""};
  for (const Setting& setting : settings) {
    std::vector<std::string> longer;
    for (const std::string& before : all) {
      for (const int value : setting.values) {
        longer.push_back(before + (before.empty() ? "" : ",") + setting.name + "=" + std::to_string(value));
      }
    }
    all = longer;
  }
  return all;
}

/// The kernel with everything that can be chosen; what it refuses is left out.
void add_all_settings(const SoftmaxCase& c, const std::string& kernel) {
  for (const KernelReport& report : kernels_for(c)) {
    if (report.kernel != kernel) continue;
    for (const std::string& settings : combinations(report.settings)) {
      Execution execution;
      execution.kernel = kernel;
      execution.settings = settings;
      if (softmax_dispatch_info(shape_only_args(c), execution).kernel == kernel) add_timed(c, kernel, settings, Variant::graph);
    }
  }
}

SoftmaxCase square(DType dtype, std::int64_t tokens, std::int64_t dim, bool causal = false) {
  SoftmaxCase c;
  c.dtype = dtype;
  c.queries = c.keys = tokens;
  c.dim = dim;
  c.causal = causal;
  return c;
}

/// Every kernel from short to long, unmasked.
void add_every_kernel() {
  for (const std::int64_t dim : kHeadDims) {
    for (std::int64_t tokens = 64; tokens <= 4096; tokens *= 2) {
      const SoftmaxCase c = square(DType::f32, tokens, dim);
      for (const KernelReport& report : kernels_for(c)) add_timed(c, report.kernel, "", Variant::graph);
      add_kernel(square(DType::bf16, tokens, dim), "flash_tc", {Variant::graph});
    }
  }
}

void add_causal_against_full() {
  for (const std::int64_t dim : {64, 128}) {
    for (std::int64_t tokens = 256; tokens <= 8192; tokens *= 2) {
      for (const bool causal : {false, true}) {
        add_kernel(square(DType::f32, tokens, dim, causal), "vec_fused", {Variant::graph, Variant::cold});
        add_kernel(square(DType::bf16, tokens, dim, causal), "flash_tc", {Variant::graph, Variant::cold});
      }
    }
  }
}

void add_storage_types() {
  for (const std::int64_t dim : {64, 128}) {
    for (std::int64_t tokens = 256; tokens <= 4096; tokens *= 2) {
      for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        add_kernel(square(dtype, tokens, dim), "vec_fused", {Variant::graph});
      }
    }
  }
}

void add_settings() {
  for (const std::int64_t dim : kHeadDims) {
    add_all_settings(square(DType::f32, 1024, dim), "rowmax");
    for (const std::int64_t tokens : {1024, 4096}) add_all_settings(square(DType::f32, tokens, dim), "vec_fused");
  }
}

/// One new token a sequence against a cache.
void add_decoding() {
  SoftmaxCase c;
  c.dtype = DType::bf16;
  c.queries = 1;
  c.heads = 32;
  c.dim = 128;
  for (const std::int64_t batch : {1, 8, 64}) {
    for (std::int64_t keys = 1024; keys <= 65536; keys *= 2) {
      for (const std::int64_t page_size : {0, 16, 64}) {
        c.batch = batch;
        c.keys = keys;
        c.page_size = page_size;
        for (const char* kernel : {"decode", "vec_fused"}) add_kernel(c, kernel, {Variant::cold});
      }
    }
  }
}

void register_all() {
  benchmark::AddCustomContext("relative_error_over", "first, middle and last row of the first and the last head");
  measured_ceilings();
  add_every_kernel();
  add_causal_against_full();
  add_storage_types();
  add_settings();
  add_decoding();
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::run_gpu_main(argc, argv, "softmax_forward", bench::register_all); }
