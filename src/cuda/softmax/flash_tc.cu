// flash_tc: softmax attention on tensor cores, so that the recurrences are compared with a strong softmax.
//
// Algorithm. The flash-attention forward: a block owns 128 query rows of one (sequence, head) and goes through the keys that they can
// see, 64 at a time. S = Q K^T and O += P V are tensor-core products of 16-bit operands with f32 sums; scores, maxima, sums and the
// output stay in f32 registers. Weights are rounded to the operands' type for the second product, and the sum of the weights is taken
// before rounding.
//
// Data flow of one tile, by all 4 warps, each with 32 of the rows:
//     meet             keys have arrived; everyone is done with the values of the tile before
//     start values, S = Q K^T            Q and K fragments by ldmatrix
//     mask the tiles that need it, running softmax in registers: a row lies in 4 lanes
//     meet             values have arrived; everyone is done with the keys
//     start the next keys, O += P V      score fragments, packed, are the weights' fragments; V by ldmatrix.trans
// 32 rows a warp instead of 16: each fragment of K and V read from shared memory serves two products, without which shared memory, not
// the tensor cores, would set the pace.
//
// Which tiles. From the first key that the block's first row sees to the last that its last row does; hidden tiles are not loaded, and only
// those on the edge of a mask are masked element by element. Blocks with many keys start first (work_order.cuh).
//
// Budget at 128 channels: 32 KB for Q (later for the output on its way out), 16 KB each for K and V; 128 threads of up to 255 registers,
// 2 blocks a multiprocessor. Rows of shared memory are swizzled in 16-byte chunks (cuda/device/mma.cuh).
//
// Wins for 16-bit operands with 64 or 128 channels; loses to libraries that use Hopper's wgmma and TMA. Measured: docs/performance.md.
// Source: FlashAttention-2's split of work among warps; PTX's mma and ldmatrix fragments.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "api/architectures.h"
#include "api/softmax_kernel.h"
#include "cuda/device/mma.cuh"
#include "cuda/device/rows.cuh"
#include "cuda/device/runtime.h"
#include "cuda/softmax/scores.cuh"
#include "cuda/softmax/work_order.cuh"

