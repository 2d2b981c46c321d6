#pragma once

// What the warps of v5_chunkwise's chain compute with. The state is held transposed, S^T: a value column is a row of the tensor cores' M side, so
// that the state and R are left operands straight from the registers they were summed in, and all that is read from shared memory are the
// chunk's factors, as right operands. A warp works on bands of 16 value columns; each right operand that it reads serves all of its bands.
//
// NaN and infinities: a product with the zeros of A T would carry them from a token to those before it. Where outputs show any, they are taken
// out of R, and everything from the first such token of a value column on is NaN, as it is in the recurrence.

#include <cstdint>

#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/warp.cuh"

namespace delta_attention::chunkwise {

constexpr int kBand = 16;           // value columns
constexpr int kTiles = kChunk / 8;  // of tokens

/// Sums of a band and the chunk's tokens: [tokens / 8][fragment].
using TokenSums = float[kTiles][4];

/// The token of this lane's elements e and 2 + e of a tile.
__device__ __forceinline__ int token_of(int tile, int e) { return tile * 8 + threadIdx.x % 4 * 2 + e; }

/// Fragments of a left operand, 16 value columns by 16 channels or tokens, in terms.
template <class P>
using Fragment = unsigned[P::kTerms][4];

template <class P>
__device__ __forceinline__ void copy(const Fragment<P>& from, Fragment<P>& to) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[t][i] = from[t][i];
  }
}

/// Two neighbouring tiles of sums as a left operand: the layouts of sums and operands agree.
template <class P>
__device__ __forceinline__ void pack_fragment(const float (&first)[4], const float (&second)[4], Fragment<P>& fragment) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* pair = (i < 2 ? first : second) + i % 2 * 2;
    unsigned terms[P::kTerms];
    split(pair[0], pair[1], terms);
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) fragment[t][i] = terms[t];
  }
}

/// A fragment of a left operand in the exchange: term after term.
template <class P>
__device__ __forceinline__ void put_fragment(const Fragment<P>& fragment, uint4* to) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    const unsigned(&x)[4] = fragment[t];
    to[t * kWarpSize] = uint4{x[0], x[1], x[2], x[3]};
  }
}
template <class P>
__device__ __forceinline__ void get_fragment(const uint4* from, Fragment<P>& fragment) {
#pragma unroll
  for (int t = 0; t < P::kTerms; ++t) {
    const uint4 x = from[t * kWarpSize];
    fragment[t][0] = x.x;
    fragment[t][1] = x.y;
    fragment[t][2] = x.z;
    fragment[t][3] = x.w;
  }
}

/// c += a b over all pairs of terms that matter, smallest first.
template <class P>
__device__ __forceinline__ void multiply_terms(const Fragment<P>& a, const unsigned (&b)[P::kTerms][4], int half, float (&c)[4]) {
#pragma unroll
  for (int order = P::kTerms - 1; order >= 0; --order) {
#pragma unroll
    for (int t = 0; t <= order; ++t) multiply_add<BFloat16>(a[t], b[order - t][half * 2], b[order - t][half * 2 + 1], c);
  }
}

/// Where this lane's rows of right operands start, in bytes of a matrix of the image, from channel 16 `first` on; and its part of the values from
/// column `column` of the block on, in bytes of a stage. Later channels or tokens are found by exclusive or: they differ in bits of the row's own,
/// also where it is swizzled.
template <class P>
struct LaneRows {
  unsigned wide, wide_transposed, square, values;

  __device__ LaneRows(int first, int column, int value_pitch) {
    const int lane = threadIdx.x % kWarpSize, row = lane / 16 * 8 + lane % 8, piece = lane / 8 % 2;
    wide = kept(swizzled<P::kKeys / 8>(row, piece) * 16 ^ first * 32);
    wide_transposed = kept(swizzled<P::kKeys / 8>(lane % 16, lane / 16) * 16 ^ first * 32);
    square = kept(square_offset(row, piece * 8));
    values = kept(P::kValues + lane % 16 * value_pitch + (column + lane / 16 * 8) * 2);
  }
};

/// Right operands of all tokens and channels [16 step, 16 step + 16): [pair of tiles][term].
template <class P>
using ChannelOperands = unsigned[kTiles / 2][P::kTerms][4];

template <class P>
__device__ __forceinline__ void load_channels(unsigned rows, int step, ChannelOperands<P>& b) {
#pragma unroll
  for (int pair = 0; pair < kTiles / 2; ++pair) {
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) load_matrices((rows ^ (step * 32)) + pair * 16 * P::kKeys * 2 + t * P::kImage.wide(), b[pair][t]);
  }
}

/// Sums of all of a warp's bands.
template <class P>
using BandSums = TokenSums[P::kBands];

/// Fragments of all of a warp's bands.
template <class P>
using BandFragments = Fragment<P>[P::kBands];

