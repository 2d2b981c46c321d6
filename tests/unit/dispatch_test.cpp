// Which kernel runs and what the others say. Devices and kernels are invented here, so that no GPU is needed.

#include <gtest/gtest.h>

#include <algorithm>

#include "api/architectures.h"
#include "api/dispatch.h"
#include "support/run.h"

namespace delta_attention {
namespace {

using Unsupports = std::string(const Problem&, const DeviceProperties&, const Settings&);
std::string takes_all(const Problem&, const DeviceProperties&, const Settings&) { return ""; }
std::string refuses(const Problem&, const DeviceProperties&, const Settings&) { return "K is a prime number"; }
void no_launch(const Launch&) {}

Kernel fake(const char* name, int priority, bool repeatable = true, DeviceType device = DeviceType::cpu,
            Unsupports* unsupported = takes_all) {
  return {name, "a fake", device, repeatable, priority, no_settings, unsupported, no_workspace, no_launch};
}

DeviceProperties cpu_device() {
  DeviceProperties device;
  device.name = "the CPU";
  return device;
}

Execution by_name(const char* name) {
  Execution execution;
  execution.kernel = name;
  return execution;
}

TEST(Dispatch, TakesTheHighestPriorityThatCanRun) {
  const Kernel slow = fake("slow", 0), fast = fake("fast", 10),
               broken = fake("broken", 20, true, DeviceType::cpu, refuses);
  EXPECT_EQ(choose({}, cpu_device(), {}, {&slow, &broken, &fast}).kernel, &fast);
  const DispatchInfo info = explain({}, cpu_device(), {}, {&slow, &broken, &fast});
  EXPECT_EQ(info.kernel, "fast");
  ASSERT_EQ(info.kernels.size(), 3u);
  EXPECT_TRUE(info.kernels[0].supported);
  EXPECT_FALSE(info.kernels[1].supported);
  EXPECT_EQ(info.kernels[1].reason, "K is a prime number");
  EXPECT_NE(info.reason.find("the CPU"), std::string::npos);
}

TEST(Dispatch, NegativePriorityRunsOnlyByName) {
  const Kernel shy = fake("shy", -1);
  EXPECT_EQ(choose({}, cpu_device(), {}, {&shy}).kernel, nullptr);
  EXPECT_EQ(choose({}, cpu_device(), by_name("shy"), {&shy}).kernel, &shy);
}

TEST(Dispatch, NamedKernelWinsOverPriorityButNotOverItsOwnRefusal) {
  const Kernel slow = fake("slow", 0), fast = fake("fast", 10),
               broken = fake("broken", 20, true, DeviceType::cpu, refuses);
  EXPECT_EQ(choose({}, cpu_device(), by_name("slow"), {&slow, &fast}).kernel, &slow);
  const DispatchInfo refused = explain({}, cpu_device(), by_name("broken"), {&slow, &broken});
  EXPECT_EQ(refused.kernel, "");
  EXPECT_NE(refused.reason.find("broken"), std::string::npos);
}

TEST(Dispatch, DeterministicRefusesKernelsThatDoNotRepeat) {
  const Kernel loose = fake("loose", 10, false), strict = fake("strict", 0);
  Execution execution;
  EXPECT_EQ(choose({}, cpu_device(), execution, {&loose, &strict}).kernel, &loose);
  execution.deterministic = true;
  const DispatchInfo info = explain({}, cpu_device(), execution, {&loose, &strict});
  EXPECT_EQ(info.kernel, "strict");
  EXPECT_NE(info.kernels[0].reason.find("deterministic"), std::string::npos);
}

TEST(Dispatch, KernelsOfTheOtherDeviceSaySo) {
  const Kernel gpu = fake("gpu", 10, true, DeviceType::cuda), host = fake("host", 0);
  const DispatchInfo info = explain({}, cpu_device(), {}, {&gpu, &host});
  EXPECT_EQ(info.kernel, "host");
  EXPECT_EQ(info.kernels[0].reason, "runs on CUDA tensors");
}

TEST(Dispatch, UnknownNameListsWhatWouldDo) {
  try {
    require_kernel({}, cpu_device(), by_name("no_such_kernel"));
    FAIL() << "taken";
  } catch (const Unsupported& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("'no_such_kernel' is not in this build"), std::string::npos) << text;
    EXPECT_NE(text.find("reference"), std::string::npos) << text;
  }
}

TEST(Dispatch, KernelTableIsWellFormed) {
  std::vector<std::string> names;
  for (const Kernel* kernel : kernels()) {
    names.push_back(kernel->name);
    EXPECT_FALSE(std::string(kernel->summary).empty()) << kernel->name;
    ASSERT_NE(kernel->settings, nullptr) << kernel->name;
    EXPECT_NE(kernel->unsupported, nullptr);
    EXPECT_NE(kernel->workspace, nullptr);
    EXPECT_NE(kernel->launch, nullptr);
  }
  EXPECT_EQ(names.front(), "reference");
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end()) << "two kernels of one name";
}