namespace delta_attention {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kRows = 128, kKeys = 64;      // of a block, of a tile
constexpr int kWarpRows = kRows / kWarps;   // 32: two fragments
constexpr int kFragments = kWarpRows / 16;  // of rows a warp
constexpr float kLog2E = 1.4426950408889634f;

/// kInNats: scores are scaled (and capped) before their maximum is taken. Without a cap and with a positive scale, the scale can
/// wait for the exponential.
template <class Element_, int kDim_, bool kInNats_>
struct Policy {
  using Element = Element_;
  static constexpr int kDim = kDim_;
  static constexpr bool kInNats = kInNats_;
  static constexpr int kChunks = kDim / 8;  // of 16 bytes a row
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = (kRows + 2 * kKeys) * kRowBytes;
  static constexpr int kBytes = kTileBytes + 128;  // and the block's Place
};

struct Params {
  SoftmaxProblem problem;
  WorkOrder order;
  std::int64_t side_by_side;  // blocks that start on multiprocessors of their own
};

/// The block's part, in shared memory: most of the time nobody needs it in registers.
struct Place {
  SequencePair pair;
  std::int64_t first_row, head, key_head;
  int rows;
  int begin, end;          // keys that any row sees, from the start of a tile
  int all_begin, all_end;  // keys that every row sees
};

/// Scores of a warp's 32 rows and 64 keys, or its outputs: [fragment][columns / 8].
template <int kColumns>
using Sums = float[kFragments][kColumns / 8][4];

/// A row's running softmax. A lane has rows g and g + 8 of each fragment; its sums are its own share.
using Softmaxes = RunningSoftmax[kFragments][2];

/// `rows` rows, kCount with zeros after them, from global memory to a swizzled tile.
template <class P, int kCount>
__device__ __forceinline__ void start_rows(const typename P::Element* from, std::int64_t stride, int rows, uint4* to) {
  constexpr int kAtOnce = kThreads / P::kChunks;  // rows; a multiple of 8, which the swizzle repeats after
  const int row = threadIdx.x / P::kChunks, chunk = threadIdx.x % P::kChunks;
  const typename P::Element* own = from + row * stride + chunk * 8;
  uint4* target = to + swizzled<P::kChunks>(row, chunk);
#pragma unroll
  for (int i = 0; i < kCount; i += kAtOnce) {
    const bool exists = row + i < rows;
    __pipeline_memcpy_async(target + i * P::kChunks, exists ? own : from, 16, exists ? 0 : 16);
    own += kAtOnce * stride;
  }
  __pipeline_commit();
}

__device__ __forceinline__ void arrived() {
  __pipeline_wait_prior(0);
  __syncthreads();
}

/// S = Q K^T
template <class P>
__device__ __forceinline__ void multiply_keys(const uint4* q, const uint4* keys, Sums<kKeys>& scores) {
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * kWarpRows;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[f][n][e] = 0.0f;
    }
  }
  // Where step 0 is; chunks of later steps differ from it in bits that exclusive or changes, also in a swizzled row.
  // A: rows 0-7 and 8-15 of the first 8 channels, then of the next 8. B: keys 0-7 of 8 channels, of the next 8, then keys 8-15.
  const unsigned a_start = shared_address(q + swizzled<P::kChunks>(first_row + lane % 16, lane / 16));
  const unsigned b_start = shared_address(keys + swizzled<P::kChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2));
  // Fragments are fetched one product ahead.
  constexpr int kSteps = P::kDim / 16, kPairs = kKeys / 16;
  unsigned a[2][kFragments][4], b[2][4];
  const auto load_a = [&](int step) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) load_matrices((a_start ^ (step * 32)) + f * 16 * P::kRowBytes, a[step % 2][f]);
  };
  const auto load_b = [&](int i) { load_matrices((b_start ^ (i / kPairs * 32)) + i % kPairs * 16 * P::kRowBytes, b[i % 2]); };
  load_a(0);
  load_b(0);
#pragma unroll
  for (int i = 0; i < kSteps * kPairs; ++i) {
    const int step = i / kPairs, pair = i % kPairs;
    if (pair == 0 && step + 1 < kSteps) load_a(step + 1);
    if (i + 1 < kSteps * kPairs) load_b(i + 1);
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      multiply_add<typename P::Element>(a[step % 2][f], b[i % 2][0], b[i % 2][1], scores[f][pair * 2]);
      multiply_add<typename P::Element>(a[step % 2][f], b[i % 2][2], b[i % 2][3], scores[f][pair * 2 + 1]);
    }
  }
}

/// O += P V
template <class P>
__device__ __forceinline__ void add_values(const Sums<kKeys>& weights, const uint4* values, Sums<P::kDim>& out) {
  const int lane = threadIdx.x % kWarpSize;
  // B, transposed: keys 0-7 and 8-15 of 8 channels, then of the next 8.
  const unsigned b_start = shared_address(values + swizzled<P::kChunks>(lane % 16, lane / 16));
  constexpr int kSteps = kKeys / 16, kPairs = P::kDim / 16;
  unsigned a[kFragments][4], b[2][4];
  const auto load_b = [&](int i) {
    load_matrices_transposed((b_start ^ (i % kPairs * 32)) + i / kPairs * 16 * P::kRowBytes, b[i % 2]);
  };
  load_b(0);
#pragma unroll
  for (int i = 0; i < kSteps * kPairs; ++i) {
    const int step = i / kPairs, pair = i % kPairs;
    if (i + 1 < kSteps * kPairs) load_b(i + 1);
    if (pair == 0) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float(&w)[4] = weights[f][step * 2 + half];
          a[f][half * 2] = pack<typename P::Element>(w[0], w[1]);
          a[f][half * 2 + 1] = pack<typename P::Element>(w[2], w[3]);
        }
      }
    }
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      multiply_add<typename P::Element>(a[f], b[i % 2][0], b[i % 2][1], out[f][pair * 2]);
      multiply_add<typename P::Element>(a[f], b[i % 2][2], b[i % 2][3], out[f][pair * 2 + 1]);
    }
  }
}

