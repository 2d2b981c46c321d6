#pragma once

// Linear and delta attention, forward. One call on CPU and GPU:
//
//     ForwardArgs args;
//     args.q = tensor(q, {B, T, H, K});   args.k = tensor(k, {B, T, H, K});
//     args.v = tensor(v, {B, T, HV, V});  args.beta = tensor(beta, {B, T, HV});
//     args.log_decay = tensor(g, {B, T, HV, K});
//     args.out = tensor(out, {B, T, HV, V});
//     args.recurrence = kda();
//     delta_attention_forward(args);

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "delta_attention/error.h"
#include "delta_attention/execution.h"
#include "delta_attention/recurrence.h"
#include "delta_attention/tensor.h"
#include "delta_attention/version.h"

namespace delta_attention {

/// How the numbers in `log_decay` become the log decay g. Shapes cannot tell these apart, so it is named.
enum class GateSpace : std::int32_t {
  log,          // g = x, natural logarithm, x <= 0
  log2,         // g = x ln 2, x <= 0
  linear,       // g = ln x: x is the decay itself, 0 <= x <= 1
  softplus,     // g = -exp(a_log) softplus(x + dt_bias): Mamba-2, Gated DeltaNet, KDA
  lower_bound,  // g = gate_lower_bound sigmoid(exp(a_log) (x + dt_bias)): the bounded gate of KDA
};

/// How the numbers in `beta` become beta.
enum class BetaSpace : std::int32_t {
  value,          // beta = x
  sigmoid,        // beta = sigmoid(x)
  twice_sigmoid,  // beta = 2 sigmoid(x): allows negative eigenvalues of the transition
};

/// Operands of one forward call. Sizes: B batch, T tokens, H query/key heads, HV value heads (a multiple of H), K key and
/// V value dim, N sequences (N = B, or the number of packed sequences when cu_seqlens is given).
///
/// Floating operands are f32, f16 or bf16; q, k, v and out share one dtype, every other operand has its own. Sums and state are
/// f32 whatever the storage, and so are products, but those of "v5_chunkwise": it multiplies numbers of as many bits as q has, or
/// more. (The kernel "reference" also takes f64 and computes in f64.)
/// q, k, v, out and a per-channel log_decay have stride 1 on their last axis; every other stride is free, so [B,H,T,K]
/// buffers serve through permuted(). Value head h reads query/key head h / (HV / H).
struct ForwardArgs {
  ConstTensor q, k;           // [B,T,H,K]
  ConstTensor v;              // [B,T,HV,V]
  ConstTensor log_decay;      // none (a = 1) | [B,T,HV] for Gate::scalar | [B,T,HV,K] for Gate::channel; see gate_space
  ConstTensor beta;           // none (beta = 1) | [B,T,HV]; see beta_space
  ConstTensor initial_state;  // none (zeros) | [N,HV,K,V], stride 1 on V or on K, so [N,HV,V,K] memory serves permuted
  ConstTensor initial_normalizer;  // none (zeros) | [N,HV,K]; normalised recurrences only
  ConstTensor cu_seqlens;          // none | [N+1] i32 or i64: B = 1 and sequence n is tokens [cu[n], cu[n+1])

  Tensor out;               // [B,T,HV,V]
  Tensor final_state;       // none | [N,HV,K,V], as initial_state; may be the very same memory as initial_state
  Tensor final_normalizer;  // none | [N,HV,K]

  // States on the way, to resume a sequence from: its state after its own first state_interval, 2 state_interval, ... tokens,
  // floor(length / state_interval) of them; those of sequence n+1 follow those of sequence n. M = B floor(T / state_interval):
  // room enough however packed sequences part T, and what they leave over at the end is not written. Normalisers are not kept.
  Tensor intermediate_states;       // none | [M,HV,K,V], strides as initial_state
  std::int64_t state_interval = 0;  // tokens between intermediate states: 1 or more with them, 0 without

  Recurrence recurrence;
  std::optional<float> scale;  // K^-0.5 when not set

  // Optional fusions of what models compute just before the recurrence.
  bool qk_l2norm = false;  // q and k become x / sqrt(sum x^2 + 1e-6)
  BetaSpace beta_space = BetaSpace::value;
  GateSpace gate_space = GateSpace::log;
  ConstTensor a_log;    // [HV]; required by GateSpace::softplus and lower_bound
  ConstTensor dt_bias;  // none (zeros) | [HV] for Gate::scalar | [HV,K] for Gate::channel
  float gate_lower_bound = -5.0f;
};

/// Runs the recurrence over every sequence. CPU or CUDA by the tensors' device; on CUDA the work is queued on
/// execution.stream and the call returns without waiting.
///
/// Any T, T = 0 included; a sequence of no tokens copies its initial state to its final state. Inputs are never modified.
/// Outputs must not overlap the inputs or each other (final_state == initial_state excepted).
/// Throws InvalidArgument, Unsupported, NoDevice, OutOfMemory or CudaError (error.h).
DELTA_ATTENTION_API void delta_attention_forward(const ForwardArgs& args, const Execution& execution = {});

/// Bytes of workspace that delta_attention_forward needs for these arguments; 0 is a possible answer.
/// Looks at shapes only: tensor contents are not read.
DELTA_ATTENTION_API std::size_t delta_attention_workspace(const ForwardArgs& args, const Execution& execution = {});

/// A number that a kernel lets callers choose (Execution::settings), with every value that it can take.
struct Setting {
  const char* name;
  const char* meaning;
  std::vector<int> values;
};

/// What one kernel says to one problem.
struct KernelReport {
  std::string kernel;
  std::string summary;
  bool supported = false;
  std::string reason;  // why not, when not supported
  std::vector<Setting> settings;
};

struct DispatchInfo {
  std::string kernel;                 // the kernel that would run; empty if none can
  std::string reason;                 // why this one
  std::string settings;               // what the caller or the tuned table chose for it; it chooses the rest itself
  std::vector<KernelReport> kernels;  // every kernel of this build
};

/// Which kernel would run and why the others would not. Throws InvalidArgument for arguments that no kernel could take.
DELTA_ATTENTION_API DispatchInfo dispatch_info(const ForwardArgs& args, const Execution& execution = {});

}  // namespace delta_attention