DeviceProperties gpu(int capability) {
  DeviceProperties device;
  device.type = DeviceType::cuda;
  device.name = "GPU of capability " + std::to_string(capability);
  device.capability = capability;
  device.code = code_for(built_architectures(), capability);
  device.multiprocessors = 100;
  device.shared_memory = 99 << 10;
  return device;
}

Problem gpu_problem() {
  Problem p;
  p.batch = p.sequences = 1;
  p.tokens = 64;
  p.heads = p.value_heads = 2;
  p.key_dim = p.value_dim = 64;
  p.update = Update::delta;
  p.gate = Gate::scalar;
  p.device = cuda(0);
  return p;
}

TEST(Dispatch, B01_GpuBeforeTheOldestBuiltArchitecture) {
  bool any = false;
  for (const Kernel* kernel : kernels()) {
    if (kernel->device != DeviceType::cuda) continue;
    any = true;
    const DispatchInfo info = explain(gpu_problem(), gpu(70), {}, {kernel});
    EXPECT_EQ(info.kernel, "") << kernel->name;
    EXPECT_NE(info.kernels[0].reason.find("7.0"), std::string::npos) << info.kernels[0].reason;
    EXPECT_NE(info.kernels[0].reason.find("8.0"), std::string::npos) << info.kernels[0].reason;
  }
  if (!any) GTEST_SKIP() << "built without CUDA";
}

TEST(Dispatch, B02_EveryArchitectureHasAKernelOrAReason) {
  bool any = false;
  for (const Kernel* kernel : kernels()) any |= kernel->device == DeviceType::cuda;
  if (!any) GTEST_SKIP() << "built without CUDA";
  for (int capability : {75, 80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
    const DispatchInfo info = explain(gpu_problem(), gpu(capability), {}, kernels());
    EXPECT_EQ(!info.kernel.empty(), runs_on(built_architectures(), capability)) << capability;
    for (const KernelReport& report : info.kernels) {
      EXPECT_EQ(report.supported, report.reason.empty()) << report.kernel;
    }
  }
}

// 99 KiB a block is what GPUs of 8.6, 8.9 and 12.0 have, and none has less.
TEST(Dispatch, B02_TensorCoresTakeEveryWidthWithTheLeastSharedMemory) {
  const Kernel* chunkwise = nullptr;
  for (const Kernel* kernel : kernels()) {
    if (std::string(kernel->name) == "v5_chunkwise") chunkwise = kernel;
  }
  if (chunkwise == nullptr) GTEST_SKIP() << "built without CUDA";
  for (int capability : {80, 86, 89, 90, 100, 120}) {
    if (!runs_on(built_architectures(), capability)) continue;
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (std::int64_t key_dim : {1, 64, 65, 128, 129, 256}) {
        Problem p = gpu_problem();
        p.dtype = dtype;
        p.key_dim = key_dim;
        EXPECT_EQ(explain(p, gpu(capability), {}, {chunkwise}).kernels[0].reason, "") << capability << ' ' << name(dtype) << " K=" << key_dim;
      }
    }
  }
}

TEST(Dispatch, B02_CodeRunsWhereItsArchitectureSays) {
  const char* by_default = "80-real;90a-real;80-virtual";
  for (int capability : {80, 86, 87, 89, 90, 100, 103, 110, 120, 121}) {
    EXPECT_TRUE(runs_on(by_default, capability)) << capability;
  }
  for (int capability : {50, 70, 75}) EXPECT_FALSE(runs_on(by_default, capability)) << capability;

  struct Row {
    const char* architectures;
    int capability;
    bool runs;
  };
  const Row rows[] = {{"90a-real", 90, true},     {"90a-real", 100, false},
                      {"90a", 80, false},         {"80-real", 86, true},
                      {"86-real", 80, false},     {"80-real", 90, false},
                      {"80", 120, true},          {"100f-real", 103, true},
                      {"100f-real", 110, false},  {"100-real;120", 110, false},
                      {"120-virtual", 121, true}, {"89;90", 89, true},
                      {"native", 90, true},       {"", 90, false}};
  for (const Row& row : rows) {
    EXPECT_EQ(runs_on(row.architectures, row.capability), row.runs) << row.architectures << ' ' << row.capability;
  }
}

