// qkv_cublaslt: the fused projection. One matrix product by cuBLASLt, f32 sums, bias in its epilogue, each result rounded once; then,
// unless q, k and v are neighbouring slices of one buffer, which the product writes itself, a launch that carries its columns to where they
// belong.
//
// cuBLASLt is not linked: it is looked for when the first call comes, so that a program without it runs all else and the package stays
// small. What its header declares at build time is what is looked for. Sums that add up in any order are ruled out: results repeat.
//
// Row-major [rows, columns] is column-major [columns, rows]: the product is D = W x in cuBLASLt's terms, with columns as its first extent.
// Grid of split_columns: a block a token, 256 threads, 16 bytes a thread where rows of heads are aligned to them.

#include <string>

#include "api/architectures.h"
#include "api/fused_qkv_kernel.h"
#include "cuda/device/rows.cuh"
#include "cuda/device/runtime.h"
#include "cuda/qkv/cublas_lt.h"

namespace delta_attention {
namespace qkv {
namespace {

constexpr int kThreads = 256;
constexpr std::size_t kProductBytes = std::size_t{32} << 20;  // cuBLASLt's scratch: what NVIDIA recommends for Hopper

std::size_t rounded_up(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

/// Scratch of the product, a bias that cuBLASLt can read, and the product.
struct Scratch {
  std::size_t bias, product, bytes;
  explicit Scratch(const FusedQkvProblem& p)
      : bias(kProductBytes),
        product(bias + rounded_up(static_cast<std::size_t>(p.columns()) * size_of(p.dtype))),
        bytes(product + static_cast<std::size_t>(p.rows() * p.columns()) * size_of(p.dtype)) {}
};

/// Moves pieces of `width` elements; Raw has their size.
template <class Raw>
__global__ void __launch_bounds__(kThreads) split_columns(const __grid_constant__ FusedQkvProblem p, const Raw* product, int width) {
  const std::int64_t row = blockIdx.x, b = row / p.tokens, n = row % p.tokens;
  const int pieces = static_cast<int>(p.columns() / width);
  for (int i = threadIdx.x; i < pieces; i += kThreads) {
    const auto [operand, head, channel] = p.place_of(static_cast<std::int64_t>(i) * width);
    static_cast<Raw*>(operand->data)[operand->offset(b, n, head, channel) / width] = product[row * pieces + i];
  }
}

void split(const FusedQkvProblem& p, const void* product, cudaStream_t stream) {
  const int element = static_cast<int>(size_of(p.dtype)), width = 16 / element;
  const auto blocks = static_cast<unsigned>(p.rows());
  const auto in_pieces = [&](const OutputOperand& operand) { return reads_in_pieces(operand, p.head_dim, width); };
  if (in_pieces(p.q) && in_pieces(p.k) && in_pieces(p.v)) {
    split_columns<<<blocks, kThreads, 0, stream>>>(p, static_cast<const uint4*>(product), width);
  } else if (element == 2) {
    split_columns<<<blocks, kThreads, 0, stream>>>(p, static_cast<const std::uint16_t*>(product), 1);
  } else {
    split_columns<<<blocks, kThreads, 0, stream>>>(p, static_cast<const std::uint32_t*>(product), 1);
  }
  DELTA_ATTENTION_CUDA(cudaGetLastError());
}

/// Whether q, k and v are the columns of one matrix.
bool is_one_matrix(const FusedQkvProblem& p) {
  const auto at = [&](std::int64_t columns) {
    return static_cast<const void*>(static_cast<const char*>(p.q.data) + columns * static_cast<std::int64_t>(size_of(p.dtype)));
  };
  const auto fits = [&](const OutputOperand& x, std::int64_t heads) {
    return x.strides[0] == p.q.strides[0] && x.strides[1] == p.q.strides[1] && (heads == 1 || x.strides[2] == p.head_dim);
  };
  return p.q.strides[1] >= p.columns() && fits(p.q, p.heads) && fits(p.k, p.key_heads) && fits(p.v, p.key_heads) &&
         p.k.data == at(p.heads * p.head_dim) && p.v.data == at((p.heads + p.key_heads) * p.head_dim);
}

std::string unsupported(const FusedQkvProblem& p, const DeviceProperties& device) {
  if (p.dtype == DType::f64) return "f64 operands run on the CPU only";
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (const std::string reason = cublas_lt_missing_reason(); !reason.empty()) return reason;
  if (p.channels > 1 && p.tokens > 1 && p.x.strides[1] < p.channels) return "rows of x overlap";
  if (p.channels > 1 && p.w.strides[0] < p.columns()) return "rows of w overlap";
  if (p.rows() > 0x7fffffff || p.columns() > 0x7fffffff || p.channels > 0x7fffffff) return "more than 2^31 rows or columns";
  return "";
}

std::size_t workspace(const FusedQkvProblem& p) { return Scratch(p).bytes; }

void launch(const FusedQkvLaunch& call) {
  const FusedQkvProblem& p = call.problem;
  const Scratch scratch(p);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  auto* memory = static_cast<char*>(call.workspace);
  const bool straight = is_one_matrix(p);

  Product product;
  product.dtype = p.dtype;
  product.rows = p.tokens;
  product.columns = p.columns();
  product.channels = p.channels;
  product.batch = p.batch;
  product.x = {p.x.data, p.x.strides[1], p.x.strides[0]};
  product.w = {p.w.data, p.w.strides[0], 0};
  product.y = straight ? Product::Matrix{p.q.data, p.q.strides[1], p.q.strides[0]}
                       : Product::Matrix{memory + scratch.product, p.columns(), p.tokens * p.columns()};
  if (p.bias.present) {
    product.bias = p.bias.data;
    if (reinterpret_cast<std::uintptr_t>(p.bias.data) % 16 != 0) {
      product.bias = memory + scratch.bias;
      DELTA_ATTENTION_CUDA(cudaMemcpyAsync(memory + scratch.bias, p.bias.data, static_cast<std::size_t>(p.columns()) * size_of(p.dtype),
                                           cudaMemcpyDeviceToDevice, stream));
    }
  }
  multiply(product, memory, kProductBytes, stream);
  if (!straight) split(p, memory + scratch.product, stream);
}

}  // namespace
}  // namespace qkv

extern const FusedQkvKernel qkv_cublaslt_kernel;
const FusedQkvKernel qkv_cublaslt_kernel = {"qkv_cublaslt", DeviceType::cuda, qkv::unsupported, qkv::workspace, qkv::launch};

}  // namespace delta_attention
