#pragma once

// How a call runs: never changes what it computes, beyond rounding.

#include <cstddef>
#include <string>

namespace delta_attention {

struct Execution {
  /// CUDA stream (a cudaStream_t); null is the default stream of the tensors' device. Ignored on the CPU.
  void* stream = nullptr;

  /// Scratch memory on the tensors' device, 256-byte aligned, at least delta_attention_workspace() bytes.
  /// With one, a CUDA call allocates nothing and can be captured in a CUDA graph. Without one, it allocates what it needs,
  /// stream-ordered, with cudaMallocAsync. CPU kernels keep their buffers, whose size depends on the threads, to themselves.
  void* workspace = nullptr;
  std::size_t workspace_bytes = 0;

  /// A kernel's name, or "automatic" to let dispatch choose. dispatch_info() lists the names.
  std::string kernel = "automatic";

  /// Settings of the kernel asked for by name: "name=int,name=int". What is not named here comes from the table of settings
  /// tuned for the device, or else from the kernel's own rule. dispatch_info() lists each kernel's names and values.
  std::string settings;

  /// Refuse kernels whose results may differ in the last bits from run to run.
  bool deterministic = false;

  /// CPU threads; 0 means all cores.
  int threads = 0;

  /// Also check values: cu_seqlens, gates <= 0 (linear gates in [0,1]) and pointers. On CUDA this reads the tensors back
  /// and so synchronises; leave it off inside graph capture. cu_seqlens in CPU memory is always checked.
  bool check_values = false;
};

}  // namespace delta_attention
