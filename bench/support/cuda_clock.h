#pragma once

// Device time of calls, by CUDA events, and the CUDA side of operands.

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/inputs.h"

namespace bench {

struct GpuFacts {
  bool present = false;
  std::string name, driver, cuda;
  std::size_t l2_bytes = 0;
  double bytes_per_second = 0.0;  // of device memory: memory clock x bus width
};
const GpuFacts& gpu_facts();

class DeviceMemory {
 public:
  explicit DeviceMemory(std::size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

/// The operands of a case on the GPU.
class DeviceOperands {
 public:
  DeviceOperands(const Case& c, const HostOperands& host);

  ForwardArgs args() const;
  void poison_outputs();
  /// Of the outputs what reference_error.h looks at, and little more: the first and the last batch row, and the states.
  void copy_checked_outputs_to(const HostOperands& host) const;

 private:
  Case case_;
  Sizes sizes_;
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

/// One call with its stream and workspace, timed in any of three ways. Times are seconds, one a call, of device time unless said otherwise.
class CudaCall {
 public:
  using Execution = delta_attention::Execution;
  using Launch = std::function<void(const Execution&)>;

  /// `launch` is called with the stream and workspace beside what `execution` says already.
  CudaCall(const Execution& execution, std::size_t workspace_bytes, Launch launch);
  CudaCall(const ForwardArgs& args, const std::string& kernel);
  ~CudaCall();
  CudaCall(const CudaCall&) = delete;
  CudaCall& operator=(const CudaCall&) = delete;

  /// Before each call a write of twice the L2 cache evicts the operands. While the GPU writes, the CPU queues the call,
  /// so that launch latency does not show.
  std::vector<double> time_cold(std::int64_t calls);

  /// Replays of the call captured in a CUDA graph. Operands that fit L2 are there from the replay before.
  std::vector<double> time_graph(std::int64_t calls);

  /// Host time: what the caller waits until the call is queued, on an idle stream.
  std::vector<double> time_host(std::int64_t calls);

  std::size_t workspace_bytes() const { return execution_.workspace_bytes; }

 private:
  std::vector<double> time(std::int64_t calls, const std::function<void()>& before, const std::function<void()>& call);
  void launch();
  void flush_l2();
  void wait();

  Execution execution_;
  DeviceMemory workspace_;
  Launch launch_;
};

}  // namespace bench
