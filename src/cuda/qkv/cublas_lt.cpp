#include "cuda/qkv/cublas_lt.h"

#include "cuda/device/runtime.h"

#if __has_include(<cublasLt.h>)

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

namespace delta_attention::qkv {
namespace {

/// The functions of the library that are used here.
struct CublasLt {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  std::string missing;  // why it cannot be used

  CublasLt() {
    const std::string file = "libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR);
    void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = "cuBLASLt does not load: " + std::string(dlerror());
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) missing = file + " has no " + name;
    };
    find(create, "cublasLtCreate");
    find(matmul, "cublasLtMatmul");
    find(desc_create, "cublasLtMatmulDescCreate");
    find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
  }
};

const CublasLt& cublas_lt() {
  static const CublasLt library;
  return library;
}

void require(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw CudaError("cuBLASLt: " + std::string(what) + ": status " + std::to_string(static_cast<int>(status)));
}

/// The current device's handle, kept for the life of the program.
cublasLtHandle_t handle() {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  int device = 0;
  DELTA_ATTENTION_CUDA(cudaGetDevice(&device));
  const std::lock_guard<std::mutex> lock(mutex);
  cublasLtHandle_t& own = handles[device];
  if (own == nullptr) require(cublas_lt().create(&own), "create");
  return own;
}

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::f16 ? CUDA_R_16F : dtype == DType::bf16 ? CUDA_R_16BF : CUDA_R_32F;
}

/// How far a matrix is aligned: rows and batch rows as much as its start.
std::uint32_t alignment_of(const Product::Matrix& matrix, DType dtype) {
  const std::uintptr_t size = size_of(dtype);
  const std::uintptr_t all = reinterpret_cast<std::uintptr_t>(matrix.data) | static_cast<std::uintptr_t>(matrix.stride) * size |
                             static_cast<std::uintptr_t>(matrix.batch_stride) * size | 256;
  return static_cast<std::uint32_t>(all & (~all + 1));
}

using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, decltype(&cublasLtMatrixLayoutDestroy)>;

/// A row-major matrix as cuBLASLt sees it: `inner` elements lie side by side, `outer` times.
Layout layout_of(const Product::Matrix& matrix, DType dtype, std::int64_t inner, std::int64_t outer, std::int64_t batch) {
  const CublasLt& lt = cublas_lt();
  cublasLtMatrixLayout_t raw = nullptr;
  const std::int64_t stride = std::max(matrix.stride, inner);  // of a single row it may be anything
  require(lt.layout_create(&raw, type_of(dtype), static_cast<std::uint64_t>(inner), static_cast<std::uint64_t>(outer), stride), "layout");
  Layout layout(raw, lt.layout_destroy);
  const auto count = static_cast<std::int32_t>(batch);
  require(lt.layout_set(raw, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count), "batch count");
  const std::int64_t offset = matrix.batch_stride;
  require(lt.layout_set(raw, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset, sizeof offset), "batch stride");
  return layout;
}

/// One batch row where batch rows follow one another as rows do.
Product merged(Product p) {
  const auto follows = [&](const Product::Matrix& x) { return x.batch_stride == p.rows * x.stride; };
  if (p.batch > 1 && follows(p.x) && follows(p.y)) {
    p.rows *= p.batch;
    p.batch = 1;
  }
  if (p.batch == 1) p.x.batch_stride = p.y.batch_stride = 0;
  return p;
}

using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, decltype(&cublasLtMatmulDescDestroy)>;

Operation operation_of(const Product& p) {
  const CublasLt& lt = cublas_lt();
  cublasLtMatmulDesc_t raw = nullptr;
  require(lt.desc_create(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F), "operation");
  Operation operation(raw, lt.desc_destroy);
  if (p.bias == nullptr) return operation;
  const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
  require(lt.desc_set(raw, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue), "epilogue");
  require(lt.desc_set(raw, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p.bias, sizeof p.bias), "bias");
  return operation;
}

using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, decltype(&cublasLtMatmulPreferenceDestroy)>;

Preference preference_of(const Product& p, std::size_t scratch_bytes) {
  const CublasLt& lt = cublas_lt();
  cublasLtMatmulPreference_t raw = nullptr;
  require(lt.preference_create(&raw), "preference");
  Preference preference(raw, lt.preference_destroy);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    require(lt.preference_set(raw, attribute, &value, sizeof value), "preference");
  };
  const std::uint64_t bytes = scratch_bytes;
  const std::uint32_t repeatable = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, bytes);
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, repeatable);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.w, p.dtype));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.x, p.dtype));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment_of(p.y, p.dtype));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment_of(p.y, p.dtype));
  return preference;
}

}  // namespace

const std::string& cublas_lt_missing_reason() { return cublas_lt().missing; }

void multiply(const Product& product, void* scratch, std::size_t scratch_bytes, cudaStream_t stream) {
  const CublasLt& lt = cublas_lt();
  const Product p = merged(product);
  const Operation operation = operation_of(p);
  const Layout w = layout_of(p.w, p.dtype, p.columns, p.channels, p.batch), x = layout_of(p.x, p.dtype, p.channels, p.rows, p.batch),
               y = layout_of(p.y, p.dtype, p.columns, p.rows, p.batch);
  const Preference preference = preference_of(p, scratch_bytes);
  cublasLtMatmulHeuristicResult_t best = {};
  int found = 0;
  const cublasStatus_t status =
      lt.heuristic(handle(), operation.get(), w.get(), x.get(), y.get(), y.get(), preference.get(), 1, &best, &found);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || (status == CUBLAS_STATUS_SUCCESS && found == 0)) {
    throw Unsupported("qkv_cublaslt: cuBLASLt has no algorithm for these sizes and alignments");
  }
  require(status, "choice of an algorithm");
  const float one = 1.0f, zero = 0.0f;
  void* result = const_cast<void*>(p.y.data);
  require(lt.matmul(handle(), operation.get(), &one, p.w.data, w.get(), p.x.data, x.get(), &zero, result, y.get(), result, y.get(),
                    &best.algo, scratch, scratch_bytes, stream),
          "product");
}

}  // namespace delta_attention::qkv

#else

namespace delta_attention::qkv {

const std::string& cublas_lt_missing_reason() {
  static const std::string reason = "built without cublasLt.h, which the CUDA toolkit's cuBLAS package has";
  return reason;
}

void multiply(const Product&, void*, std::size_t, cudaStream_t) { throw Unsupported(cublas_lt_missing_reason()); }

}  // namespace delta_attention::qkv

#endif