/// This lane's row `half` of fragment `f`, counted in the block.
__device__ __forceinline__ int row_of(int f, int half) {
  return threadIdx.x / kWarpSize * kWarpRows + f * 16 + half * 8 + threadIdx.x % kWarpSize / 4;
}

/// Hides what rows do not see of the tile at `first_key`.
__device__ __forceinline__ void mask_scores(const SoftmaxProblem& p, const Place& place, std::int64_t first_key, Sums<kKeys>& scores) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const KeyRange seen = p.visible(place.pair, place.first_row + row_of(f, half));
      const int begin = static_cast<int>(seen.begin - first_key), end = static_cast<int>(seen.end - first_key);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int column = n * 8 + threadIdx.x % 4 * 2 + e;
          if (column < begin || column >= end) scores[f][n][half * 2 + e] = -INFINITY;
        }
      }
    }
  }
}

/// Scores, in units of 1 / factor of log2, become weights, and the rows' sums follow. All that a row has is relative to 2^(max factor); the
/// maximum moves, and rescales it, only when scores have grown past it by 2^kSlack, as no weight may overflow 16 bits.
template <class P>
__device__ __forceinline__ void merge(float factor, Sums<kKeys>& scores, Softmaxes& softmaxes, Sums<P::kDim>& out) {
  constexpr float kSlack = 8.0f;
  float max[kFragments][2];
  bool moves = false;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& m = max[f][half];
      m = scores[f][0][half * 2];
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) m = fmaxf(m, fmaxf(scores[f][n][half * 2], scores[f][n][half * 2 + 1]));
      m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
      m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
      moves = moves || m * factor > softmaxes[f][half].max * factor + kSlack;
    }
  }
  if (__any_sync(kFullWarp, moves)) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        RunningSoftmax& s = softmaxes[f][half];
        const float before = s.max;
        s.max = fmaxf(before, max[f][half]);
        const float rescale = before == -INFINITY ? 0.0f : exp2_approx((before - s.max) * factor);
        s.sum *= rescale;
#pragma unroll
        for (int n = 0; n < P::kDim / 8; ++n) {
          out[f][n][half * 2] *= rescale;
          out[f][n][half * 2 + 1] *= rescale;
        }
      }
    }
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RunningSoftmax& s = softmaxes[f][half];
      const float shift = s.max == -INFINITY ? 0.0f : s.max * factor;  // a row that has seen no key yet: every weight is 2^-infinity = 0
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[f][n][half * 2 + e];
          score = exp2_approx(score * factor - shift);
          s.sum += score;
        }
      }
    }
  }
}

/// Scores in nats.
__device__ __forceinline__ void scale_scores(const SoftmaxProblem& p, Sums<kKeys>& scores) {
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float score = p.scale * scores[f][n][e];
        scores[f][n][e] = p.softcap > 0.0f ? p.softcap * tanhf(score / p.softcap) : score;
      }
    }
  }
}

/// Outputs, divided by their sums, through the warp's own rows of shared memory to global memory.
template <class P>
__device__ __forceinline__ void store(const SoftmaxProblem& p, const Place& place, Softmaxes& softmaxes, float factor, Sums<P::kDim>& out,
                                      uint4* staging) {
  using Element = typename P::Element;
  const int lane = threadIdx.x % kWarpSize, first_row = threadIdx.x / kWarpSize * kWarpRows;
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      RunningSoftmax s = softmaxes[f][half];
      s.sum += __shfl_xor_sync(kFullWarp, s.sum, 1);
      s.sum += __shfl_xor_sync(kFullWarp, s.sum, 2);
      const float divide = normalizer(s);
      const int row = row_of(f, half);
      if (p.lse.present && lane % 4 == 0 && row < place.rows) {
        const float lse = s.sum > 0.0f ? s.max * factor / kLog2E + logf(s.sum) : -INFINITY;
        p.lse.store(p.lse.offset(place.pair.batch, place.pair.query_begin + place.first_row + row, place.head), lse);
      }
#pragma unroll
      for (int n = 0; n < P::kDim / 8; ++n) {
        reinterpret_cast<unsigned*>(staging + swizzled<P::kChunks>(row, n))[lane % 4] =
            pack<Element>(out[f][n][half * 2] * divide, out[f][n][half * 2 + 1] * divide);
      }
    }
  }
  __syncwarp();
  const std::int64_t start = p.out.offset(place.pair.batch, place.pair.query_begin + place.first_row, place.head);
  auto* to = static_cast<Element*>(p.out.data) + start;
