// naive: a warp a query row, one key after the other, running softmax in registers (warp_row.cuh).
//
// Algorithm. For each key that the row sees: the lanes' partial dot products are summed across the warp, the maximum moves where the score is
// above it, what the row has is rescaled, the weighted value added. Nothing is shared between rows, so every row reads all its keys and values
// from global memory (mostly from L2, where neighbouring rows have left them). No shared memory; registers: 3 channels' worth a lane.
//
// Wins for a handful of rows or where nothing else fits: any head_dim up to 512, any mask, layout and dtype. Loses by the five shuffles a key and
// the reads. Measured: docs/performance.md.

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
  for (std::int64_t key = r.seen.begin; key < r.seen.end; ++key) {
    const float x = score(p, r, q, key), max = fmaxf(s.max, x);
    const float before = rescaling(s.max, max), share = weight(x, max);
    s = {max, s.sum * before + share};
    add_value(p, r, key, before, share, out);
  }
  store_row(p, r, s, out);
}

void launch(const SoftmaxLaunch& call) {
  launch_rows(call, [](auto per_lane) { return attend<decltype(per_lane)::value>; });
}

}  // namespace

extern const SoftmaxKernel naive_softmax_kernel;
const SoftmaxKernel naive_softmax_kernel = {
    "naive", "a warp a query row, running softmax", DeviceType::cuda, true, 0, no_settings, unsupported, no_workspace, launch};

}  // namespace delta_attention
