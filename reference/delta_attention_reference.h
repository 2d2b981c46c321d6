#pragma once

// The oracle: the recurrence in float64, token by token, as docs/math.md writes it. Header-only; depends on Eigen and the public
// headers alone, and shares no code with the library's kernels. It reads the caller's arguments directly, in CPU memory, and
// trusts them (the library checks before it calls this).

#include <Eigen/Core>
#include <cmath>
#include <cstdint>

#include "delta_attention/delta_attention.h"

namespace delta_attention::reference {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using Index = std::int64_t;

inline double load(const ConstTensor& x, Index i, Index j = 0, Index k = 0, Index l = 0) {
  const Index at = i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3];
  switch (x.dtype) {
    case DType::f64: return static_cast<const double*>(x.data)[at];
    case DType::f16: return static_cast<double>(static_cast<const Eigen::half*>(x.data)[at]);
    case DType::bf16: return static_cast<double>(static_cast<const Eigen::bfloat16*>(x.data)[at]);
    case DType::i32: return static_cast<double>(static_cast<const std::int32_t*>(x.data)[at]);
    case DType::i64: return static_cast<double>(static_cast<const std::int64_t*>(x.data)[at]);
    case DType::f32: break;
  }
  return static_cast<const float*>(x.data)[at];
}

inline void store(const Tensor& x, double value, Index i, Index j, Index k = 0, Index l = 0) {
  const Index at = i * x.strides[0] + j * x.strides[1] + k * x.strides[2] + l * x.strides[3];
  switch (x.dtype) {
    case DType::f64: static_cast<double*>(x.data)[at] = value; return;
    case DType::f16:
      static_cast<Eigen::half*>(x.data)[at] = static_cast<Eigen::half>(static_cast<float>(value));
      return;
    case DType::bf16:
      static_cast<Eigen::bfloat16*>(x.data)[at] = static_cast<Eigen::bfloat16>(static_cast<float>(value));
      return;
    default: static_cast<float*>(x.data)[at] = static_cast<float>(value); return;
  }
}

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

/// q or k of one token and head, l2-normalised where asked.
inline VectorXd load_row(const ConstTensor& x, Index b, Index t, Index head, Index size, bool l2norm) {
  VectorXd row(size);
  for (Index i = 0; i < size; ++i) row[i] = load(x, b, t, head, i);
  if (l2norm) row /= std::sqrt(row.squaredNorm() + 1e-6);
  return row;
}

/// The decay a of one channel.
inline double load_decay(const ForwardArgs& args, Index b, Index t, Index head, Index channel) {
  const double x = load(args.log_decay, b, t, head, channel);
  const double bias = args.dt_bias.present() ? load(args.dt_bias, head, channel) : 0.0;
  const double rate = args.a_log.present() ? std::exp(load(args.a_log, head)) : 1.0;
  switch (args.gate_space) {
    case GateSpace::log: return std::exp(x);
    case GateSpace::log2: return std::exp2(x);
    case GateSpace::linear: return x;
    case GateSpace::softplus: return std::exp(-rate * softplus(x + bias));
    case GateSpace::lower_bound: return std::exp(args.gate_lower_bound * sigmoid(rate * (x + bias)));
  }
  return 1.0;
}

inline double load_beta(const ForwardArgs& args, Index b, Index t, Index head) {
  if (!args.beta.present()) return 1.0;
  const double x = load(args.beta, b, t, head);
  if (args.beta_space == BetaSpace::value) return x;
  return args.beta_space == BetaSpace::sigmoid ? sigmoid(x) : 2.0 * sigmoid(x);
}

inline void store_state(const Tensor& state, const MatrixXd& S, Index n, Index head) {
  for (Index i = 0; i < S.rows(); ++i) {
    for (Index j = 0; j < S.cols(); ++j) store(state, S(i, j), n, head, i, j);
  }
}

/// One sequence of one value head: tokens [begin, end) of batch row b, state number n, intermediate states from number `first` on.
inline void forward_head(const ForwardArgs& args, Index n, Index b, Index begin, Index end, Index head, Index first = 0) {
  const Index K = args.q.shape[3], V = args.v.shape[3];
  const Index key_head = head / (args.v.shape[2] / args.q.shape[2]);
  const double scale = args.scale ? static_cast<double>(*args.scale) : 1.0 / std::sqrt(static_cast<double>(K));
  const bool delta = args.recurrence.update == Update::delta;

  MatrixXd S = MatrixXd::Zero(K, V);
  VectorXd z = VectorXd::Zero(K);
  for (Index i = 0; i < K; ++i) {
    for (Index j = 0; j < V; ++j) {
      if (args.initial_state.present()) S(i, j) = load(args.initial_state, n, head, i, j);
    }
    if (args.initial_normalizer.present()) z[i] = load(args.initial_normalizer, n, head, i);
  }

  for (Index t = begin; t < end; ++t) {
    const VectorXd q = load_row(args.q, b, t, key_head, K, args.qk_l2norm);
    const VectorXd k = load_row(args.k, b, t, key_head, K, args.qk_l2norm);
    const VectorXd v = load_row(args.v, b, t, head, V, false);
    const double beta = load_beta(args, b, t, head);

    if (args.log_decay.present()) {
      VectorXd a(K);
      for (Index i = 0; i < K; ++i) {
        a[i] = load_decay(args, b, t, head, args.recurrence.gate == Gate::channel ? i : 0);
      }
      S = a.asDiagonal() * S;
      z = a.cwiseProduct(z);
    }
    const VectorXd u = delta ? VectorXd(beta * (v - S.transpose() * k)) : VectorXd(beta * v);
    S += k * u.transpose();
    z += k;
    VectorXd o = scale * (S.transpose() * q);
    if (args.recurrence.normalize) o /= z.dot(q);

    for (Index j = 0; j < V; ++j) store(args.out, o[j], b, t, head, j);

    const Index done = t + 1 - begin;
    if (args.intermediate_states.present() && done % args.state_interval == 0) {
      store_state(args.intermediate_states, S, first + done / args.state_interval - 1, head);
    }
  }

  if (args.final_state.present()) store_state(args.final_state, S, n, head);
  for (Index i = 0; i < K && args.final_normalizer.present(); ++i) store(args.final_normalizer, z[i], n, head, i);
}

/// Every sequence and value head.
inline void forward(const ForwardArgs& args) {
  const bool packed = args.cu_seqlens.present();
  const Index sequences = packed ? args.cu_seqlens.shape[0] - 1 : args.q.shape[0];
  Index first = 0;  // of the intermediate states of sequence n
  for (Index n = 0; n < sequences; ++n) {
    const Index begin = packed ? static_cast<Index>(load(args.cu_seqlens, n)) : 0;
    const Index end = packed ? static_cast<Index>(load(args.cu_seqlens, n + 1)) : args.q.shape[1];
    for (Index head = 0; head < args.v.shape[2]; ++head) forward_head(args, n, packed ? 0 : n, begin, end, head, first);
    if (args.intermediate_states.present()) first += (end - begin) / args.state_interval;
  }
}

}  // namespace delta_attention::reference
