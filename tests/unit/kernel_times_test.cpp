// Which kernel `automatic` takes where kernels were measured. Kernels, devices and times are invented here.

#include "api/kernel_times.h"

#include <gtest/gtest.h>

#include "api/dispatch.h"

namespace delta_attention {
namespace {

using Times = std::vector<KernelTimesRow::Time>;

std::string takes_all(const Problem&, const DeviceProperties&, const Settings&) { return ""; }
std::string no_packed(const Problem& p, const DeviceProperties&, const Settings&) {
  return p.cu_seqlens.present ? "no packed sequences" : "";
}
void no_launch(const Launch&) {}

Kernel fake(const char* name, int priority, bool repeatable = true) {
  const auto unsupported = std::string(name) == "picky" ? no_packed : takes_all;
  return {name, "a fake", DeviceType::cuda, repeatable, priority, no_settings, unsupported, no_workspace, no_launch};
}

const Kernel kSteps = fake("steps", 0), kPicky = fake("picky", 5), kLoose = fake("loose", 1, false), kChunks = fake("chunks", 10),
             kShy = fake("shy", -1);
const std::vector<const Kernel*> kAll = {&kSteps, &kPicky, &kLoose, &kChunks, &kShy};
const TunedTable kNothingTuned({}, {});

KernelTimesRow row(DType dtype, Update update, Gate gate, std::int64_t dim, std::int64_t tokens, std::int64_t chains, const Times& times) {
  return {"A GPU", 90, dtype, update, gate, dim, dim, tokens, chains, times};
}

KernelTimesRow plain(std::int64_t tokens, std::int64_t chains, const Times& times) {
  return row(DType::f32, Update::delta, Gate::none, 128, tokens, chains, times);
}

DeviceProperties gpu(int capability) {
  DeviceProperties device;
  device.type = DeviceType::cuda;
  device.name = "Another GPU";
  device.capability = capability;
  return device;
}

Problem problem(std::int64_t tokens, std::int64_t chains) {
  Problem p;
  p.batch = p.sequences = 1;
  p.heads = p.value_heads = chains;
  p.key_dim = p.value_dim = 128;
  p.tokens = tokens;
  p.update = Update::delta;
  return p;
}

/// Short sequences are for `steps`, long ones for `chunks`; 'picky' is the fastest in the middle.
KernelTimes invented() {
  return KernelTimes({plain(1, 8, {{"chunks", 9.0}, {"steps", 4.0}, {"shy", 1.0}, {"unknown", 0.5}}),
                      plain(64, 8, {{"picky", 10.0}, {"chunks", 20.0}, {"loose", 15.0}, {"steps", 250.0}}),
                      plain(4096, 8, {{"steps", 16000.0}, {"chunks", 250.0}, {"picky", 410.0}})},
                     kAll);
}

std::string chosen(const Problem& p, const KernelTimes& times, int capability = 90, const Execution& execution = {}) {
  const Choice choice = choose(p, gpu(capability), execution, kAll, kNothingTuned, times);
  return choice.kernel == nullptr ? "" : choice.kernel->name;
}

DispatchInfo info(const Problem& p, const KernelTimes& times, const Execution& execution = {}) {
  return explain(p, gpu(90), execution, kAll, kNothingTuned, times);
}

TEST(KernelTimes, TheFastestAtTheNearestMeasuredProblemRuns) {
  const KernelTimes times = invented();
  EXPECT_EQ(chosen(problem(1, 8), times), "steps");
  EXPECT_EQ(chosen(problem(7, 8), times), "steps");  // 7 is nearer to 1 than to 64
  EXPECT_EQ(chosen(problem(9, 8), times), "picky");
  EXPECT_EQ(chosen(problem(500, 8), times), "picky");
  EXPECT_EQ(chosen(problem(600, 8), times), "chunks");
  EXPECT_EQ(chosen(problem(1 << 20, 1000), times), "chunks");
  EXPECT_EQ(chosen(problem(0, 8), times), "steps");
}

TEST(KernelTimes, WhereItRefusesTheNextFastestRuns) {
  const KernelTimes times = invented();
  Problem packed = problem(64, 8);
  packed.cu_seqlens.present = true;
  EXPECT_EQ(chosen(packed, times), "loose");
  Execution deterministic;
  deterministic.deterministic = true;
  EXPECT_EQ(chosen(packed, times, 90, deterministic), "chunks");
  const KernelTimes only_picky({plain(64, 8, {{"picky", 1.0}})}, kAll);
  EXPECT_EQ(chosen(problem(64, 8), only_picky), "picky");
  EXPECT_EQ(chosen(packed, only_picky), "chunks");  // by priority
}

TEST(KernelTimes, ByPriorityWhereNothingWasMeasured) {
  for (const int capability : {0, 80, 89, 100, 120}) EXPECT_EQ(chosen(problem(1, 8), invented(), capability), "chunks") << capability;
  EXPECT_EQ(chosen(problem(1, 8), KernelTimes({}, kAll)), "chunks");
}

TEST(KernelTimes, AKernelAskedForByNameRunsWhateverItsTime) {
  Execution execution;
  execution.kernel = "chunks";
  EXPECT_EQ(chosen(problem(1, 8), invented(), 90, execution), "chunks");
  EXPECT_EQ(info(problem(1, 8), invented(), execution).reason, "asked for by name");
}

TEST(KernelTimes, OnlyCandidatesRun) {
  const KernelTimes times = invented();
  EXPECT_EQ(choose(problem(1, 8), gpu(90), {}, {&kChunks, &kPicky}, kNothingTuned, times).kernel, &kChunks);
  EXPECT_EQ(choose(problem(64, 8), gpu(90), {}, {&kSteps}, kNothingTuned, times).kernel, &kSteps);
}

TEST(KernelTimes, SizesAndKindsDecideTogether) {
  // Each row's fastest kernel is another.
  const KernelTimes times({row(DType::f32, Update::delta, Gate::none, 128, 64, 8, {{"steps", 1.0}}),
                           row(DType::bf16, Update::delta, Gate::none, 128, 64, 8, {{"picky", 1.0}}),
                           row(DType::f32, Update::delta, Gate::channel, 128, 4096, 8, {{"loose", 1.0}}),
                           row(DType::f32, Update::delta, Gate::none, 64, 4096, 128, {{"chunks", 1.0}})},
                          kAll);
  Problem p = problem(64, 8);
  p.gate = Gate::channel;
  EXPECT_EQ(chosen(p, times), "steps");  // a gate weighs less than six doublings of T
  p.update = Update::additive;
  EXPECT_EQ(chosen(p, times), "steps");
  p.dtype = DType::f16;
  EXPECT_EQ(chosen(p, times), "picky");  // 16 bits are like 16 bits
  p = problem(4096, 8);
  EXPECT_EQ(chosen(p, times), "loose");
  p.key_dim = p.value_dim = 64;
  p.value_heads = 64;
  EXPECT_EQ(chosen(p, times), "chunks");
}

TEST(KernelTimes, TheReasonNamesTheMeasurement) {
  const KernelTimes times = invented();
  EXPECT_EQ(info(problem(5000, 8), times).reason,
            "fastest of the kernels measured at B*HV=8 T=4096 K=128 V=128 f32 on A GPU (250 us; next picky 410 us)");
  Problem packed = problem(64, 8);
  packed.cu_seqlens.present = true;
  EXPECT_EQ(info(packed, times).reason,
            "fastest of the kernels measured at B*HV=8 T=64 K=128 V=128 f32 on A GPU (15 us; next chunks 20 us)");
  EXPECT_EQ(info(problem(64, 8), KernelTimes({plain(64, 8, {{"picky", 1.25}})}, kAll)).reason,
            "fastest of the kernels measured at B*HV=8 T=64 K=128 V=128 f32 on A GPU (1.25 us)");
  EXPECT_EQ(info(packed, KernelTimes({plain(64, 8, {{"picky", 1.25}})}, kAll)).reason,
            "the preferred kernel for this problem on Another GPU");
}

TEST(KernelTimes, TheCommittedOnesAreOfThisBuildsKernels) {
  Problem p = problem(2048, 8);
  p.gate = Gate::scalar;
  bool any = false;
  for (const Kernel* kernel : kernels()) any |= kernel->device == DeviceType::cuda;
  const MeasuredProblem* measured = kernel_times().find(p, gpu(90));
  ASSERT_EQ(measured != nullptr, any);
  if (!any) GTEST_SKIP() << "built without CUDA";
  EXPECT_EQ(measured->row.tokens, 2048);
  EXPECT_EQ(measured->row.chains, 8);
  EXPECT_EQ(measured->row.gate, Gate::scalar);
  EXPECT_GT(measured->fastest_first.size(), 1u);
}

}  // namespace
}  // namespace delta_attention
