// What a served model asks for: bf16, with the l2norm of q and k, the sigmoid of beta and the gate inside the call, on the lengths, heads
// and packed batches of training and prefill.
//
//   cold     device time of the whole call, L2 flushed before it
//   graph    device time of a graph replay, L2 warm
//
// A benchmark's name is production/<recurrence>/<kernel>/bf16/<shape> [lengths:<packed>] state:both|none [gate:strong|weak] cold|graph.
// state:both reads an initial state and writes a final one, in f32. The kernel is "automatic", its label says which one that is; a list in
// DELTA_ATTENTION_KERNELS replaces it.
//
//   host     host_call/...: what one call takes of the host until it is queued on an idle stream, the median of a repetition's calls
//
// DeltaNet has no gate. GLA takes log decays in f32 and neither l2norm nor beta.

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "support/context.h"
#include "support/delta_operands.h"

namespace bench {
namespace {

Case production_case(const char* preset, std::int64_t tokens, std::int64_t heads) {
  Case c;
  c.preset = preset;
  c.dtype = DType::bf16;
  c.fused = true;
  c.tokens = tokens;
  c.heads = c.value_heads = heads;
  c.decay = c.recurrence().gate == delta_attention::Gate::none ? Decay::none : Decay::strong;
  c.final_state = false;
  return c;
}

/// A call that goes on from one state to the next.
Case with_states(Case c) {
  c.initial_state = c.final_state = true;
  return c;
}

Case packed(Case c, const std::vector<std::int64_t>& lengths) {
  c.lengths = lengths;
  c.tokens = c.offsets().back();
  return c;
}

std::vector<std::int64_t> equal(std::int64_t sequences, std::int64_t tokens) {
  return std::vector<std::int64_t>(static_cast<std::size_t>(sequences), tokens);
}

/// Many heads: all of a layer on one GPU.
std::vector<Case> wide() {
  std::vector<Case> cases;
  for (const std::int64_t heads : {96, 64}) {
    const Case one = with_states(production_case("kda", 8192, heads));
    cases.insert(cases.end(), {one, packed(one, {1300, 547, 2048, 963, 271, 3063}), packed(one, equal(8, 1024))});
  }
  return cases;
}

/// Few heads, as where a layer is split over GPUs, and packed sequences of equal length.
std::vector<Case> split() {
  struct Shape {
    std::int64_t tokens, heads, sequences;
  };
  std::vector<Case> cases;
  for (const Shape& s : {Shape{2048, 12, 1}, {2048, 16, 1}, {4096, 8, 1}, {4096, 12, 1}, {8192, 12, 4}, {8192, 16, 1}, {1024, 4, 1},
                         {3072, 10, 1}, {8192, 24, 1}, {16384, 16, 8}}) {
    cases.push_back(packed(with_states(production_case("kda", s.tokens, s.heads)), equal(s.sequences, s.tokens / s.sequences)));
  }
  return cases;
}

/// Eight heads, from short sequences to long ones and from one to many.
std::vector<Case> lengths(const char* preset) {
  std::vector<Case> cases;
  for (const std::int64_t tokens : {512, 1024, 2048, 4096, 8192, 16384, 65536, 131072}) cases.push_back(production_case(preset, tokens, 8));
  for (const std::int64_t batch : {4, 16}) {
    cases.push_back(production_case(preset, 2048, 8));
    cases.back().batch = batch;
  }
  return cases;
}

/// Value heads in groups of four that share q and k.
std::vector<Case> grouped_heads() {
  std::vector<Case> cases;
  for (const std::int64_t heads : {2, 4, 8, 16}) {
    Case one = with_states(production_case("gated_delta_net", 0, heads));
    one.value_heads = 4 * heads;
    for (const std::int64_t tokens : {2048, 8192, 32768}) {
      cases.push_back(one);
      cases.back().tokens = tokens;
    }
    for (const std::int64_t tokens : {1024, 4096}) cases.push_back(packed(one, equal(8, tokens)));
  }
  return cases;
}

/// A few lengths of what models use less.
std::vector<Case> others(const char* preset, bool fused) {
  std::vector<Case> cases = {production_case(preset, 2048, 8), production_case(preset, 8192, 8), production_case(preset, 2048, 8)};
  cases.back().batch = 16;
  for (Case& c : cases) c.fused = fused;
  return cases;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const auto add = [&](const std::vector<Case>& more) { cases.insert(cases.end(), more.begin(), more.end()); };
  for (const Decay gate : {Decay::strong, Decay::weak}) {
    for (std::vector<Case> some : {wide(), split(), lengths("kda")}) {
      for (Case& c : some) c.decay = gate;
      add(some);
    }
  }
  add(lengths("gated_delta_net"));
  add(grouped_heads());
  add(others("delta_net", true));
  add(others("gla", false));
  return cases;
}

/// "1024x8", or every length of unequal ones.
std::string lengths_text(const std::vector<std::int64_t>& lengths) {
  const auto same = [&](std::int64_t length) { return length == lengths.front(); };
  if (std::all_of(lengths.begin(), lengths.end(), same)) return std::to_string(lengths.front()) + "x" + std::to_string(lengths.size());
  std::string text;
  for (const std::int64_t length : lengths) text += (text.empty() ? "" : ",") + std::to_string(length);
  return text;
}

std::string full_name(const Case& c, const std::string& kernel, const std::string& program) {
  return c.name(kernel, program) + (c.lengths.empty() ? "" : " lengths:" + lengths_text(c.lengths)) +
         (c.initial_state ? " state:both" : " state:none");
}

std::vector<std::string> kernels() {
  const char* list = std::getenv("DELTA_ATTENTION_KERNELS");
  std::istringstream text(list != nullptr && *list != '\0' ? list : "automatic");
  std::vector<std::string> names;
  for (std::string name; std::getline(text, name, ',');) names.push_back(name);
  return names;
}

/// The kernel that would run; empty if none can.
std::string chosen_kernel(const Case& c, const std::string& kernel) {
  delta_attention::Execution execution;
  execution.kernel = kernel;
  const std::vector<std::int64_t> offsets = c.offsets();
  return dispatch_info(shape_only_args(c, delta_attention::cuda(), {offsets.begin(), offsets.end()}), execution).kernel;
}

void time_on_device(benchmark::State& state, const Case& c, const std::string& kernel, Variant variant) {
  const double seconds = time_call(state, {full_name(c, "", ""), [=] { return delta_operands(c, seed()); }, kernel, "", variant});
  if (variant == Variant::cold) state.counters["vs_floor"] = seconds / (least_bytes(c) / gpu_facts().bytes_per_second);
}

void time_on_host(benchmark::State& state, const Case& c, const std::string& kernel) {
  const std::unique_ptr<Operands> operands = delta_operands(c, seed());
  const std::unique_ptr<CudaCall> call = operands->call(kernel, "");
  call->time_cold(1);  // loads the kernels
  std::vector<double> seconds = call->time_host(static_cast<std::int64_t>(state.max_iterations));
  std::nth_element(seconds.begin(), seconds.begin() + seconds.size() / 2, seconds.end());
  for (auto _ : state) state.SetIterationTime(seconds[seconds.size() / 2]);
  state.counters["relative_error"] = operands->relative_error();
}

void add_case(const Case& c) {
  for (const std::string& kernel : kernels()) {
    const std::string chosen = chosen_kernel(c, kernel);
    if (chosen.empty()) continue;
    for (const Variant variant : {Variant::cold, Variant::graph}) {
      add_benchmark(full_name(c, kernel, "production") + " " + name(variant), [=](benchmark::State& state) {
        time_on_device(state, c, kernel, variant);
        if (chosen != kernel) state.SetLabel(chosen);
      });
    }
  }
}

void add_host_call(const Case& c) {
  const std::string chosen = chosen_kernel(c, "automatic");
  if (chosen.empty()) return;
  add_benchmark(full_name(c, "automatic", "host_call") + " host", [=](benchmark::State& state) {
    time_on_host(state, c, "automatic");
    state.SetLabel(chosen);
  });
}

void register_all() {
  benchmark::AddCustomContext("relative_error_over", checked_part());
  for (const Case& c : all_cases()) add_case(c);
  const Case small = production_case("kda", 1024, 8);
  for (const Case& c : {small, packed(with_states(small), {300, 547, 100, 77})}) add_host_call(c);
}

}  // namespace
}  // namespace bench

int main(int argc, char** argv) { return bench::run_gpu_main(argc, argv, "production", bench::register_all); }