/// sums[band][token] += S^T * (the token's row of a matrix), over 16 kCount channels; get(step, fragments) gives S^T as left operands, `rows` is
/// the address of this lane's rows. Where registers suffice, operands are fetched a step ahead.
template <class P, int kCount, class GetState>
__device__ __forceinline__ void multiply_state(const GetState& get, unsigned rows, BandSums<P>& sums) {
  constexpr int kAhead = P::kFetchesAhead ? 1 : 0;
  ChannelOperands<P> b[1 + kAhead];
  if (kAhead == 1) load_channels<P>(rows, 0, b[0]);
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    const int next = step + kAhead;
    if (next < kCount) load_channels<P>(rows, next, b[next % (1 + kAhead)]);
    BandFragments<P> a;
    get(step, a);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int band = 0; band < P::kBands; ++band) multiply_terms<P>(a[band], b[step % (1 + kAhead)][n / 2], n % 2, sums[band][n]);
    }
  }
}

/// Sums of a chunk's tokens as a left operand.
template <class P>
using TokenFragments = Fragment<P>[kChunk / 16];

template <class P>
__device__ __forceinline__ void pack_tokens(const TokenSums& x, TokenFragments<P>& packed) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) pack_fragment<P>(x[step * 2], x[step * 2 + 1], packed[step]);
}

/// sums[token i] += a * (tokens j of row i of a lower triangular matrix); `rows`: the address of this lane's.
template <class P>
__device__ __forceinline__ void multiply_triangle(const TokenFragments<P>& a, unsigned rows, TokenSums& sums) {
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
#pragma unroll
    for (int pair = step; pair < kTiles / 2; ++pair) {  // tokens from these on
      unsigned b[P::kTerms][4];
#pragma unroll
      for (int t = 0; t < P::kTerms; ++t) load_matrices((rows ^ (step * 32)) + pair * 16 * kChunk * 2 + t * P::kImage.square(), b[t]);
      multiply_terms<P>(a[step], b, 0, sums[pair * 2]);
      multiply_terms<P>(a[step], b, 1, sums[pair * 2 + 1]);
    }
  }
}

/// Leaves a band's sums for another warp; `to` is this lane's place.
__device__ __forceinline__ void put_sums(const TokenSums& x, float4* to) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) to[n * kWarpSize] = make_float4(x[n][0], x[n][1], x[n][2], x[n][3]);
}
/// Adds what a warp has left.
__device__ __forceinline__ void add_sums(const float4* from, TokenSums& x) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    const float4 other = from[n * kWarpSize];
    x[n][0] += other.x;
    x[n][1] += other.y;
    x[n][2] += other.z;
    x[n][3] += other.w;
  }
}

/// Channels of tokens [16 half, 16 half + 16) of T^T (d k) as a right operand, for 16 channels: [half][term].
template <class P>
using KeyOperands = unsigned[kChunk / 16][P::kTerms][4];

template <class P>
__device__ __forceinline__ void load_keys(const unsigned char* stage, const LaneRows<P>& lane_rows, int step, KeyOperands<P>& b) {
  const unsigned keys = (shared_address(stage + P::kAccumulate) + lane_rows.wide_transposed) ^ (step * 32);
#pragma unroll
  for (int half = 0; half < kChunk / 16; ++half) {
#pragma unroll
    for (int t = 0; t < P::kTerms; ++t) load_matrices_transposed(keys + half * 16 * P::kKeys * 2 + t * P::kImage.wide(), b[half][t]);
  }
}

/// A band of S^T, 16 kCount channels of it: this lane has of tile n the channels 8 n + 2 t + e of value columns g and g + 8, at [e] and [2 + e].
template <int kCount>
using StateSums = float[kCount * 2][4];

/// S^T = S^T diag(D) + R^T (T^T d k) in 16 kCount channels from 16 `first` on; keys[0]: those of the first step, if they are fetched ahead. A
/// chunk's products have sums of their own: tensor cores cut off what does not fit a sum's digits, and a long memory would be short of it each time.
template <class P, int kCount>
__device__ __forceinline__ void advance(const TokenFragments<P> (&residuals)[P::kBands], const unsigned char* stage, const LaneRows<P>& lane_rows,
                                        int first, KeyOperands<P> (&keys)[2], StateSums<kCount> (&state)[P::kBands]) {
  const auto* decays = reinterpret_cast<const float2*>(stage + P::kDecays) + first * 8 + threadIdx.x % 4;
#pragma unroll
  for (int step = 0; step < kCount; ++step) {
    const int next = P::kFetchesKeysAhead ? step + 1 : step;
    if (next < kCount && (next > 0 || !P::kFetchesAhead)) load_keys<P>(stage, lane_rows, next, keys[next % 2]);
    float sums[P::kBands][2][4] = {};
#pragma unroll
    for (int half = 0; half < kChunk / 16; ++half) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int band = 0; band < P::kBands; ++band) multiply_terms<P>(residuals[band][half], keys[step % 2][half], tile, sums[band][tile]);
      }
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float2 d = decays[(step * 2 + tile) * 4];
#pragma unroll
      for (int band = 0; band < P::kBands; ++band) {
        float(&x)[4] = state[band][step * 2 + tile];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fmaf(x[e], e % 2 == 0 ? d.x : d.y, sums[band][tile][e]);
      }
    }
  }
}

