#pragma once

// Marks functions that compile for the CPU and, under nvcc, for the GPU as well. Always inlined: the library compiles some
// files for several instruction sets, and an out-of-line copy from one of them must not end up serving the others.
#if defined(__CUDACC__)
#define DELTA_ATTENTION_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DELTA_ATTENTION_HOST_DEVICE __attribute__((always_inline)) inline
#endif

// Unrolls the loop that follows on the GPU, where a register array must not be indexed at run time.
#if defined(__CUDACC__)
#define DELTA_ATTENTION_UNROLL _Pragma("unroll")
#else
#define DELTA_ATTENTION_UNROLL
#endif
