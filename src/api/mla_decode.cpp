#include "delta_attention/mla_decode.h"

#include <fmt/format.h>

#include <cmath>

#include "api/check_views.h"
#include "api/device.h"
#include "api/dispatch.h"
#include "api/mla_kernel.h"

namespace delta_attention {

extern const MlaKernel mla_cpu_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
extern const MlaKernel mla_cuda_kernel;
#endif

namespace {

Operands operands(const MlaArgs& args) {
  return {{"q_nope", args.q_nope, false}, {"q_rope", args.q_rope, false},       {"w_uk", args.w_uk, false},
          {"cache", args.cache, false},   {"valid_len", args.valid_len, false}, {"out", args.out, true},
          {"lse", args.lse, true}};
}

bool never_the_same(std::string_view, std::string_view) { return false; }

MlaProblem check_shapes(const MlaArgs& args) {
  require_present("q_nope", args.q_nope, "a tensor [B,Nq,H,Dn]");
  require_present("q_rope", args.q_rope, "a tensor [B,Nq,H,R]");
  require_present("w_uk", args.w_uk, "a tensor [H,Dn,L]");
  require_present("cache", args.cache, "a tensor [B,Nkv,L+R]");
  require_present("out", args.out, "a tensor [B,Nq,H,L]");
  if (args.q_nope.rank != 4) throw InvalidArgument("q_nope", "shape [B,Nq,H,Dn]", shape_text(args.q_nope));
  if (args.q_rope.rank != 4) throw InvalidArgument("q_rope", "shape [B,Nq,H,R]", shape_text(args.q_rope));
  if (args.w_uk.rank != 3) throw InvalidArgument("w_uk", "shape [H,Dn,L]", shape_text(args.w_uk));
  if (args.cache.rank != 3) throw InvalidArgument("cache", "shape [B,Nkv,L+R]", shape_text(args.cache));

  MlaProblem p;
  SoftmaxProblem& a = p.attention;
  a.batch = a.sequences = args.q_nope.shape[0];
  a.queries = args.q_nope.shape[1];
  a.heads = args.q_nope.shape[2];
  a.keys = args.cache.shape[1];
  a.key_heads = 1;
  a.head_dim = args.w_uk.shape[2];
  p.nope_dim = args.q_nope.shape[3];
  p.rope_dim = args.q_rope.shape[3];
  if (a.heads < 1 || p.nope_dim < 1) throw InvalidArgument("q_nope", "at least one head and one channel", shape_text(args.q_nope));
  if (a.head_dim < 1) throw InvalidArgument("w_uk", "at least one latent channel", shape_text(args.w_uk));
  require_shape("q_rope", args.q_rope, {a.batch, a.queries, a.heads, p.rope_dim}, "[B,Nq,H,R]");
  require_shape("w_uk", args.w_uk, {a.heads, p.nope_dim, a.head_dim}, "[H,Dn,L]");
  require_shape("cache", args.cache, {a.batch, a.keys, p.channels()}, "[B,Nkv,L+R]");
  require_shape("out", args.out, {a.batch, a.queries, a.heads, a.head_dim}, "[B,Nq,H,L]");
  if (args.lse.present()) require_shape("lse", args.lse, {a.batch, a.queries, a.heads}, "[B,Nq,H]");
  if (args.valid_len.present()) require_shape("valid_len", args.valid_len, {a.batch}, "[B]");
  require_unit_stride("q_nope", args.q_nope, 3);
  require_unit_stride("q_rope", args.q_rope, 3);
  require_unit_stride("w_uk", args.w_uk, 2);
  require_unit_stride("cache", args.cache, 2);
  require_unit_stride("out", args.out, 3);
  return p;
}

void check_dtypes(const MlaArgs& args) {
  const DType dtype = args.q_nope.dtype;
  if (!is_floating(dtype)) throw InvalidArgument("q_nope", "dtype f32, f16, bf16 or f64", name(dtype));
  for (const NamedOperand& operand : operands(args)) {
    const DType own = operand.view.dtype;
    const bool is_lse = operand.name == std::string_view("lse"), is_length = operand.name == std::string_view("valid_len");
    const bool ok = is_lse      ? own == DType::f32 || (own == DType::f64 && dtype == DType::f64)
                    : is_length ? is_integer(own)
                                : own == dtype;
    if (!operand.view.present() || ok) continue;
    throw InvalidArgument(operand.name, is_lse ? "dtype f32" : is_length ? "dtype i32 or i64" : fmt::format("dtype {}", name(dtype)),
                          name(own));
  }
}

void check_lengths(const MlaArgs& args, const SoftmaxProblem& p) {
  if (!args.valid_len.present() || args.q_nope.device.type != DeviceType::cpu) return;
  for (std::int64_t n = 0; n < p.batch; ++n) {
    const std::int64_t length = integer_at(args.valid_len, n * args.valid_len.strides[0]);
    if (length >= 0 && length <= p.keys) continue;
    throw InvalidArgument("valid_len", fmt::format("0 to {} keys", p.keys), fmt::format("{} for sequence {}", length, n));
  }
}

const MlaKernel& kernel_for(const MlaProblem& problem, const DeviceProperties& device, const Execution& execution) {
  const MlaKernel* kernel = &mla_cpu_kernel;
#if defined(DELTA_ATTENTION_WITH_CUDA)
  if (device.type == DeviceType::cuda) kernel = &mla_cuda_kernel;
#endif
  std::string reason = refusal_of_only_kernel(kernel->name, kernel->device, device, execution);
  if (reason.empty()) reason = kernel->unsupported(problem, device);
  if (reason.empty()) return *kernel;
  throw Unsupported(fmt::format("no MLA kernel can run this problem on {}:\n  {}: {}", device.name, kernel->name, reason));
}

}  // namespace

MlaProblem check(const MlaArgs& args) {
  const Operands all = operands(args);
  check_ranks(all);
  MlaProblem p = check_shapes(args);
  check_dtypes(args);
  check_devices(args.q_nope.device, all);
  for (const NamedOperand& operand : all) check_memory(operand);
  check_overlap(all, never_the_same);
  require_finite_scale(args.scale);
  check_lengths(args, p.attention);

  SoftmaxProblem& a = p.attention;
  p.q_nope = input(args.q_nope);
  p.q_rope = input(args.q_rope);
  p.w_uk = input(args.w_uk);
  a.k = input(args.cache);
  a.k.strides[2] = 0;  // one key head
  a.k.strides[3] = 1;
  a.valid_len = input(args.valid_len);
  a.out = output(args.out);
  a.lse = output(args.lse);
  a.causal = args.causal;
  a.scale = args.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.nope_dim + p.rope_dim)));
  a.dtype = args.q_nope.dtype;
  a.has_f64 = a.dtype == DType::f64;
  a.device = args.q_nope.device;
  return p;
}

void mla_decode_forward(const MlaArgs& args, const Execution& execution) {
  const MlaProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.attention.device);
  const MlaKernel& kernel = kernel_for(problem, device, execution);
  if (problem.rows() == 0) return;
  const DeviceGuard guard(problem.attention.device);
  const Workspace workspace(kernel.workspace(problem, device), execution, problem.attention.device);
  kernel.launch({problem, args, device, workspace.data(), execution.stream});
}

std::size_t mla_decode_workspace(const MlaArgs& args, const Execution& execution) {
  const MlaProblem problem = check(args);
  const DeviceProperties& device = device_properties(problem.attention.device);
  return kernel_for(problem, device, execution).workspace(problem, device);
}

}  // namespace delta_attention
