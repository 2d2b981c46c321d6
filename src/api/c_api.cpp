#include "delta_attention/c_api.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <new>
#include <string>

#include "delta_attention/delta_attention.h"

namespace delta_attention {
namespace {

template <class Enum>
constexpr bool same(Enum value, int c_value) {
  return static_cast<int>(value) == c_value;
}
static_assert(same(DType::f32, DELTA_ATTENTION_C_F32) && same(DType::f16, DELTA_ATTENTION_C_F16) &&
              same(DType::bf16, DELTA_ATTENTION_C_BF16) && same(DType::f64, DELTA_ATTENTION_C_F64) &&
              same(DType::i32, DELTA_ATTENTION_C_I32) && same(DType::i64, DELTA_ATTENTION_C_I64));
static_assert(same(DeviceType::cpu, DELTA_ATTENTION_C_CPU) && same(DeviceType::cuda, DELTA_ATTENTION_C_CUDA));
static_assert(same(Update::additive, DELTA_ATTENTION_C_UPDATE_ADDITIVE) &&
              same(Update::delta, DELTA_ATTENTION_C_UPDATE_DELTA));
static_assert(same(Gate::none, DELTA_ATTENTION_C_GATE_NONE) && same(Gate::scalar, DELTA_ATTENTION_C_GATE_SCALAR) &&
              same(Gate::channel, DELTA_ATTENTION_C_GATE_CHANNEL));
static_assert(same(GateSpace::log, DELTA_ATTENTION_C_GATE_SPACE_LOG) &&
              same(GateSpace::log2, DELTA_ATTENTION_C_GATE_SPACE_LOG2) &&
              same(GateSpace::linear, DELTA_ATTENTION_C_GATE_SPACE_LINEAR) &&
              same(GateSpace::softplus, DELTA_ATTENTION_C_GATE_SPACE_SOFTPLUS) &&
              same(GateSpace::lower_bound, DELTA_ATTENTION_C_GATE_SPACE_LOWER_BOUND));
static_assert(same(BetaSpace::value, DELTA_ATTENTION_C_BETA_SPACE_VALUE) &&
              same(BetaSpace::sigmoid, DELTA_ATTENTION_C_BETA_SPACE_SIGMOID) &&
              same(BetaSpace::twice_sigmoid, DELTA_ATTENTION_C_BETA_SPACE_TWICE_SIGMOID));
static_assert(kMaxRank == DELTA_ATTENTION_C_MAX_RANK);

// The sizes that version 0.1 published. A caller's struct is never smaller; it may be larger than this library knows.
constexpr std::size_t kFirstArgsSize = offsetof(delta_attention_c_args, reserved) + sizeof(std::int32_t);
constexpr std::size_t kFirstExecutionSize = offsetof(delta_attention_c_execution, reserved) + sizeof(std::int32_t);
constexpr std::size_t kFirstDispatchSize = offsetof(delta_attention_c_dispatch, kernels) + sizeof(const char*);
constexpr std::size_t kDispatchSizeWithSettings = offsetof(delta_attention_c_dispatch, settings) + sizeof(const char*);

// What the C interface hands out as text, one of each a thread.
thread_local std::string last_error;
thread_local DispatchInfo last_dispatch;
thread_local std::string last_kernel_list;

void remember(const char* message) noexcept {
  try {
    last_error = message;
  } catch (...) {
    last_error.clear();  // no memory even for the message: the status still tells
  }
}

delta_attention_c_status fail(delta_attention_c_status status, const char* message) noexcept {
  remember(message);
  return status;
}

/// Runs `body` and turns whatever it throws into a status.
template <class Body>
delta_attention_c_status guarded(Body body) noexcept {
  try {
    body();
    return DELTA_ATTENTION_C_OK;
  } catch (const InvalidArgument& error) {
    return fail(DELTA_ATTENTION_C_INVALID_ARGUMENT, error.what());
  } catch (const NoDevice& error) {
    return fail(DELTA_ATTENTION_C_NO_DEVICE, error.what());
  } catch (const Unsupported& error) {
    return fail(DELTA_ATTENTION_C_UNSUPPORTED, error.what());
  } catch (const OutOfMemory& error) {
    return fail(DELTA_ATTENTION_C_OUT_OF_MEMORY, error.what());
  } catch (const CudaError& error) {
    return fail(DELTA_ATTENTION_C_CUDA_ERROR, error.what());
  } catch (const std::bad_alloc&) {
    return fail(DELTA_ATTENTION_C_OUT_OF_MEMORY, "the system refused memory");
  } catch (const std::exception& error) {
    return fail(DELTA_ATTENTION_C_INTERNAL, error.what());
  } catch (...) {
    return fail(DELTA_ATTENTION_C_INTERNAL, "an unknown exception");
  }
}

/// The caller's struct in this library's size. Fields that the caller's header lacks keep their defaults; fields that this
/// library does not know must be zero, or the caller would be ignored in silence.
template <class Struct>
Struct adopt(const Struct* given, const char* name, std::size_t smallest, void (*init)(Struct*, std::size_t)) {
  if (given == nullptr) throw InvalidArgument(name, "a pointer", "NULL");
  const std::size_t size = given->struct_size;
  if (size < smallest) {
    throw InvalidArgument(fmt::format("{}.struct_size", name),
                          fmt::format("{} or more (call {}_init first)", smallest, name), std::to_string(size));
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + size, [](unsigned char byte) { return byte != 0; })) {
    throw InvalidArgument(name, "fields that version " DELTA_ATTENTION_VERSION " knows", "a newer field that is set");
  }
  Struct known;
  init(&known, sizeof known);
  std::memcpy(&known, given, std::min(size, sizeof known));
  return known;
}

template <class View, class CTensor>
View view_of(const CTensor& x, const char* name) {
  if (x.device_type != DELTA_ATTENTION_C_CPU && x.device_type != DELTA_ATTENTION_C_CUDA) {
    throw InvalidArgument(name, "device_type DELTA_ATTENTION_C_CPU or DELTA_ATTENTION_C_CUDA",
                          std::to_string(x.device_type));
  }
  View view;
  view.data = x.data;
  view.dtype = static_cast<DType>(x.dtype);
  view.device = {static_cast<DeviceType>(x.device_type), x.device_index};
  view.rank = x.rank;
  std::copy(std::begin(x.shape), std::end(x.shape), view.shape.begin());
  std::copy(std::begin(x.strides), std::end(x.strides), view.strides.begin());
  return view;
}

void require_unreserved(const char* name, std::int32_t value) {
  if (value != 0) throw InvalidArgument(name, "0", std::to_string(value));
}

ForwardArgs forward_args(const delta_attention_c_args* given) {
  const delta_attention_c_args c = adopt(given, "delta_attention_c_args", kFirstArgsSize, delta_attention_c_args_init);
  require_unreserved("args.reserved", c.reserved);
  ForwardArgs args;
  args.q = view_of<ConstTensor>(c.q, "q");
  args.k = view_of<ConstTensor>(c.k, "k");
  args.v = view_of<ConstTensor>(c.v, "v");
  args.log_decay = view_of<ConstTensor>(c.log_decay, "log_decay");
  args.beta = view_of<ConstTensor>(c.beta, "beta");
  args.initial_state = view_of<ConstTensor>(c.initial_state, "initial_state");
  args.initial_normalizer = view_of<ConstTensor>(c.initial_normalizer, "initial_normalizer");
  args.cu_seqlens = view_of<ConstTensor>(c.cu_seqlens, "cu_seqlens");
  args.a_log = view_of<ConstTensor>(c.a_log, "a_log");
  args.dt_bias = view_of<ConstTensor>(c.dt_bias, "dt_bias");
  args.out = view_of<Tensor>(c.out, "out");
  args.final_state = view_of<Tensor>(c.final_state, "final_state");
  args.final_normalizer = view_of<Tensor>(c.final_normalizer, "final_normalizer");
  args.intermediate_states = view_of<Tensor>(c.intermediate_states, "intermediate_states");
  args.state_interval = c.state_interval;
  args.recurrence = {static_cast<Update>(c.recurrence.update), static_cast<Gate>(c.recurrence.gate),
                     c.recurrence.normalize != 0};
  if (c.has_scale != 0) args.scale = c.scale;
  args.qk_l2norm = c.qk_l2norm != 0;
  args.beta_space = static_cast<BetaSpace>(c.beta_space);
  args.gate_space = static_cast<GateSpace>(c.gate_space);
  args.gate_lower_bound = c.gate_lower_bound;
  return args;
}

Execution execution_of(const delta_attention_c_execution* given) {
  Execution execution;
  if (given == nullptr) return execution;
  const delta_attention_c_execution c =
      adopt(given, "delta_attention_c_execution", kFirstExecutionSize, delta_attention_c_execution_init);
  require_unreserved("execution.reserved", c.reserved);
  execution.stream = c.stream;
  execution.workspace = c.workspace;
  execution.workspace_bytes = c.workspace_bytes;
  if (c.kernel != nullptr) execution.kernel = c.kernel;
  if (c.settings != nullptr) execution.settings = c.settings;
  execution.deterministic = c.deterministic != 0;
  execution.threads = c.threads;
  execution.check_values = c.check_values != 0;
  return execution;
}

std::string kernel_list(const DispatchInfo& info) {
  std::string lines;
  for (const KernelReport& report : info.kernels) {
    lines += fmt::format("{}: {}\n", report.kernel, report.supported ? "ok" : report.reason);
  }
  return lines;
}

/// Zeroes a caller's struct of any version and notes its size; a NULL or impossibly small one is left alone, and the call
/// that it is passed to will refuse it.
template <class Struct>
bool clear(Struct* target, std::size_t struct_size) {
  if (target == nullptr || struct_size < sizeof(std::size_t)) return false;
  std::memset(static_cast<void*>(target), 0, struct_size);
  target->struct_size = struct_size;
  return true;
}

template <class CTensor, class Pointer>
CTensor contiguous_view(Pointer data, std::int32_t dtype, std::int32_t rank, const std::int64_t* shape) {
  CTensor x = {};
  x.data = data;
  x.dtype = dtype;
  x.rank = rank;
  if (shape == nullptr || rank < 0 || rank > kMaxRank) return x;  // the call that gets it reports the rank
  std::int64_t stride = 1;
  for (int axis = rank - 1; axis >= 0; --axis) {
    x.shape[axis] = shape[axis];
    x.strides[axis] = stride;
    // An overflow saturates, and the call that gets the view refuses strides of that size.
    if (__builtin_mul_overflow(stride, shape[axis], &stride)) stride = std::numeric_limits<std::int64_t>::max();
  }
  return x;
}

}  // namespace
}  // namespace delta_attention

