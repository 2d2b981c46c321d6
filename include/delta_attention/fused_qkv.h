#pragma once

// The projection in front of attention, for q, k and v at once:
//
//     (q | k | v)_bn = x_bn W + bias      W: [C,(H + 2 Hkv) D], the columns of q's heads, then k's, then v's
//
// One matrix product instead of three, whose results go where attention reads them.

#include <cstddef>

#include "delta_attention/delta_attention.h"

namespace delta_attention {

struct FusedQkvArgs {
  /// [B,N,C]: f32, f16, bf16 (f64 on the CPU only). Stride 1 on the last axis, here and below.
  ConstTensor x;

  /// [C,(H + 2 Hkv) D], the dtype of x.
  ConstTensor w;

  /// none | [(H + 2 Hkv) D], the dtype of x.
  ConstTensor bias;

  /// [B,N,H,D] and twice [B,N,Hkv,D], the dtype of x. Where they are neighbouring slices of one [B,N,(H + 2 Hkv) D] buffer, the product
  /// writes them itself; otherwise it goes through the workspace.
  Tensor q, k, v;
};

/// The fused projection on the device of the tensors; kernels "qkv_cpu" (sums in float64) and "qkv_cublaslt" (sums in f32), which needs
/// NVIDIA's libcublasLt where the program runs. Errors as delta_attention_forward.
DELTA_ATTENTION_API void fused_qkv_forward(const FusedQkvArgs& args, const Execution& execution = {});

/// Bytes of workspace that the call needs.
DELTA_ATTENTION_API std::size_t fused_qkv_workspace(const FusedQkvArgs& args, const Execution& execution = {});

}  // namespace delta_attention
