// CUDA streams, graphs, devices and memory: what the GPU side of the API promises beyond its numbers.

#include <cuda_runtime_api.h>

#include <memory>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

#define REQUIRE_CUDA(call) ASSERT_EQ((call), cudaSuccess) << #call

class Stream {
 public:
  Stream() {
    if (cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) {
      throw std::runtime_error("no stream");
    }
  }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class CudaStreams : public KernelTest {
 protected:
  /// This kernel on `stream`, with a workspace of its own that this object keeps.
  Execution on_stream(const Call& call, cudaStream_t stream) {
    Execution result = execution();
    result.stream = stream;
    result.workspace_bytes = delta_attention_workspace(call.args, result);
    workspaces_.push_back(std::make_unique<GuardedBuffer>(device(), result.workspace_bytes));
    result.workspace = workspaces_.back()->data();
    return result;
  }
  void TearDown() override {
    for (const auto& workspace : workspaces_) EXPECT_TRUE(workspace->guards_intact()) << "a workspace was overrun";
    workspaces_.clear();
    KernelTest::TearDown();
  }

  Case packed_case() const {
    Case c;
    c.recurrence = kda();
    c.cu_seqlens = {0, 5, 9, 16};
    c.tokens = 16;
    c.key_dim = c.value_dim = 32;
    c.with_initial_state = true;
    return c;
  }

 private:
  std::vector<std::unique_ptr<GuardedBuffer>> workspaces_;
};

TEST_P(CudaStreams, C03_GraphCaptureAndReplayWithNewOffsets) {
  for (DType cu_dtype : {DType::i32, DType::i64}) {
    Case c = packed_case();
    c.cu_dtype = cu_dtype;
    const Inputs first = make_inputs(c, random);
    Call call(first, device());
    Stream stream;
    Execution execution;
    try {
      execution = on_stream(call, stream);
    } catch (const Unsupported& refusal) {
      GTEST_SKIP() << refusal.what();
    }
    cudaGraph_t graph = nullptr;
    REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    delta_attention_forward(call.args, execution);
    REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
    device_synchronize(device());
    EXPECT_TRUE(call.outputs_untouched()) << "capturing has run something";
    cudaGraphExec_t executable = nullptr;
    REQUIRE_CUDA(cudaGraphInstantiate(&executable, graph, 0));

    REQUIRE_CUDA(cudaGraphLaunch(executable, stream));
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    expect_matches(first, call.outputs(), oracle(first));

    Case other = c;
    other.cu_seqlens = {0, 1, 15, 16};
    const Inputs second = make_inputs(other, random);
    call.put(second);
    call.poison_outputs();
    REQUIRE_CUDA(cudaGraphLaunch(executable, stream));
    REQUIRE_CUDA(cudaStreamSynchronize(stream));
    const Outputs replayed = call.outputs();
    expect_matches(second, replayed, oracle(second));
    const auto eager = run(second);
    ASSERT_TRUE(eager);
    EXPECT_TRUE(replayed == *eager);
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }
}

// C09: with a workspace, a forward neither allocates nor waits. A capture in global mode fails on either, in any thread; stream-
// ordered allocations, which a capture would record, show in the pool's high-water mark.
TEST_P(CudaStreams, C09_ForwardAllocatesNothingAndWaitsForNothing) {
  const Inputs inputs = make_inputs(packed_case(), random);
  Call call(inputs, device());
  Stream stream;
  Execution execution;
  try {
    execution = on_stream(call, stream);
  } catch (const Unsupported& refusal) {
    GTEST_SKIP() << refusal.what();
  }
  cudaMemPool_t pool = nullptr;
  REQUIRE_CUDA(cudaDeviceGetDefaultMemPool(&pool, device().index));
  std::uint64_t used_before = 0, high = 0, reset = 0;
  REQUIRE_CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &used_before));
  REQUIRE_CUDA(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &reset));
  for (int i = 0; i < 100; ++i) delta_attention_forward(call.args, execution);
  REQUIRE_CUDA(cudaStreamSynchronize(stream));
  REQUIRE_CUDA(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemHigh, &high));
  EXPECT_LE(high, used_before);

  cudaGraph_t graph = nullptr;
  REQUIRE_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < 100; ++i) delta_attention_forward(call.args, execution);
  REQUIRE_CUDA(cudaStreamEndCapture(stream, &graph));
  cudaGraphDestroy(graph);
  expect_matches(inputs, call.outputs(), oracle(inputs));
}

