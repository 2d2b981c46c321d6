#pragma once

// Sums across the lanes of a warp, and barriers of part of a block.

namespace delta_attention {

constexpr int kWarpSize = 32;
constexpr unsigned kFullWarp = 0xffffffffu;

/// A barrier of `threads` threads (whole warps) of the block; parts that meet apart take different ids from 1 to 15.
__device__ __forceinline__ void sync_part(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// x, kept in a register: what comes out of a shuffle, if only with itself, is not computed again wherever it is used. All lanes of a warp.
__device__ __forceinline__ unsigned kept(unsigned x) { return __shfl_sync(kFullWarp, x, threadIdx.x % kWarpSize); }

/// Each of kCount numbers summed over all lanes, in every lane. Several at once hide each other's latency.
template <int kCount>
__device__ __forceinline__ void warp_sums(float (&x)[kCount]) {
#pragma unroll
  for (int step = kWarpSize / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(kFullWarp, x[i], step);
  }
}
__device__ __forceinline__ float warp_sum(float x) {
  float sum[1] = {x};
  warp_sums(sum);
  return sum[0];
}

/// Sums kCount values at once over groups of kLanes lanes that lie kStride lanes apart, and spreads the sums over the group: each
/// step halves both the lanes still to be summed and the values that a lane keeps, so that kCount sums cost about kCount
/// shuffles. Member m = lane / kStride % kLanes of a group returns the sum of values[m * kCount / kLanes]; kLanes / kCount
/// neighbours return the same one.
template <int kLanes, int kStride, int kCount>
__device__ __forceinline__ float spread_sum(const float (&values)[kCount], int lane) {
  static_assert(kLanes >= kCount && (kCount & (kCount - 1)) == 0, "a lane returns one sum");
  constexpr int kStep = kLanes / 2 * kStride;
  if constexpr (kLanes == 1) {
    return values[0];
  } else if constexpr (kCount == 1) {
    const float sum[1] = {values[0] + __shfl_xor_sync(kFullWarp, values[0], kStep)};
    return spread_sum<kLanes / 2, kStride>(sum, lane);
  } else {
    const bool upper = (lane & kStep) != 0;
    float kept[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float given = upper ? values[i] : values[i + kCount / 2];
      const float own = upper ? values[i + kCount / 2] : values[i];
      kept[i] = own + __shfl_xor_sync(kFullWarp, given, kStep);
    }
    return spread_sum<kLanes / 2, kStride>(kept, lane);
  }
}

/// The same over kLanes neighbouring lanes, for any number of values: lane m of the group receives the sums of the values from
/// m * kSums on, or, with fewer values than lanes, what spread_sum returns.
template <int kLanes, int kCount, int kSums>
__device__ __forceinline__ void spread_sums(const float (&values)[kCount], int lane, float (&sums)[kSums]) {
  if constexpr (kSums == 1) {
    sums[0] = spread_sum<kLanes, 1>(values, lane);
  } else {
    static_assert(kCount == kLanes * kSums);
    const bool upper = (lane & (kLanes / 2)) != 0;
    float kept[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float given = upper ? values[i] : values[i + kCount / 2];
      const float own = upper ? values[i + kCount / 2] : values[i];
      kept[i] = own + __shfl_xor_sync(kFullWarp, given, kLanes / 2);
    }
    if constexpr (kLanes == 2) {
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = kept[i];
    } else {
      spread_sums<kLanes / 2>(kept, lane, sums);
    }
  }
}

}  // namespace delta_attention
