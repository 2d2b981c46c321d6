// flash_tc: softmax attention on tensor cores, so that the recurrences are compared with a strong softmax.
//
// Algorithm. The flash-attention forward: a block owns 128 query rows of one (sequence, head) and goes through the keys that they can
// see, 64 at a time. S = Q K^T and O += P V are tensor-core products of 16-bit operands with f32 sums; scores, maxima, sums and the
// output stay in f32 registers. Weights are rounded to the operands' type for the second product, and the sum of the weights is taken
// before rounding. The maxima that weights are relative to lag behind the rows' own: they move only when weights might overflow otherwise,
// so that most tiles need neither a maximum nor a rescaling of the output.
//
// Data flow of one tile, by all 4 warps, each with 32 of the rows:
//     meet             the tile's keys and values have arrived; everyone is done with the tile before; start the next one
//     S = Q K^T        Q and K fragments by ldmatrix
//     mask the tiles that need it, running softmax in registers: a row lies in 4 lanes
//     O += P V         score fragments, packed, are the weights' fragments; V by ldmatrix.trans
// Where shared memory is too small for two tiles in each of two blocks, there is one: values are started when the keys are here, the next
// keys when those are used up, and the warps meet twice a tile.
// 32 rows a warp instead of 16: each fragment of K and V read from shared memory serves two products, without which shared memory, not
// the tensor cores, would set the pace.
//
// Which tiles. From the first key that the block's first row sees to the last that its last row does; hidden tiles are not loaded, and only
// those on the edge of a mask are masked element by element. Blocks with many keys start first (work_order.cuh).
//
// Budget at 128 channels: 32 KB for Q (later for the output on its way out), 16 KB a tile of K or V; 128 threads of up to 255 registers,
// 2 blocks a multiprocessor. Rows of shared memory are swizzled in 16-byte chunks (cuda/device/mma.cuh).
//
// Wins for 16-bit operands with 64 or 128 channels; loses to libraries that use Hopper's wgmma and TMA. Measured: docs/performance.md.
// Source: FlashAttention-2's split of work among warps; PTX's mma and ldmatrix fragments.

#include "api/architectures.h"
#include "api/softmax_kernel.h"
#include "cuda/device/rows.cuh"
#include "cuda/device/runtime.h"
#include "cuda/device/workspace.h"
#include "cuda/softmax/flash_tc_stages.cuh"

namespace delta_attention {
namespace flash {
namespace {

template <class P>
__global__ void __launch_bounds__(kThreads, 2) attend(const __grid_constant__ Params params) {
  extern __shared__ __align__(256) uint4 dynamic_shared[];
  attend_block<P>(params, blockIdx.x, dynamic_shared);
}

/// Two buffers where two blocks of them share a multiprocessor.
template <class TwoBuffers>
int buffers_of(const DeviceProperties& device, const Settings& chosen) {
  const bool fit = 2 * (TwoBuffers::kBytes + kReservedSharedMemory) <= device.shared_memory + kReservedSharedMemory;
  return chosen.get("buffers", fit ? 2 : 1);
}

/// Calls use(policy) with the one for the problem.
template <class Use>
void with_policy(const SoftmaxProblem& p, const DeviceProperties& device, const Settings& chosen, const Use& use) {
  const auto with_buffers = [&](auto element, auto dim, auto in_nats) {
    using Two = Policy<decltype(element), dim.value, in_nats.value, 2>;
    if (buffers_of<Two>(device, chosen) == 2) return use(Two());
    use(Policy<decltype(element), dim.value, in_nats.value, 1>());
  };
  const auto with_scores = [&](auto element, auto dim) {
    if (p.softcap > 0.0f || p.scale <= 0.0f) return with_buffers(element, dim, std::true_type());
    with_buffers(element, dim, std::false_type());
  };
  const auto with_dim = [&](auto element) {
    if (p.head_dim == 64) return with_scores(element, std::integral_constant<int, 64>());
    with_scores(element, std::integral_constant<int, 128>());
  };
  p.dtype == DType::bf16 ? with_dim(BFloat16()) : with_dim(Half());
}

std::vector<Setting> settings() { return {{"buffers", "tiles of keys and of values in shared memory", {1, 2}}}; }

std::string unsupported(const SoftmaxProblem& p, const DeviceProperties& device, const Settings& chosen) {
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
  if (p.q.strides[1] > kMost || p.k.strides[1] > kMost || p.v.strides[1] > kMost) return "rows more than 2^31 elements apart";
  if (WorkOrder(p, kRows).blocks() > kMost) return "more blocks than a grid has";
  std::string reason;
  with_policy(p, device, chosen, [&](auto policy) {
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
  with_policy(p, call.device, call.settings, [&](auto policy) {
    using P = decltype(policy);
    const Params params = {p, WorkOrder(p, kRows), call.device.multiprocessors};
    DELTA_ATTENTION_CUDA(cudaFuncSetAttribute(attend<P>, cudaFuncAttributeMaxDynamicSharedMemorySize, P::kBytes));
    attend<P><<<static_cast<unsigned>(params.order.blocks()), kThreads, P::kBytes, static_cast<cudaStream_t>(call.stream)>>>(params);
    DELTA_ATTENTION_CUDA(cudaGetLastError());
  });
}

}  // namespace
}  // namespace flash

extern const SoftmaxKernel flash_tc_softmax_kernel;
const SoftmaxKernel flash_tc_softmax_kernel = {
    "flash_tc", "tensor cores, f16 and bf16", DeviceType::cuda, true, 20, flash::settings, flash::unsupported, no_workspace, flash::launch, true};

}  // namespace delta_attention