using namespace delta_attention;

void delta_attention_c_args_init(delta_attention_c_args* args, size_t struct_size) {
  if (clear(args, struct_size) && struct_size >= kFirstArgsSize) {
    args->gate_lower_bound = ForwardArgs().gate_lower_bound;
  }
}

void delta_attention_c_execution_init(delta_attention_c_execution* execution, size_t struct_size) {
  clear(execution, struct_size);
}

void delta_attention_c_dispatch_init(delta_attention_c_dispatch* dispatch, size_t struct_size) {
  clear(dispatch, struct_size);
}

delta_attention_c_const_tensor delta_attention_c_input(const void* data, int32_t dtype, int32_t rank,
                                                       const int64_t* shape) {
  return contiguous_view<delta_attention_c_const_tensor>(data, dtype, rank, shape);
}

delta_attention_c_tensor delta_attention_c_output(void* data, int32_t dtype, int32_t rank, const int64_t* shape) {
  return contiguous_view<delta_attention_c_tensor>(data, dtype, rank, shape);
}

delta_attention_c_recurrence delta_attention_c_recurrence_named(const char* name) {
  for (const Preset& preset : kPresets) {
    if (name != nullptr && std::strcmp(name, preset.name) == 0) {
      return {static_cast<std::int32_t>(preset.recurrence.update), static_cast<std::int32_t>(preset.recurrence.gate),
              preset.recurrence.normalize ? 1 : 0};
    }
  }
  return {-1, 0, 0};
}