#pragma unroll 4
  for (int i = lane; i < kWarpRows * P::kChunks; i += kWarpSize) {
    const int row = first_row + i / P::kChunks, chunk = i % P::kChunks;
    if (row < place.rows) *reinterpret_cast<uint4*>(to + row * p.out.strides[1] + chunk * 8) = staging[swizzled<P::kChunks>(row, chunk)];
  }
}

/// Where all blocks run at once, two a multiprocessor, the second ones come in the opposite order, so that a long one shares with a
/// short one.
__device__ __forceinline__ WorkOrder::Work work_of(const Params& params, std::int64_t block) {
  const std::int64_t blocks = params.order.row_blocks * params.order.heads;
  const bool second = blocks <= 2 * params.side_by_side && block >= params.side_by_side;
  return params.order.at(second ? blocks - 1 - (block - params.side_by_side) : block);
}

__device__ __forceinline__ Place place_of(const Params& params, std::int64_t block) {
  const SoftmaxProblem& p = params.problem;
  const WorkOrder::Work work = work_of(params, block);
  Place place;
  place.head = work.head % p.heads;
  place.key_head = p.key_head(place.head);
  place.pair = p.sequence(work.head / p.heads);
  place.first_row = work.row_block * kRows;
  const std::int64_t left = place.pair.queries - place.first_row;
  place.rows = static_cast<int>(left < 0 ? 0 : left < kRows ? left : kRows);
  const KeyRange first = p.visible(place.pair, place.first_row), last = p.visible(place.pair, place.first_row + place.rows - 1);
  place.begin = static_cast<int>(first.begin / kKeys * kKeys);
  place.end = static_cast<int>(last.end);
  place.all_begin = static_cast<int>(last.begin);
  place.all_end = static_cast<int>(first.end);
  return place;
}

/// Keys or values from `key` on.
template <class P>
__device__ __forceinline__ void start_tile(const InputOperand& x, const Place& place, int key, uint4* to) {
  const std::int64_t start = x.offset(place.pair.batch, place.pair.key_begin + key, place.key_head);
  const std::int64_t left = place.pair.keys - key;
  start_rows<P, kKeys>(static_cast<const typename P::Element*>(x.data) + start, x.strides[1], static_cast<int>(left), to);
}

template <class P>
__global__ void __launch_bounds__(kThreads, 2) flash(const __grid_constant__ Params params) {
  extern __shared__ __align__(256) uint4 dynamic_shared[];
  static_assert(sizeof(Place) <= P::kBytes - P::kTileBytes);
  Place& place = *reinterpret_cast<Place*>(reinterpret_cast<unsigned char*>(dynamic_shared) + P::kTileBytes);
  const SoftmaxProblem& p = params.problem;
  if (threadIdx.x == 0) place = place_of(params, blockIdx.x);
  __syncthreads();
  if (place.rows == 0) return;
  uint4 *q = dynamic_shared, *keys = q + kRows * P::kChunks, *values = keys + kKeys * P::kChunks;

  Sums<P::kDim> out = {};
  Softmaxes softmaxes;
  const float factor = P::kInNats ? kLog2E : p.scale * kLog2E;
  const int end = place.end;
  int key = place.begin;
  if (key < end) {
    const std::int64_t start = p.q.offset(place.pair.batch, place.pair.query_begin + place.first_row, place.head);
    start_rows<P, kRows>(static_cast<const typename P::Element*>(p.q.data) + start, p.q.strides[1], place.rows, q);
    start_tile<P>(p.k, place, key, keys);
  }
#pragma unroll 1
  for (; key < end; key += kKeys) {
    arrived();  // the keys; and everyone is done with the values before
    start_tile<P>(p.v, place, key, values);
    Sums<kKeys> scores;
    multiply_keys<P>(q, keys, scores);
    if (P::kInNats) scale_scores(p, scores);
    if (key < place.all_begin || key + kKeys > place.all_end) mask_scores(p, place, key, scores);
    merge<P>(factor, scores, softmaxes, out);
    arrived();  // the values; and everyone is done with the keys
    if (key + kKeys < end) start_tile<P>(p.k, place, key + kKeys, keys);
    add_values<P>(scores, values, out);
  }
  __syncwarp();  // a warp's own rows of Q become its staging
  store<P>(p, place, softmaxes, factor, out, q);
}

