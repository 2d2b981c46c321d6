#include "api/check_softmax.h"

#include <fmt/format.h>

#include <cmath>

#include "api/check_views.h"

namespace delta_attention {
namespace {

Operands operands(const SoftmaxArgs& args) {
  return {{"q", args.q, false},
          {"k", args.k, false},
          {"v", args.v, false},
          {"valid_len", args.valid_len, false},
          {"mask", args.mask, false},
          {"cu_seqlens_q", args.cu_seqlens_q, false},
          {"cu_seqlens_kv", args.cu_seqlens_kv, false},
          {"block_table", args.block_table, false},
          {"out", args.out, true},
          {"lse", args.lse, true}};
}

bool never_the_same(std::string_view, std::string_view) { return false; }

void require_dtype(const char* operand, const View& x, bool ok, const std::string& expected) {
  if (x.present() && !ok) throw InvalidArgument(operand, "dtype " + expected, name(x.dtype));
}

void check_dtypes(const SoftmaxArgs& args) {
  const DType dtype = args.q.dtype;
  require_dtype("q", args.q, is_floating(dtype), "f32, f16, bf16 or f64");
  const std::string same = fmt::format("{}, as q has", name(dtype));
  require_dtype("k", args.k, args.k.dtype == dtype, same);
  require_dtype("v", args.v, args.v.dtype == dtype, same);
  require_dtype("out", args.out, args.out.dtype == dtype, same);
  require_dtype("mask", args.mask, args.mask.dtype == DType::f32, "f32");
  const bool lse_ok = args.lse.dtype == DType::f32 || (args.lse.dtype == DType::f64 && dtype == DType::f64);
  require_dtype("lse", args.lse, lse_ok, "f32");
  require_dtype("valid_len", args.valid_len, is_integer(args.valid_len.dtype), "i32 or i64");
  require_dtype("cu_seqlens_q", args.cu_seqlens_q, is_integer(args.cu_seqlens_q.dtype), "i32 or i64");
  require_dtype("cu_seqlens_kv", args.cu_seqlens_kv, is_integer(args.cu_seqlens_kv.dtype), "i32 or i64");
  require_dtype("block_table", args.block_table, args.block_table.dtype == DType::i32, "i32");
}

/// Sizes of q, k and v.
SoftmaxProblem check_shapes(const SoftmaxArgs& args) {
  require_present("q", args.q, "a tensor [B,Nq,H,D]");
  require_present("k", args.k, "a tensor [B,Nkv,Hkv,D]");
  require_present("v", args.v, "a tensor [B,Nkv,Hkv,D]");
  require_present("out", args.out, "a tensor [B,Nq,H,D]");
  if (args.q.rank != 4) throw InvalidArgument("q", "shape [B,Nq,H,D]", shape_text(args.q));
  if (args.k.rank != 4) throw InvalidArgument("k", "shape [B,Nkv,Hkv,D]", shape_text(args.k));

  SoftmaxProblem p;
  p.batch = args.q.shape[0];
  p.queries = args.q.shape[1];
  p.heads = args.q.shape[2];
  p.head_dim = args.q.shape[3];
  p.key_heads = args.k.shape[2];
  if (p.heads < 1 || p.head_dim < 1) throw InvalidArgument("q", "at least one head and one channel", shape_text(args.q));
  if (p.key_heads < 1 || p.heads % p.key_heads != 0) {
    throw InvalidArgument("k", fmt::format("Hkv that divides H = {}", p.heads), shape_text(args.k));
  }
  if (args.block_table.present()) {
    p.pages = args.k.shape[0];
    p.page_size = args.k.shape[1];
    if (p.pages < 1 || p.page_size < 1) throw InvalidArgument("k", "at least one page of one key", shape_text(args.k));
    require_shape("k", args.k, {p.pages, p.page_size, p.key_heads, p.head_dim}, "[P,page size,Hkv,D]");
  } else {
    p.keys = args.k.shape[1];
    require_shape("k", args.k, {p.batch, p.keys, p.key_heads, p.head_dim}, "[B,Nkv,Hkv,D]");
  }
  require_shape("v", args.v, {args.k.shape[0], args.k.shape[1], p.key_heads, p.head_dim}, "that of k");
  require_shape("out", args.out, {p.batch, p.queries, p.heads, p.head_dim}, "[B,Nq,H,D]");
  if (args.lse.present()) require_shape("lse", args.lse, {p.batch, p.queries, p.heads}, "[B,Nq,H]");
  require_unit_stride("q", args.q, 3);
  require_unit_stride("k", args.k, 3);
  require_unit_stride("v", args.v, 3);
  require_unit_stride("out", args.out, 3);
  return p;
}

/// Sequences, lengths and pages against each other.
void check_sequences(const SoftmaxArgs& args, SoftmaxProblem& p) {
  const bool paged = args.block_table.present();
  p.sequences = p.batch;
  if (args.cu_seqlens_q.present()) p.sequences = packed_sequences("cu_seqlens_q", args.cu_seqlens_q, p.batch, "Nq");
  if (paged) {
    require_absent("cu_seqlens_kv", args.cu_seqlens_kv, "keys lie in pages");
    require_present("valid_len", args.valid_len, "the keys of every sequence [N] (keys lie in pages)");
    if (args.block_table.rank != 2 || args.block_table.shape[0] != p.sequences) {
      throw InvalidArgument("block_table", fmt::format("shape [N,pages a sequence] with N = {}", p.sequences),
                            shape_text(args.block_table));
    }
    p.keys = args.block_table.shape[1] * p.page_size;
    constexpr std::int64_t kMost = 0x7fffffff;  // SoftmaxProblem::key_offset counts keys in 32 bits
    if (p.keys > kMost) {
      throw InvalidArgument("block_table", fmt::format("pages for at most {} keys a sequence", kMost), fmt::format("{} keys", p.keys));
    }
  } else if (args.cu_seqlens_q.present()) {
    require_present("cu_seqlens_kv", args.cu_seqlens_kv, "offsets [N+1], as there are cu_seqlens_q");
    require_shape("cu_seqlens_kv", args.cu_seqlens_kv, {p.sequences + 1}, "[N+1]");
  } else {
    require_absent("cu_seqlens_kv", args.cu_seqlens_kv, "there are no cu_seqlens_q");
  }
  if (args.valid_len.present()) require_shape("valid_len", args.valid_len, {p.sequences}, "[N]");
}

void check_mask(const SoftmaxArgs& args, const SoftmaxProblem& p) {
  if (!args.mask.present()) return;
  if (args.cu_seqlens_q.present()) require_absent("mask", args.mask, "sequences are packed");
  const std::int64_t full[4] = {p.batch, p.heads, p.queries, p.keys};
  bool fits = args.mask.rank == 4;
  for (int axis = 0; fits && axis < 4; ++axis) fits = args.mask.shape[axis] == full[axis] || args.mask.shape[axis] == 1;
  if (!fits) {
    throw InvalidArgument("mask",
                          fmt::format("shape [B,H,Nq,Nkv] = [{},{},{},{}], or 1 on any axis", full[0], full[1], full[2], full[3]),
                          shape_text(args.mask));
  }
}

void check_numbers(const SoftmaxArgs& args) {
  require_finite_scale(args.scale);
  if (!(args.softcap >= 0.0f) || !std::isfinite(args.softcap)) {
    throw InvalidArgument("softcap", "0 (none) or a finite number above", fmt::format("{}", args.softcap));
  }
  if (args.window_left < -1) {
    throw InvalidArgument("window_left", "-1 (unlimited), 0 or more", fmt::format("{}", args.window_left));
  }
  if (args.alignment != Alignment::bottom_right && args.alignment != Alignment::top_left) {
    throw InvalidArgument("alignment", "one of its enumerators", std::to_string(static_cast<int>(args.alignment)));
  }
}

/// What the CPU can read of lengths, offsets and pages.
void check_contents(const SoftmaxArgs& args, const SoftmaxProblem& p) {
  if (args.cu_seqlens_q.present()) check_offsets("cu_seqlens_q", args.cu_seqlens_q, p.queries, "Nq");
  if (args.cu_seqlens_kv.present()) check_offsets("cu_seqlens_kv", args.cu_seqlens_kv, p.keys, "Nkv");
  if (!args.valid_len.present()) return;
  for (std::int64_t n = 0; n < p.sequences; ++n) {
    std::int64_t most = p.keys;
    if (args.cu_seqlens_kv.present()) {
      const std::int64_t stride = args.cu_seqlens_kv.strides[0];
      most = integer_at(args.cu_seqlens_kv, (n + 1) * stride) - integer_at(args.cu_seqlens_kv, n * stride);
    }
    const std::int64_t length = integer_at(args.valid_len, n * args.valid_len.strides[0]);
    if (length < 0 || length > most) {
      throw InvalidArgument("valid_len", fmt::format("0 to {} keys", most), fmt::format("{} for sequence {}", length, n));
    }
    if (!args.block_table.present()) continue;
    for (std::int64_t i = 0; i < ceil_div(length, p.page_size); ++i) {
      const std::int64_t page =
          integer_at(args.block_table, n * args.block_table.strides[0] + i * args.block_table.strides[1]);
      if (page < 0 || page >= p.pages) {
        throw InvalidArgument("block_table", fmt::format("pages from 0 to {}", p.pages - 1),
                              fmt::format("{} as page {} of sequence {}", page, i, n));
      }
    }
  }
}

}  // namespace

SoftmaxProblem check(const SoftmaxArgs& args) {
  const Operands all = operands(args);
  check_ranks(all);
  SoftmaxProblem p = check_shapes(args);
  check_sequences(args, p);
  check_mask(args, p);
  check_dtypes(args);
  check_devices(args.q.device, all);
  for (const NamedOperand& operand : all) check_memory(operand);
  check_overlap(all, never_the_same);
  check_numbers(args);
  if (args.q.device.type == DeviceType::cpu) check_contents(args, p);

  p.q = input(args.q);
  p.k = input(args.k);
  p.v = input(args.v);
  p.valid_len = input(args.valid_len);
  p.mask = input(args.mask);
  for (int axis = 0; axis < args.mask.rank; ++axis) {
    if (args.mask.shape[axis] == 1) p.mask.strides[axis] = 0;
  }
  p.cu_seqlens_q = input(args.cu_seqlens_q);
  p.cu_seqlens_kv = input(args.cu_seqlens_kv);
  p.block_table = input(args.block_table);
  p.out = output(args.out);
  p.lse = output(args.lse);
  p.causal = args.causal;
  p.alignment = args.alignment;
  p.window_left = args.window_left;
  p.softcap = args.softcap;
  p.scale = args.scale.value_or(1.0f / std::sqrt(static_cast<float>(p.head_dim)));
  p.dtype = args.q.dtype;
  p.has_f64 = args.q.dtype == DType::f64;
  p.device = args.q.device;
  return p;
}

}  // namespace delta_attention
