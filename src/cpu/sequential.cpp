// cpu_sequential: the recurrence as it is written, one token after another, in f32 with Eigen's vector operations.
//
//     S <- Diag(a) S,  u = beta (v - S^T k),  S <- S + k u^T,  o = scale S^T q
//
// Every token walks the whole state several times: two matrix-vector products, a rank-1 update and the decay, a few
// arithmetic operations per float moved. It is what one writes first and what cpu_chunkwise is measured against. It
// needs no more memory than the state and has nothing to gain from long inputs; it can win where a call brings a token
// or two.
//
// Compiled once per instruction set (DELTA_ATTENTION_ISA names the namespace), as chunkwise.cpp is.

#include <Eigen/Core>

#include "cpu/chunk.h"

namespace delta_attention::DELTA_ATTENTION_ISA {
namespace {

using cpu_kernels::Chunk;
using cpu_kernels::Index;
using State = Eigen::Map<Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>, Eigen::Aligned64,
                         Eigen::OuterStride<>>;
using Vector = Eigen::Map<Eigen::VectorXf, Eigen::Aligned64>;

void decay_state(const Chunk& chunk, Index token, State& state, Vector& normalizer) {
  if (chunk.gate == Gate::scalar) {
    state *= chunk.decay[token];
    if (chunk.normalize) normalizer *= chunk.decay[token];
  } else if (chunk.gate == Gate::channel) {
    const Vector a(chunk.decay + token * chunk.key_stride, chunk.key_dim);
    state.array().colwise() *= a.array();
    if (chunk.normalize) normalizer.array() *= a.array();
  }
}

}  // namespace

void sequential_chunk(const Chunk& chunk) {
  State state(chunk.state, chunk.key_dim, chunk.columns, Eigen::OuterStride<>(chunk.value_stride));
  Vector normalizer(chunk.normalizer, chunk.key_dim);
  Vector u(chunk.u, chunk.columns);
  for (Index token = 0; token < chunk.tokens; ++token) {
    const Vector q(chunk.q + token * chunk.key_stride, chunk.key_dim);
    const Vector k(chunk.k + token * chunk.key_stride, chunk.key_dim);
    const Vector v(chunk.v + token * chunk.value_stride, chunk.columns);
    Vector out(chunk.out + token * chunk.value_stride, chunk.columns);

    decay_state(chunk, token, state, normalizer);
    if (chunk.update == Update::delta) {
      u.noalias() = state.transpose() * k;
      u = chunk.beta[token] * (v - u);
    } else {
      u = chunk.beta[token] * v;
    }
    state.noalias() += k * u.transpose();
    out.noalias() = state.transpose() * q;
    if (chunk.normalize) {
      normalizer += k;
      out *= chunk.scale / normalizer.dot(q);
    } else {
      out *= chunk.scale;
    }
  }
}

}  // namespace delta_attention::DELTA_ATTENTION_ISA
