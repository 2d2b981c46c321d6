#pragma once

// What every softmax kernel does to a dot product before the softmax, and what a row makes of its sums at the end.

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "problem/softmax_problem.h"

namespace delta_attention {

/// A running softmax: `sum` and whatever it weighs are relative to exp(`max`). Starts as a row that has seen no key.
struct RunningSoftmax {
  float max = -INFINITY;
  float sum = 0.0f;
};

/// exp(x - max) where both may be -infinity: a masked score weighs nothing, also while the row has seen no other.
__device__ __forceinline__ float weight(float x, float max) { return x == -INFINITY ? 0.0f : expf(x - max); }

/// What sums relative to exp(before) are to be multiplied with, to be relative to exp(after) >= exp(before).
__device__ __forceinline__ float rescaling(float before, float after) { return weight(before, after); }

/// log of the sum of exponentials; -infinity for a row that saw no key.
__device__ __forceinline__ float log_sum(const RunningSoftmax& s) { return s.sum > 0.0f ? s.max + logf(s.sum) : -INFINITY; }

/// What a row's weighted sum of values is multiplied with; 0 for a row that saw no key.
__device__ __forceinline__ float normalizer(const RunningSoftmax& s) { return s.sum > 0.0f ? 1.0f / s.sum : 0.0f; }

/// cap(x) + mask of one pair, from x = scale <q,k>.
__device__ __forceinline__ float score_of(const SoftmaxProblem& p, float score, std::int64_t batch, std::int64_t head, std::int64_t row,
                                          std::int64_t key) {
  if (p.softcap > 0.0f) score = p.softcap * tanhf(score / p.softcap);
  if (p.mask.present) score += static_cast<const float*>(p.mask.data)[p.mask.offset(batch, head, row, key)];
  return score;
}

/// Whether every row sees every key and a score is the dot product times `scale`: no length, offset, page, mask, window, cap.
inline bool is_plain(const SoftmaxProblem& p) {
  return !p.causal && p.window_left < 0 && p.softcap == 0.0f && !p.mask.present && !p.valid_len.present && !p.cu_seqlens_q.present &&
         !p.paged();
}

}  // namespace delta_attention
