#pragma once

// Tensor-core products of 16-bit matrices with f32 sums (mma.sync, sm_80 and up), and the tiles of shared memory that feed them.
//
// A warp's fragments, as PTX lays them out: lane l = 4 g + t (g = l / 4, t = l % 4).
//     A  16 x 16   4 registers: rows g and g + 8, columns 2t, 2t + 1 and the same 8 columns on
//     B  16 x  8   2 registers: column g, rows 2t, 2t + 1 and the same 8 rows on
//     C  16 x  8   4 floats:    row g columns 2t, 2t + 1; row g + 8 the same
// With tf32 operands a product is half as deep:
//     A  16 x  8   4 registers: row g column t, row g + 8 column t, row g column t + 4, row g + 8 column t + 4
//     B   8 x  8   2 registers: column g, row t and row t + 4

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "problem/element.h"

namespace delta_attention {

/// Where the 16-byte chunk `chunk` of row `row` lies in a tile whose rows have kChunks of them, counted in 16 bytes. Chunks change
/// places by the row, so that the eight rows that an access phase of ldmatrix reads lie in different banks.
template <int kChunks>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  static_assert(kChunks % 8 == 0);
  return row * kChunks + (chunk ^ (row & 7));
}

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

template <class T>
__device__ __forceinline__ T* shared_pointer(unsigned address) {
  return static_cast<T*>(__cvta_shared_to_generic(address));
}

/// Starts copying 16 bytes from global to shared memory, past L1; only the first `bytes` of them are read, the rest becomes 0. Waited for
/// like __pipeline_memcpy_async, which makes a case distinction of a length that is not known at compile time.
__device__ __forceinline__ void start_copy(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

/// Four 8 x 8 matrices of 16-bit elements; lane l names a row (16 bytes) of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned address, unsigned (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
/// The same, each transposed.
__device__ __forceinline__ void load_matrices_transposed(unsigned address, unsigned (&x)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}

/// The other way, each transposed. Before sm_90 the lanes tell each other their rows, and store single elements.
__device__ __forceinline__ void store_matrices_transposed(unsigned address, const unsigned (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
#else
  const unsigned lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (unsigned i = 0; i < 8; ++i) {
    const unsigned row = __shfl_sync(kFullWarp, address, i / 2 * 8 + lane % 4 * 2 + i % 2);
    *shared_pointer<unsigned short>(row + lane / 4 * 2) = static_cast<unsigned short>(x[i / 2] >> i % 2 * 16);
  }
#endif
}

/// c += a b
template <class Element>
__device__ __forceinline__ void multiply_add(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]);
template <>
__device__ __forceinline__ void multiply_add<BFloat16>(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<Half>(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// c = a b
template <class Element>
__device__ __forceinline__ void multiply(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]);
template <>
__device__ __forceinline__ void multiply<BFloat16>(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}
template <>
__device__ __forceinline__ void multiply<Half>(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/// Two numbers rounded to 16 bits, the first in the lower half.
template <class Element>
__device__ __forceinline__ unsigned pack(float low, float high);
template <>
__device__ __forceinline__ unsigned pack<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
template <>
__device__ __forceinline__ unsigned pack<Half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}

/// The numbers of a packed pair.
template <class Element>
__device__ __forceinline__ float2 unpack(unsigned pair);
template <>
__device__ __forceinline__ float2 unpack<Half>(unsigned pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack<BFloat16>(unsigned pair) {
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}

/// x rounded to tf32 (11 bits), which the tensor cores otherwise truncate to.
__device__ __forceinline__ unsigned to_tf32(float x) {
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

/// The same as a number, for finite x: what the tensor cores then cut off is 0 or rounded up already. A third of the instructions.
__device__ __forceinline__ float round_for_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

/// c += a b, tf32.
__device__ __forceinline__ void multiply_add_tf32(const unsigned (&a)[4], const unsigned (&b)[2], float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace delta_attention