/// V^T of 16 tokens, number `half`, and the band that starts at column `column` of the block.
template <class P>
__device__ __forceinline__ void load_values(const unsigned char* stage, int pitch, int column, const LaneRows<P>& lane_rows, int half,
                                            TokenSums& x) {
  using Element = typename P::Element;
  const int lane = threadIdx.x % kWarpSize;
  if constexpr (sizeof(Element) == 2) {
    unsigned raw[4];
    load_matrices_transposed(shared_address(stage) + lane_rows.values + half * 16 * pitch, raw);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 tokens = unpack<Element>(raw[i]);
      x[half * 2 + i % 2][i / 2 * 2] = tokens.x;
      x[half * 2 + i % 2][i / 2 * 2 + 1] = tokens.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int n = half * 2 + i / 4, e = i % 4;
      const auto* row = reinterpret_cast<const Element*>(stage + P::kValues + token_of(n, e % 2) * pitch);
      x[n][e] = row[column + e / 2 * 8 + lane / 4];
    }
  }
}

// ------------------------------------------------------------------------------------------------------------------- numbers to avoid

/// First token of this lane's two value columns whose number is not finite; kChunk if there is none.
struct FirstBad {
  int token[2];
};

__device__ __forceinline__ bool all_finite(const TokenSums& x) {
  float zeros[4] = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) zeros[e] = fmaf(x[n][e], 0.0f, zeros[e]);
  }
  return (zeros[0] + zeros[1]) + (zeros[2] + zeros[3]) == 0.0f;
}

/// Lowers `bad` to x's first bad tokens, and takes what comes from there on out of x.
__device__ __forceinline__ void take_out_bad(TokenSums& x, FirstBad& bad) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int first = bad.token[half];
#pragma unroll
    for (int n = kTiles - 1; n >= 0; --n) {
#pragma unroll
      for (int e = 1; e >= 0; --e) {
        if (!isfinite(x[n][half * 2 + e]) && token_of(n, e) < first) first = token_of(n, e);
      }
    }
    const int other = __shfl_xor_sync(kFullWarp, first, 1);
    first = other < first ? other : first;
    const int others = __shfl_xor_sync(kFullWarp, first, 2);
    first = others < first ? others : first;
    bad.token[half] = first;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (token_of(n, e) >= first) x[n][half * 2 + e] = 0.0f;
      }
    }
  }
}

__device__ __forceinline__ void copy(const TokenSums& from, TokenSums& to) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[n][e] = from[n][e];
  }
}
/// to += from
__device__ __forceinline__ void add(const TokenSums& from, TokenSums& to) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) to[n][e] += from[n][e];
  }
}
/// Puts NaN where something bad was, or something after it.
__device__ __forceinline__ void put_nan(const FirstBad& bad, TokenSums& x) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (token_of(n, e % 2) >= bad.token[e / 2]) x[n][e] = NAN;
    }
  }
}

/// Takes what is not finite, and what comes after it, out of R^T as a left operand.
template <class P>
__device__ __forceinline__ void take_out_bad(TokenFragments<P>& residuals, FirstBad& bad) {
  TokenSums x = {};
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int t = 0; t < P::kTerms; ++t) {
        const float2 term = unpack<BFloat16>(residuals[n / 2][t][n % 2 * 2 + half]);
        x[n][half * 2] += term.x;
        x[n][half * 2 + 1] += term.y;
      }
    }
  }
  take_out_bad(x, bad);
  pack_tokens<P>(x, residuals);
}

/// A band's outputs, from S^T (b q)^T: adds R^T (A T)^T; `rows`: the address of this lane's of A T.
template <class P>
__device__ __forceinline__ void add_residuals(unsigned rows, TokenFragments<P>& residuals, const TokenSums& from_state, TokenSums& out) {
  copy(from_state, out);
  multiply_triangle<P>(residuals, rows, out);
  if (!__any_sync(kFullWarp, !all_finite(out))) return;
  FirstBad bad = {{kChunk, kChunk}};
  take_out_bad<P>(residuals, bad);
  copy(from_state, out);
  multiply_triangle<P>(residuals, rows, out);
  put_nan(bad, out);
}

}  // namespace delta_attention::chunkwise