TEST_P(CudaStreams, C01_SameBitsWhileAnotherStreamThrashesTheCache) {
  if (!GetParam().repeatable) GTEST_SKIP() << "does not claim to be repeatable";
  constexpr std::size_t kThrash = std::size_t{256} << 20;
  void* thrash = device_allocate(device(), kThrash);
  Case c = packed_case();
  c.cu_seqlens = {0, 0, 100, 257};
  c.tokens = 257;
  Call call(make_inputs(c, random), device());
  Stream stream, noise;
  Outputs first;
  bool supported = true;
  try {
    const Execution execution = on_stream(call, stream);
    for (int repeat = 0; repeat < (small_run() ? 5 : 100) && !HasFailure(); ++repeat) {
      call.poison_outputs();
      for (int i = 0; i < 4; ++i) cudaMemsetAsync(thrash, repeat, kThrash, noise);
      delta_attention_forward(call.args, execution);
      device_synchronize(device());
      const Outputs now = call.outputs();
      if (repeat == 0) first = now;
      EXPECT_TRUE(now == first) << "repeat " << repeat;
    }
  } catch (const Unsupported&) {
    supported = false;
  }
  device_free(device(), thrash);
  if (!supported) GTEST_SKIP() << "cannot run this problem";
}

TEST_P(CudaStreams, TwoStreamsAtOnce) {
  Case c = packed_case();
  c.cu_seqlens.clear();
  c.tokens = 500;
  const Inputs a = make_inputs(c, random), b = make_inputs(c, random);
  Call call_a(a, device()), call_b(b, device());
  Stream stream_a, stream_b;
  try {
    const Execution on_a = on_stream(call_a, stream_a), on_b = on_stream(call_b, stream_b);
    for (int i = 0; i < 20; ++i) {
      delta_attention_forward(call_a.args, on_a);
      delta_attention_forward(call_b.args, on_b);
    }
  } catch (const Unsupported& refusal) {
    GTEST_SKIP() << refusal.what();
  }
  device_synchronize(device());
  expect_matches(a, call_a.outputs(), oracle(a));
  expect_matches(b, call_b.outputs(), oracle(b));
}

TEST_P(CudaStreams, V09_WrongOffsetsInDeviceMemoryNeverLeaveTheTensors) {
  for (const std::vector<Index>& cu :
       std::vector<std::vector<Index>>{{0, 1000, 9, 16}, {-7, 5, 2, 16}, {16, 16, 0, 0}, {3, 2, 1, 1 << 30}}) {
    Case c = packed_case();
    const Inputs good = make_inputs(c, random);
    Inputs wild = good;
    wild.problem.cu_seqlens = cu;
    Call call(wild, device());
    if (run(call)) call.outputs();  // whatever the numbers, guards and inputs are compared
  }
}

TEST_P(CudaStreams, C06_BuffersOnAnotherDeviceThanTheCurrentOne) {
  int count = 0;
  REQUIRE_CUDA(cudaGetDeviceCount(&count));
  if (count < 2) GTEST_SKIP() << "one GPU only";
  const Inputs inputs = make_inputs(packed_case(), random);
  REQUIRE_CUDA(cudaSetDevice(0));
  Call far(inputs, cuda(1)), near(inputs, cuda(0));
  if (!run(far)) return;
  int current = -1;
  REQUIRE_CUDA(cudaGetDevice(&current));
  EXPECT_EQ(current, 0) << "the caller's device was not restored";
  expect_matches(inputs, far.outputs(), oracle(inputs));
  near.args.k = far.args.k;
  try {
    run(near);
    ADD_FAILURE() << "mixed devices were taken";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "k");
    EXPECT_TRUE(near.outputs_untouched());
  }
}

TEST_P(CudaStreams, C06_HostMemoryUnderADevicesNameIsNoticedWhenValuesAreChecked) {
  const Inputs inputs = make_inputs(packed_case(), random);
  Call call(inputs, device());
  call.args.v.data = inputs.v.values.data();
  Execution strict = execution();
  strict.check_values = true;
  try {
    if (run(call, strict)) ADD_FAILURE() << "host memory was taken as the device's";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.argument(), "v") << error.what();
    EXPECT_TRUE(call.outputs_untouched());
  }
}

TEST(CudaDevices, ADeviceThatIsNotThere) {
  const std::string reason = cuda_skip_reason();
  if (!reason.empty()) GTEST_SKIP() << reason;
  int count = 0;
  REQUIRE_CUDA(cudaGetDeviceCount(&count));
  Case c;
  Call call(zero_inputs(c), cuda(0));
  for (ConstTensor* view : {&call.args.q, &call.args.k, &call.args.v, &call.args.beta}) view->device = cuda(count);
  call.args.out.device = call.args.final_state.device = cuda(count);
  EXPECT_THROW(delta_attention_forward(call.args), NoDevice);
}

INSTANTIATE_TEST_SUITE_P(EveryKernel, CudaStreams, ::testing::ValuesIn(cuda_kernels()), kernel_test_name);

}  // namespace
}  // namespace delta_attention::test
