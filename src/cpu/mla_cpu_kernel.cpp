// Absorbed MLA on the CPU: float64, a row of a head at a time. Simple rather than fast; what the CUDA kernel does, without its splits.

#include <Eigen/Core>
#include <cmath>
#include <limits>

#include "api/mla_kernel.h"
#include "delta_attention_reference.h"

namespace delta_attention {
namespace {

using Eigen::Index;
using Eigen::VectorXd;
using reference::load;
using reference::store;

/// (W^T q_nope, q_rope): the query of latent rows.
VectorXd absorb(const MlaLaunch& call, Index b, Index i, Index head) {
  const MlaProblem& p = call.problem;
  const Index latent = p.attention.head_dim;
  VectorXd q = VectorXd::Zero(p.channels());
  for (Index d = 0; d < p.nope_dim; ++d) {
    const double x = load(call.args.q_nope, b, i, head, d);
    for (Index l = 0; l < latent; ++l) q[l] += x * load(call.args.w_uk, head, d, l);
  }
  for (Index r = 0; r < p.rope_dim; ++r) q[latent + r] = load(call.args.q_rope, b, i, head, r);
  return q;
}

void attend(const MlaLaunch& call, Index b, Index i, Index head) {
  const MlaProblem& p = call.problem;
  const SoftmaxProblem& a = p.attention;
  const VectorXd q = absorb(call, b, i, head);
  const KeyRange keys = a.visible(a.sequence(b), i);
  VectorXd row(p.channels()), o = VectorXd::Zero(a.head_dim);
  double max = -std::numeric_limits<double>::infinity(), sum = 0.0;
  const double scale = call.args.scale ? *call.args.scale : 1.0 / std::sqrt(static_cast<double>(p.nope_dim + p.rope_dim));
  for (Index j = keys.begin; j < keys.end; ++j) {
    for (Index c = 0; c < p.channels(); ++c) row[c] = load(call.args.cache, b, j, c);
    const double score = scale * q.dot(row), grown = std::fmax(max, score);
    const double factor = std::exp(max - grown), weight = std::exp(score - grown);
    sum = sum * factor + weight;
    o = o * factor + row.head(a.head_dim) * weight;
    max = grown;
  }
  for (Index l = 0; l < a.head_dim; ++l) store(call.args.out, sum > 0.0 || sum != sum ? o[l] / sum : 0.0, b, i, head, l);
  if (call.args.lse.present()) store(call.args.lse, max + (sum > 0.0 ? std::log(sum) : 0.0), b, i, head);
}

void launch(const MlaLaunch& call) {
  const SoftmaxProblem& a = call.problem.attention;
  for (Index b = 0; b < a.batch; ++b) {
    for (Index i = 0; i < a.queries; ++i) {
      for (Index head = 0; head < a.heads; ++head) attend(call, b, i, head);
    }
  }
}

}  // namespace

extern const MlaKernel mla_cpu_kernel;
const MlaKernel mla_cpu_kernel = {
    "mla_cpu",
    DeviceType::cpu,
    [](const MlaProblem&, const DeviceProperties&) { return std::string(); },
    [](const MlaProblem&, const DeviceProperties&) { return std::size_t{0}; },
    launch,
};

}  // namespace delta_attention
