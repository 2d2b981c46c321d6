#pragma once

// Softmax attention, to compare the recurrences with: one call, the same tensors, the same errors.
//
//     s_ij = cap(scale <q_i, k_j>) + mask_ij      cap(x) = softcap tanh(x / softcap), or x without a softcap
//     p_i  = softmax of s_i over the keys that row i sees
//     o_i  = sum_j p_ij v_j                       lse_i = log sum_j e^{s_ij}
//
// A row that sees no key gives o = 0 and lse = -infinity.

#include <cstddef>
#include <cstdint>
#include <optional>

#include "delta_attention/delta_attention.h"

namespace delta_attention {

/// Which key the last visible one of row i is, when Nq and Nkv differ: what a causal mask and a window count from.
enum class Alignment {
  bottom_right,  // row i stands at key i + Nkv - Nq: the last row sees the last key. Right for cached decoding
  top_left,      // row i stands at key i: the first row sees the first key. Right where both sides are padded at their ends
};

struct SoftmaxArgs {
  /// [B,Nq,H,D]: f32, f16, bf16 (f64 on the reference only). Any strides with stride 1 on D, so [B,H,N,D] memory works too.
  ConstTensor q;

  /// [B,Nkv,Hkv,D], the dtype of q, H a multiple of Hkv: query head h reads head h / (H / Hkv). With a block table, pages:
  /// [P,page size,Hkv,D].
  ConstTensor k, v;

  /// none | [B] i32 or i64, in [0,Nkv]: the keys that a sequence really has; later ones do not exist, and alignment counts from
  /// these. One entry a sequence where sequences are packed. Needed with a block table.
  ConstTensor valid_len;

  /// none | [B,H,Nq,Nkv] f32, added to the scores; any extent may be 1 instead, and counts for all. -infinity hides a key.
  ConstTensor mask;

  /// none | [N+1] i32 or i64 with B = 1: packed sequences; sequence n has the rows of q from cu_seqlens_q[n] to cu_seqlens_q[n+1] and the
  /// keys from cu_seqlens_kv[n] to cu_seqlens_kv[n+1]. Both or none, except that with a block table keys have none.
  ConstTensor cu_seqlens_q, cu_seqlens_kv;

  /// none | [N,pages a sequence] i32: sequence n's keys lie in pages block_table[n][0], block_table[n][1], ... of k and v.
  ConstTensor block_table;

  /// [B,Nq,H,D], the dtype of q.
  Tensor out;

  /// none | [B,Nq,H] f32 (f64 on the reference): natural logarithm of the sum of exponentials.
  Tensor lse;

  /// Default D^-0.5.
  std::optional<float> scale;

  /// Row i sees the keys up to the one that it stands at.
  bool causal = false;
  Alignment alignment = Alignment::bottom_right;

  /// Row i sees this many keys before the one that it stands at, and that one; -1: all.
  std::int64_t window_left = -1;

  /// 0: none.
  float softcap = 0.0f;
};

/// Softmax attention on the device of the tensors. Errors as delta_attention_forward.
DELTA_ATTENTION_API void softmax_attention_forward(const SoftmaxArgs& args, const Execution& execution = {});

/// Bytes of workspace that the call needs.
DELTA_ATTENTION_API std::size_t softmax_attention_workspace(const SoftmaxArgs& args, const Execution& execution = {});

/// Which kernel would run, and why the others would not.
DELTA_ATTENTION_API DispatchInfo softmax_dispatch_info(const SoftmaxArgs& args, const Execution& execution = {});

}  // namespace delta_attention