// ---------------------------------------------------------------------------------------------------------------- host

/// Calls use(policy) with the one for the problem.
template <class Use>
void with_policy(const SoftmaxProblem& p, const Use& use) {
  const auto with_element = [&](auto element) {
    using Element = decltype(element);
    const bool in_nats = p.softcap > 0.0f || p.scale <= 0.0f;
    if (p.head_dim == 64) return in_nats ? use(Policy<Element, 64, true>()) : use(Policy<Element, 64, false>());
    in_nats ? use(Policy<Element, 128, true>()) : use(Policy<Element, 128, false>());
  };
  p.dtype == DType::bf16 ? with_element(BFloat16()) : with_element(Half());
}

std::string unsupported(const SoftmaxProblem& p, const DeviceProperties& device, const Settings&) {
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "tensor cores multiply f16 and bf16 here; q is " + std::string(name(p.dtype));
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (device.capability < 80) return "needs compute capability 8.0";
  if (p.head_dim != 64 && p.head_dim != 128) return "head_dim is " + std::to_string(p.head_dim) + "; compiled for 64 and 128";
  if (p.mask.present) return "no additive mask";
  if (p.paged()) return "keys in pages are read by 'decode' and 'vec_fused'";
  const std::int64_t head_dim = p.head_dim;
  if (!reads_in_pieces(p.q, head_dim, 8) || !reads_in_pieces(p.k, head_dim, 8) || !reads_in_pieces(p.v, head_dim, 8) ||
      !reads_in_pieces(p.out, head_dim, 8)) {
    return "rows of q, k, v and out have to start at multiples of 16 bytes";
  }
  constexpr std::int64_t kMost = 0x7fffffff;
  if (p.keys > kMost - kKeys) return "more than 2^31 keys";
  if (WorkOrder(p, kRows).blocks() > kMost) return "more blocks than a grid has";
  std::string reason;
  with_policy(p, [&](auto policy) {
    const std::size_t bytes = decltype(policy)::kBytes;
    if (bytes > device.shared_memory) {
      reason = "a block needs " + std::to_string(bytes) + " bytes of shared memory; " + device.name + " has " +
               std::to_string(device.shared_memory);
    }
  });
  return reason;
}

void launch(const SoftmaxLaunch& call) {
  const SoftmaxProblem& p = call.problem;
  with_policy(p, [&](auto policy) {
    using P = decltype(policy);
    const Params params = {p, WorkOrder(p, kRows), call.device.multiprocessors};
    DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(flash<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes));
    flash<P><<<static_cast<unsigned>(params.order.blocks()), kThreads, P::kBytes, static_cast<cudaStream_t>(call.stream)>>>(params);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
}

}  // namespace

extern const SoftmaxKernel flash_tc_softmax_kernel;
const SoftmaxKernel flash_tc_softmax_kernel = {
    "flash_tc", "tensor cores, f16 and bf16", DeviceType::cuda, true, 20, no_settings, unsupported, no_workspace, launch, true};

}  // namespace delta_attention
