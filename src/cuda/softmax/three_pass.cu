// three_pass: the softmax as the formula stands, a warp a query row: the maximum of the scores, the sum of the exponentials, the weighted
// values; scores are computed again in each pass instead of kept (warp_row.cuh).
//
// Three times the dot products of `naive` and twice its reads of keys, for the lack of a running softmax: no memory beside the output, and
// no rescaling. No shared memory. Wins nowhere; it shows what the running softmax is for. Measured: docs/performance.md.

#include "cuda/softmax/warp_row.cuh"

namespace delta_attention {
namespace {

using namespace warp_row;

template <int kPerLane>
__global__ void __launch_bounds__(kThreads, 4) attend(const __grid_constant__ SoftmaxProblem p) {
  const Row r = own_row(p);
  if (!r.exists) return;
  float q[kPerLane], out[kPerLane] = {};
  load_query(p, r, q);
  RunningSoftmax s;
#pragma unroll 1
  for (std::int64_t key = r.seen.begin; key < r.seen.end; ++key) s.max = fmaxf(s.max, score(p, r, q, key));
#pragma unroll 1
  for (std::int64_t key = r.seen.begin; key < r.seen.end; ++key) s.sum += weight(score(p, r, q, key), s.max);
#pragma unroll 1
  for (std::int64_t key = r.seen.begin; key < r.seen.end; ++key) {
    add_value(p, r, key, 1.0f, weight(score(p, r, q, key), s.max), out);
  }
  store_row(p, r, s, out);
}

void launch(const SoftmaxLaunch& call) {
  launch_rows(call, [](auto per_lane) { return attend<decltype(per_lane)::value>; });
}

}  // namespace

extern const SoftmaxKernel three_pass_softmax_kernel;
const SoftmaxKernel three_pass_softmax_kernel = {
    "three_pass", "maximum, sum, values: scores computed three times", DeviceType::cuda, true, -1, no_settings, unsupported, no_workspace,
    launch};

}  // namespace delta_attention
