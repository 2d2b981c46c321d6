#pragma once

// Multi-head latent attention for decoding: all heads read one cache of latent rows c_j and rope rows r_j. With the up-projection W_h of
// head h, its key of row j is (W_h c_j, r_j). Since <q, W c> = <W^T q, c>, the query takes the projection, and no key is ever built:
//
//     t_ih = W_h^T q_nope_ih              [L]
//     s_ijh = scale (<t_ih, c_j> + <q_rope_ih, r_j>)
//     o_ih = sum_j softmax_j(s_ijh) c_j    [L]: the caller applies the value projection to it
//
// A row that sees no key gives o = 0 and lse = -infinity.

#include <cstddef>
#include <optional>

#include "delta_attention/delta_attention.h"

namespace delta_attention {

struct MlaArgs {
  /// [B,Nq,H,Dn] and [B,Nq,H,R]: f32, f16, bf16 (f64 on the CPU only). Stride 1 on the last axis, here and below.
  ConstTensor q_nope, q_rope;

  /// [H,Dn,L], the dtype of q_nope: column l of head h is what latent channel l adds to the head's key.
  ConstTensor w_uk;

  /// [B,Nkv,L+R], the dtype of q_nope: latent channels, then rope channels.
  ConstTensor cache;

  /// none | [B] i32 or i64, in [0,Nkv]: the rows of the cache that a sequence really has.
  ConstTensor valid_len;

  /// [B,Nq,H,L], the dtype of q_nope.
  Tensor out;

  /// none | [B,Nq,H] f32 (f64 on the CPU): natural logarithm of the sum of exponentials.
  Tensor lse;

  /// Default (Dn+R)^-0.5.
  std::optional<float> scale;

  /// Row i sees the keys up to i + length - Nq: the last row sees the last key.
  bool causal = false;
};

/// Absorbed MLA on the device of the tensors; kernels "mla_cpu" and "mla_cuda". Errors as delta_attention_forward.
DELTA_ATTENTION_API void mla_decode_forward(const MlaArgs& args, const Execution& execution = {});

/// Bytes of workspace that the call needs.
DELTA_ATTENTION_API std::size_t mla_decode_workspace(const MlaArgs& args, const Execution& execution = {});

}  // namespace delta_attention