delta_attention_c_status delta_attention_c_forward(const delta_attention_c_args* args,
                                                   const delta_attention_c_execution* execution) {
  return guarded([&] { delta_attention_forward(forward_args(args), execution_of(execution)); });
}

delta_attention_c_status delta_attention_c_workspace(const delta_attention_c_args* args,
                                                     const delta_attention_c_execution* execution, size_t* bytes) {
  return guarded([&] {
    if (bytes == nullptr) throw InvalidArgument("bytes", "a pointer", "NULL");
    *bytes = delta_attention_workspace(forward_args(args), execution_of(execution));
  });
}

delta_attention_c_status delta_attention_c_dispatch_info(const delta_attention_c_args* args,
                                                         const delta_attention_c_execution* execution,
                                                         delta_attention_c_dispatch* dispatch) {
  return guarded([&] {
    adopt(dispatch, "delta_attention_c_dispatch", kFirstDispatchSize, delta_attention_c_dispatch_init);
    DispatchInfo info = dispatch_info(forward_args(args), execution_of(execution));
    last_kernel_list = kernel_list(info);
    last_dispatch = std::move(info);
    dispatch->kernel = last_dispatch.kernel.c_str();
    dispatch->reason = last_dispatch.reason.c_str();
    dispatch->kernels = last_kernel_list.c_str();
    if (dispatch->struct_size >= kDispatchSizeWithSettings) dispatch->settings = last_dispatch.settings.c_str();
  });
}

const char* delta_attention_c_last_error(void) { return last_error.c_str(); }

const char* delta_attention_c_status_name(delta_attention_c_status status) {
  switch (status) {
    case DELTA_ATTENTION_C_OK: return "OK";
    case DELTA_ATTENTION_C_INVALID_ARGUMENT: return "INVALID_ARGUMENT";
    case DELTA_ATTENTION_C_UNSUPPORTED: return "UNSUPPORTED";
    case DELTA_ATTENTION_C_NO_DEVICE: return "NO_DEVICE";
    case DELTA_ATTENTION_C_OUT_OF_MEMORY: return "OUT_OF_MEMORY";
    case DELTA_ATTENTION_C_CUDA_ERROR: return "CUDA_ERROR";
    case DELTA_ATTENTION_C_INTERNAL: return "INTERNAL";
  }
  return "unknown status";
}

const char* delta_attention_c_version(void) { return DELTA_ATTENTION_VERSION; }
