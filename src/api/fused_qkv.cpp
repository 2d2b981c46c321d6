#include "delta_attention/fused_qkv.h"

#include <fmt/format.h>

#include "api/check_views.h"
#include "api/device.h"
#include "api/dispatch.h"
#include "api/fused_qkv_kernel.h"

namespace delta_attention {

extern const FusedQkvKernel qkv_cpu_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
extern const FusedQkvKernel qkv_cublaslt_kernel;
#endif

namespace {

Operands operands(const FusedQkvArgs& args) {
  return {{"x", args.x, false}, {"w", args.w, false}, {"bias", args.bias, false},
          {"q", args.q, true},  {"k", args.k, true},  {"v", args.v, true}};
}

bool never_the_same(std::string_view, std::string_view) { return false; }

FusedQkvProblem check_shapes(const FusedQkvArgs& args) {
  require_present("x", args.x, "a tensor [B,N,C]");
  require_present("w", args.w, "a tensor [C,(H + 2 Hkv) D]");
  require_present("q", args.q, "a tensor [B,N,H,D]");
  require_present("k", args.k, "a tensor [B,N,Hkv,D]");
  require_present("v", args.v, "a tensor [B,N,Hkv,D]");
  if (args.x.rank != 3) throw InvalidArgument("x", "shape [B,N,C]", shape_text(args.x));
  if (args.q.rank != 4) throw InvalidArgument("q", "shape [B,N,H,D]", shape_text(args.q));
  if (args.k.rank != 4) throw InvalidArgument("k", "shape [B,N,Hkv,D]", shape_text(args.k));
  FusedQkvProblem p;
  p.batch = args.x.shape[0];
  p.tokens = args.x.shape[1];
  p.channels = args.x.shape[2];
  p.heads = args.q.shape[2];
  p.head_dim = args.q.shape[3];
  p.key_heads = args.k.shape[2];
  if (p.channels < 1) throw InvalidArgument("x", "at least one channel", shape_text(args.x));
  if (p.heads < 1 || p.head_dim < 1) throw InvalidArgument("q", "at least one head and one channel", shape_text(args.q));
  if (p.key_heads < 1) throw InvalidArgument("k", "at least one head", shape_text(args.k));
  require_shape("w", args.w, {p.channels, p.columns()}, "[C,(H + 2 Hkv) D]");
  if (args.bias.present()) require_shape("bias", args.bias, {p.columns()}, "[(H + 2 Hkv) D]");
  require_shape("q", args.q, {p.batch, p.tokens, p.heads, p.head_dim}, "[B,N,H,D]");
  require_shape("k", args.k, {p.batch, p.tokens, p.key_heads, p.head_dim}, "[B,N,Hkv,D]");
  require_shape("v", args.v, {p.batch, p.tokens, p.key_heads, p.head_dim}, "that of k");
  for (const NamedOperand& operand : operands(args)) {
    if (operand.view.present()) require_unit_stride(operand.name, operand.view, operand.view.rank - 1);
  }
  return p;
}

void check_dtypes(const FusedQkvArgs& args) {
  const DType dtype = args.x.dtype;
  if (!is_floating(dtype)) throw InvalidArgument("x", "dtype f32, f16, bf16 or f64", name(dtype));
  for (const NamedOperand& operand : operands(args)) {
    if (!operand.view.present() || operand.view.dtype == dtype) continue;
    throw InvalidArgument(operand.name, fmt::format("dtype {}, as x has", name(dtype)), name(operand.view.dtype));
  }
}

const FusedQkvKernel& kernel_for(const FusedQkvProblem& problem, const DeviceProperties& device, const Execution& execution) {
  const FusedQkvKernel* kernel = &qkv_cpu_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
  if (device.type == DeviceType::cuda) kernel = &qkv_cublaslt_kernel;
#endif
  std::string reason = refusal_of_only_kernel(kernel->name, kernel->device, device, execution);
  if (reason.empty()) reason = kernel->unsupported(problem, device);
  if (reason.empty()) return *kernel;
  throw Unsupported(fmt::format("no kernel can run this projection on {}:\n  {}: {}", device.name, kernel->name, reason));
}

}  // namespace

FusedQkvProblem check(const FusedQkvArgs& args) {
  const Operands all = operands(args);
  check_ranks(all);
  FusedQkvProblem p = check_shapes(args);
  check_dtypes(args);
  check_devices(args.x.device, all);
  for (const NamedOperand& operand : all) check_memory(operand);
  check_overlap(all, never_the_same);
  p.x = input(args.x);
  p.w = input(args.w);
  p.bias = input(args.bias);
  p.q = output(args.q);
  p.k = output(args.k);
  p.v = output(args.v);
  p.dtype = args.x.dtype;
  p.device = args.x.device;
  return p;
}

void fused_qkv_forward(const FusedQkvArgs& args, const Execution& execution) {
  const FusedQkvProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.device);
  const FusedQkvKernel& kernel = kernel_for(problem, device, execution);
  if (problem.rows() == 0) return;
  const DeviceGuard guard(problem.device);
  const Workspace workspace(kernel.workspace(problem), execution, problem.device);
  kernel.launch({problem, args, workspace.data(), execution.stream});
}

std::size_t fused_qkv_workspace(const FusedQkvArgs& args, const Execution& execution) {
  const FusedQkvProblem problem = check(args);
  return kernel_for(problem, device_properties(problem.device), execution).workspace(problem);
}

}  // namespace delta_attention
