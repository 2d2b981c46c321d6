#pragma once

// The one state-update interface: the arithmetic of the recurrence on a thread's share of the state, with no schedule inside.
//
//     decay(S, a)            S <- Diag(a) S
//     predict(S, k)          S^T k
//     correct(v, p, beta)    u = beta (v - p)          (additive: beta v)
//     accumulate(S, k, u)    S <- S + k u^T
//     read(S, q)             S^T q
//
// A share is Rows x Columns numbers, each a Sum (state/summation.h); the sums over rows that live elsewhere, and who holds
// which rows, are the schedule's business. A kernel is schedule x update x gate x summation.

#include "delta_attention/recurrence.h"
#include "problem/host_device.h"
#include "state/summation.h"

namespace delta_attention {

template <class Sum, int Rows, int Columns>
struct StateTile {
  Sum cell[Rows][Columns];
};

/// S <- Diag(a) S for one row.
template <class Sum, int Rows, int Columns>
DELTA_ATTENTION_HOST_DEVICE void decay(StateTile<Sum, Rows, Columns>& state, int row, float factor) {
  DELTA_ATTENTION_UNROLL
  for (int column = 0; column < Columns; ++column) state.cell[row][column].scale(factor);
}

/// partial[column] += S[row][column] * x: one row's part of S^T x. predict (x = k) and read (x = q) are both this product.
template <class Sum, int Rows, int Columns>
DELTA_ATTENTION_HOST_DEVICE void accumulate_product(const StateTile<Sum, Rows, Columns>& state, int row, float x,
                                                    float (&partial)[Columns]) {
  DELTA_ATTENTION_UNROLL
  for (int column = 0; column < Columns; ++column) {
    partial[column] = fused_mul_add(state.cell[row][column].value(), x, partial[column]);
  }
}
template <class Sum, int Rows, int Columns>
DELTA_ATTENTION_HOST_DEVICE void predict(const StateTile<Sum, Rows, Columns>& state, int row, float k,
                                         float (&partial)[Columns]) {
  accumulate_product(state, row, k, partial);
}
template <class Sum, int Rows, int Columns>
DELTA_ATTENTION_HOST_DEVICE void read(const StateTile<Sum, Rows, Columns>& state, int row, float q,
                                      float (&partial)[Columns]) {
  accumulate_product(state, row, q, partial);
}

/// u from the value, the prediction and beta.
template <Update kUpdate>
DELTA_ATTENTION_HOST_DEVICE float correct(float v, float prediction, float beta) {
  return kUpdate == Update::delta ? rounded_mul(beta, rounded_sub(v, prediction)) : rounded_mul(beta, v);
}

/// S <- S + k u^T for one row.
template <class Sum, int Rows, int Columns>
DELTA_ATTENTION_HOST_DEVICE void accumulate(StateTile<Sum, Rows, Columns>& state, int row, float k,
                                            const float (&u)[Columns]) {
  DELTA_ATTENTION_UNROLL
  for (int column = 0; column < Columns; ++column) state.cell[row][column].add_product(k, u[column]);
}

}  // namespace delta_attention
