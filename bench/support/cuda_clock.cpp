#include "support/cuda_clock.h"

#include <chrono>
#include <fstream>
#include <utility>

#include "cuda/device/runtime.h"

namespace bench {
namespace {

using delta_attention::delta_attention_forward;
using delta_attention::delta_attention_workspace;

int attribute(cudaDeviceAttr which) {
  int value = 0;
  DELTA_ATTENTION_CUDA(cudaDeviceGetAttribute(&value, which, 0));
  return value;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// The version of the kernel driver; the CUDA runtime only tells the CUDA version that the driver serves.
std::string driver_version() {
  std::ifstream file("/sys/module/nvidia/version");
  std::string version;
  if (file >> version) return version;
  int cuda = 0;
  DELTA_ATTENTION_CUDA(cudaDriverGetVersion(&cuda));
  return "serves CUDA " + version_text(cuda);
}

GpuFacts read_gpu_facts() {
  GpuFacts facts;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    cudaGetLastError();
    return facts;
  }
  facts.present = true;
  cudaDeviceProp properties{};
  DELTA_ATTENTION_CUDA(cudaGetDeviceProperties(&properties, 0));
  facts.name = properties.name;
  facts.driver = driver_version();
  int runtime = 0;
  DELTA_ATTENTION_CUDA(cudaRuntimeGetVersion(&runtime));
  facts.cuda = version_text(runtime);
  facts.l2_bytes = static_cast<std::size_t>(attribute(cudaDevAttrL2CacheSize));
  constexpr double kHertzPerKilohertz = 1e3, kTransfersPerClock = 2.0, kBitsPerByte = 8.0;
  facts.bytes_per_second = attribute(cudaDevAttrMemoryClockRate) * kHertzPerKilohertz * kTransfersPerClock *
                           attribute(cudaDevAttrGlobalMemoryBusWidth) / kBitsPerByte;
  return facts;
}

class Event {
 public:
  Event() { DELTA_ATTENTION_CUDA(cudaEventCreate(&event_)); }
  Event(Event&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  ~Event() {
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  void record(void* stream) { DELTA_ATTENTION_CUDA(cudaEventRecord(event_, static_cast<cudaStream_t>(stream))); }
  double seconds_since(const Event& start) const {
    float milliseconds = 0.0f;
    DELTA_ATTENTION_CUDA(cudaEventElapsedTime(&milliseconds, start.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Whatever `record` queues on the stream, as a graph that can be launched.
class Graph {
 public:
  Graph(void* stream, const std::function<void()>& record) {
    auto* s = static_cast<cudaStream_t>(stream);
    cudaGraph_t graph = nullptr;
    DELTA_ATTENTION_CUDA(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    try {
      record();
    } catch (...) {
      cudaStreamEndCapture(s, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    DELTA_ATTENTION_CUDA(cudaStreamEndCapture(s, &graph));
    const cudaError_t status = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    delta_attention::cuda_check(status, "cudaGraphInstantiate");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(void* stream) { DELTA_ATTENTION_CUDA(cudaGraphLaunch(executable_, static_cast<cudaStream_t>(stream))); }

 private:
  cudaGraphExec_t executable_ = nullptr;
};

delta_attention::Execution named(const std::string& kernel) {
  delta_attention::Execution execution;
  execution.kernel = kernel;
  return execution;
}

}  // namespace

const GpuFacts& gpu_facts() {
  static const GpuFacts facts = read_gpu_facts();
  return facts;
}

DeviceMemory::DeviceMemory(std::size_t bytes) {
  if (bytes > 0) DELTA_ATTENTION_CUDA(cudaMalloc(&data_, bytes));
}

DeviceMemory::~DeviceMemory() { cudaFree(data_); }

DeviceOperands::DeviceOperands(const Case& c, const HostOperands& host) : case_(c), sizes_(operand_sizes(c)) {
  const Addresses from = host.addresses();
  for (int i = 0; i < kOperands; ++i) {
    memory_.push_back(std::make_unique<DeviceMemory>(sizes_[i]));
    if (sizes_[i] > 0) DELTA_ATTENTION_CUDA(cudaMemcpy(memory_[i]->data(), from[i], sizes_[i], cudaMemcpyHostToDevice));
  }
}

ForwardArgs DeviceOperands::args() const {
  Addresses addresses;
  for (int i = 0; i < kOperands; ++i) addresses[i] = memory_[i]->data();
  return make_args(case_, addresses, delta_attention::cuda());
}

void DeviceOperands::poison_outputs() {
  for (Operand output : {kOut, kFinalState}) {
    DELTA_ATTENTION_CUDA(cudaMemset(memory_[output]->data(), kPoison, sizes_[output]));
  }
  DELTA_ATTENTION_CUDA(cudaDeviceSynchronize());
}

void DeviceOperands::copy_checked_outputs_to(const HostOperands& host) const {
  const Addresses to = host.addresses();
  const auto copy = [&](Operand output, std::size_t begin, std::size_t bytes) {
    DELTA_ATTENTION_CUDA(cudaMemcpy(static_cast<std::byte*>(to[output]) + begin,
                                    static_cast<const std::byte*>(memory_[output]->data()) + begin, bytes,
                                    cudaMemcpyDeviceToHost));
  };
  const std::size_t row = sizes_[kOut] / static_cast<std::size_t>(case_.batch);
  copy(kOut, 0, row);
  copy(kOut, sizes_[kOut] - row, row);
  copy(kFinalState, 0, sizes_[kFinalState]);
}

CudaCall::CudaCall(const Execution& execution, std::size_t workspace_bytes, Launch launch)
    : execution_(execution), workspace_(workspace_bytes), launch_(std::move(launch)) {
  execution_.workspace = workspace_.data();
  execution_.workspace_bytes = workspace_bytes;
  cudaStream_t stream = nullptr;
  DELTA_ATTENTION_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  execution_.stream = stream;
}

CudaCall::CudaCall(const ForwardArgs& args, const std::string& kernel)
    : CudaCall(named(kernel), delta_attention_workspace(args, named(kernel)),
               [args](const Execution& execution) { delta_attention_forward(args, execution); }) {}

CudaCall::~CudaCall() { cudaStreamDestroy(static_cast<cudaStream_t>(execution_.stream)); }

void CudaCall::launch() { launch_(execution_); }

void CudaCall::wait() { DELTA_ATTENTION_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(execution_.stream))); }

void CudaCall::flush_l2() {
  static const std::size_t bytes = 2 * gpu_facts().l2_bytes;
  static const DeviceMemory memory(bytes);
  DELTA_ATTENTION_CUDA(cudaMemsetAsync(memory.data(), 0, bytes, static_cast<cudaStream_t>(execution_.stream)));
}

std::vector<double> CudaCall::time(std::int64_t calls, const std::function<void()>& before,
                                   const std::function<void()>& call) {
  std::vector<Event> starts(calls), stops(calls);
  for (std::int64_t i = 0; i < calls; ++i) {
    before();
    starts[i].record(execution_.stream);
    call();
    stops[i].record(execution_.stream);
  }
  wait();
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < calls; ++i) seconds.push_back(stops[i].seconds_since(starts[i]));
  return seconds;
}

std::vector<double> CudaCall::time_cold(std::int64_t calls) {
  return time(
      calls, [&] { flush_l2(); }, [&] { launch(); });
}

std::vector<double> CudaCall::time_graph(std::int64_t calls) {
  Graph graph(execution_.stream, [&] { launch(); });
  flush_l2();  // keeps the GPU busy while the first replays are queued
  graph.launch(execution_.stream);
  return time(
      calls, [] {}, [&] { graph.launch(execution_.stream); });
}

std::vector<double> CudaCall::time_host(std::int64_t calls) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < calls; ++i) {
    wait();
    const Clock::time_point start = Clock::now();
    launch();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  wait();
  return seconds;
}

}  // namespace bench