// Launches may overlap where the code that runs was made for 9.0 or later, which is not what the GPU alone says.
TEST(Dispatch, B08_TheCodeThatRunsNotTheGpuDecidesWhetherLaunchesOverlap) {
  struct Row {
    const char* architectures;
    int capability, code;
  };
  const Row rows[] = {{"80", 90, 80},
                      {"80-virtual", 90, 80},
                      {"80-real;80-virtual", 120, 80},
                      {"90a-real", 90, 90},
                      {"80-real;90a-real", 90, 90},
                      {"80;90-virtual", 90, 90},
                      {"native", 90, 90},
                      {"all-major", 120, 120},
                      {"80-real;86-real", 89, 86},
                      {"80;90a-real", 100, 80},
                      {"100f-real;80-real", 103, 100},
                      {"90", 100, 90},
                      {"90a-real", 100, 0},
                      {"", 90, 0},
                      {"75", 75, 0}};
  for (const Row& row : rows) {
    EXPECT_EQ(code_for(row.architectures, row.capability), row.code) << row.architectures << ' ' << row.capability;
  }
}

// A06: the query names the kernel and says why, for a table of twelve configurations, and forward runs that kernel.
TEST(DispatchInfo, A06_SaysWhatRunsAndWhy) {
  struct Row {
    Recurrence recurrence;
    DType dtype;
    const char* kernel;
    bool deterministic;
    const char* chosen;  // null: whatever has the highest priority
  };
  const Row rows[] = {{kda(), DType::f32, "automatic", false, nullptr},
                      {kda(), DType::bf16, "automatic", true, nullptr},
                      {kda(), DType::f16, "", false, nullptr},
                      {gated_delta_net(), DType::f32, "reference", false, "reference"},
                      {gated_delta_net(), DType::f16, "reference", true, "reference"},
                      {delta_net(), DType::f32, "automatic", false, nullptr},
                      {gla(), DType::bf16, "automatic", false, nullptr},
                      {retention(), DType::f32, "automatic", false, nullptr},
                      {linear(), DType::f32, "automatic", false, nullptr},
                      {normalized_linear(), DType::f32, "automatic", false, nullptr},
                      {mamba2(), DType::f32, "no_such_kernel", false, ""},
                      {lightning(), DType::f32, "no_such_kernel", true, ""}};
  for (const Row& row : rows) {
    test::Case c;
    c.recurrence = row.recurrence;
    c.dtype = row.dtype;
    c.tokens = 5;
    test::Call call(test::zero_inputs(c), cpu());
    Execution execution = by_name(row.kernel);
    execution.deterministic = row.deterministic;
    const DispatchInfo info = dispatch_info(call.args, execution);
    EXPECT_FALSE(info.reason.empty());
    EXPECT_EQ(info.kernels.size(), kernels().size());
    for (const KernelReport& report : info.kernels) {
      EXPECT_EQ(report.supported, report.reason.empty()) << report.kernel << ": " << report.reason;
      EXPECT_FALSE(report.summary.empty());
    }
    if (row.chosen != nullptr) {
      EXPECT_EQ(info.kernel, row.chosen);
    } else {
      EXPECT_FALSE(info.kernel.empty());
    }
    if (info.kernel.empty()) {
      EXPECT_THROW(delta_attention_forward(call.args, execution), Unsupported);
      EXPECT_TRUE(call.outputs_untouched());
    } else {
      EXPECT_NO_THROW(delta_attention_forward(call.args, by_name(info.kernel.c_str())));
    }
  }
}

TEST(DispatchInfo, F64OperandsRunOnTheReferenceOnly) {
  double q[4] = {}, k[4] = {}, v[4] = {}, out[4] = {};
  ForwardArgs args;
  args.q = tensor(q, {1, 2, 1, 2});
  args.k = tensor(k, {1, 2, 1, 2});
  args.v = tensor(v, {1, 2, 1, 2});
  args.out = tensor(out, {1, 2, 1, 2});
  EXPECT_EQ(dispatch_info(args).kernel, "reference");
  EXPECT_NO_THROW(delta_attention_forward(args));
}

}  // namespace
}  // namespace delta_attention
