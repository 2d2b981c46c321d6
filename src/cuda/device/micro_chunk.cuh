#pragma once

// The state-independent half of the micro-chunk algebra (docs/math.md), for 8 tokens by one warp.
//
// For tokens 0..7 after a state S0, with b_i = a_0 ... a_i the decay since S0 (elementwise) and d_ij = a_(j+1) ... a_i:
//
//     W_i  = beta_i (b_i*k_i - sum_{j<i} <k_i, d_ij*k_j> W_j)          delta update; u_i = U_i - S0^T W_i
//     U_i  = beta_i (v_i     - sum_{j<i} <k_i, d_ij*k_j> U_j)
//     Q_i  = b_i*q_i                                                   o_i = S0^T Q_i + sum_{j<=i} A_ij u_j
//     A_ij = <q_i, d_ij*k_j>
//     R_j  = d_7j*k_j                                                  S  <- Diag(b_7) S0 + sum_j R_j u_j^T
//
// Decays come as logarithms, a = e^g. Those inside the micro-chunk are running products of factors a <= 1: nothing is divided,
// nothing can overflow, and a = 0 is legal. b_7, which the state meets again and again, is one exponential of the sum of g, so that
// a slow decay is rounded once in 8 tokens. Row i uses tokens up to i only.

#include "cuda/device/warp.cuh"
#include "delta_attention/recurrence.h"
#include "state/gate.h"

namespace delta_attention {

constexpr int kMicroChunk = 8;

/// Shared-memory operands of one micro-chunk: rows of kKeyTile channels, and small matrices.
struct MicroChunkView {
  float* w;                // [8][kKeyTile]  in: the log decays g_i (channel gate); out: W_i
  float* q;                // [8][kKeyTile]  in: q_i; out: Q_i
  float* k;                // [8][kKeyTile]  in: k_i; out: R_i
  float* u;                // [8][column stride]  in: v_i; out: U_i
  float* a_matrix;         // [8][8]  out: A_ij for j <= i
  float* decay_end;        // [kKeyTile] (channel gate) or [1] (scalar gate)  out: b_7
  float* scratch;          // [8] of this warp
  const float* beta;       // [8]; 0 for tokens past the end
  const float* log_decay;  // [8] scalar gate; 0 for tokens past the end
};

/// Lane l owns channels l, l + 32, l + 64, ...: neighbouring lanes read neighbouring banks. `mixed` is the lane's value column.
template <Update kUpdate, Gate kGate, int kKeyTile>
__device__ __forceinline__ void prepare_keys(const MicroChunkView& chunk, int lane, float (&mixed)[kMicroChunk]) {
  constexpr int kPerLane = kKeyTile / kWarpSize;
  float since_start[kPerLane];               // b_i
  float log_since_start[kPerLane];           // and its logarithm
  float decayed_key[kMicroChunk][kPerLane];  // d_ij * k_j
  float w[kMicroChunk][kPerLane];
#pragma unroll
  for (int e = 0; e < kPerLane; ++e) {
    since_start[e] = 1.0f;
    log_since_start[e] = 0.0f;
  }

#pragma unroll
  for (int i = 0; i < kMicroChunk; ++i) {
    const float* key_row = chunk.k + i * kKeyTile + lane;
    float* query_row = chunk.q + i * kKeyTile + lane;
    float* w_row = chunk.w + i * kKeyTile + lane;
    float products[2 * kMicroChunk] = {};  // <k_i, d_ij k_j> for j < i, then <q_i, d_ij k_j> for j <= i
    float q[kPerLane];
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      q[e] = query_row[e * kWarpSize];
      const float key = key_row[e * kWarpSize];
      const float g = kGate == Gate::channel ? w_row[e * kWarpSize] : chunk.log_decay[i];
      const float a = expf(g);
      log_since_start[e] += g;
      since_start[e] *= a;
#pragma unroll
      for (int j = 0; j < i; ++j) decayed_key[j][e] *= a;
      decayed_key[i][e] = key;
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        if (j < i) products[j] += key * decayed_key[j][e];
        products[kMicroChunk + j] += q[e] * decayed_key[j][e];
      }
      query_row[e * kWarpSize] = q[e] * since_start[e];
    }

    const float sum = spread_sum<kWarpSize, 1>(products, lane);
    const int which = lane / 2;
    if (lane % 2 == 0) {
      float* slot =
          which < kMicroChunk ? chunk.scratch + which : chunk.a_matrix + i * kMicroChunk + which - kMicroChunk;
      *slot = sum;
    }
    __syncwarp();
    const float beta = chunk.beta[i];
    if constexpr (kUpdate == Update::delta) {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        float rest = decayed_key[i][e] * since_start[e];
#pragma unroll
        for (int j = 0; j < i; ++j) rest -= chunk.scratch[j] * w[j][e];
        w[i][e] = beta * rest;
        w_row[e * kWarpSize] = w[i][e];
      }
      float rest = mixed[i];
#pragma unroll
      for (int j = 0; j < i; ++j) rest -= chunk.scratch[j] * mixed[j];
      mixed[i] = beta * rest;
    } else {
      mixed[i] *= beta;
    }
    __syncwarp();
  }

#pragma unroll
  for (int e = 0; e < kPerLane; ++e) {
#pragma unroll
    for (int j = 0; j < kMicroChunk; ++j) chunk.k[j * kKeyTile + e * kWarpSize + lane] = decayed_key[j][e];
    if (kGate == Gate::channel) chunk.decay_end[e * kWarpSize + lane] = exp_decay(log_since_start[e]);
  }
  if (kGate == Gate::scalar && lane == 0) chunk.decay_end[0] = exp_decay(log_since_start[0]);
}

/// All of W, U, Q, A, R and b_7 of one micro-chunk, in place. One warp; kColumns <= 32 value columns, one a lane.
template <Update kUpdate, Gate kGate, int kKeyTile, int kColumns, int kColumnStride>
__device__ __forceinline__ void prepare_micro_chunk(const MicroChunkView& chunk, int lane) {
  static_assert(kColumns <= kWarpSize, "a lane holds one value column");
  static_assert(kGate != Gate::none, "no gate runs as a scalar gate of 1");
  float column[kMicroChunk];
#pragma unroll
  for (int i = 0; i < kMicroChunk; ++i) column[i] = lane < kColumns ? chunk.u[i * kColumnStride + lane] : 0.0f;
  prepare_keys<kUpdate, kGate, kKeyTile>(chunk, lane, column);
#pragma unroll
  for (int i = 0; i < kMicroChunk; ++i) {
    if (lane < kColumns) chunk.u[i * kColumnStride + lane] = column[i];
  }
}

}  // namespace delta_attention
