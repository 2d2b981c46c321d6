#pragma once

// Rows of channels from global to shared memory. start_rows copies raw elements without a detour through registers (cp.async), so
// that every row of every operand is in flight at once; after wait_for_rows, widen_rows turns 16-bit rows into f32 in place, and
// transform_rows changes f32 rows. Separate small loops on purpose: a block runs this code once, and what costs is fetching it.
//
// A row of kPerLane * 32 floats in shared memory belongs to one warp, lane l owns channels [l * kPerLane, (l + 1) * kPerLane). Until
// widened, a row of 16-bit elements lies in the first half of its place.

#include <cuda_pipeline_primitives.h>

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "problem/problem.h"

namespace delta_attention {

/// Whether rows of `size` channels can be read in pieces of `width` elements: pointer and strides (all but the last, which is 1)
/// are multiples of a piece, or of 16 bytes where a piece is larger, and rows hold whole pieces.
template <class Operand>
bool reads_in_pieces(const Operand& operand, std::int64_t size, int width) {
  const std::int64_t element = static_cast<std::int64_t>(size_of(operand.dtype));
  const std::int64_t bytes = width * element < 16 ? width * element : 16;
  bool aligned = size % width == 0 && reinterpret_cast<std::uintptr_t>(operand.data) % bytes == 0;
  for (int axis = 0; axis < kMaxRank - 1; ++axis) aligned = aligned && operand.strides[axis] * element % bytes == 0;
  return aligned;
}

/// Whether rows start at pieces of `width` elements, 16 bytes at most, and so does every piece from there on; the last one may be cut.
template <class Operand>
bool starts_pieces(const Operand& operand, int width) {
  return reads_in_pieces(operand, width, width);
}

/// Rows of one operand: row r starts at element start + r * stride.
struct RowsView {
  const void* data;
  DType dtype;
  bool in_pieces;
  std::int64_t start, stride;
  int rows;  // rows that exist
  int size;  // channels that exist
};

/// Neighbouring elements that move together, up to 16 bytes an access.
template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth < 16 ? sizeof(Element) * kWidth : 16) Piece {
  Element element[kWidth];
};

namespace detail {

/// `Raw` is any type of the elements' size: they are only moved.
template <class Raw, int kPerLane>
__device__ __forceinline__ void start_rows_of(const RowsView& view, int padded_rows, float* shared) {
  constexpr std::size_t kBytes = kPerLane * sizeof(Raw), kAccess = kBytes < 16 ? kBytes : 16;
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
  const int first = lane * kPerLane;
  for (int row = threadIdx.x / kWarpSize; row < padded_rows; row += warps) {
    const Raw* from = static_cast<const Raw*>(view.data) + view.start + row * view.stride + first;
    Raw* to = reinterpret_cast<Raw*>(shared + row * kPerLane * kWarpSize) + first;
    if (view.in_pieces && row < view.rows && first < view.size) {
#pragma unroll
      for (std::size_t at = 0; at < kBytes; at += kAccess) {
        __pipeline_memcpy_async(reinterpret_cast<char*>(to) + at, reinterpret_cast<const char*>(from) + at, kAccess);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) to[e] = row < view.rows && first + e < view.size ? from[e] : Raw(0);
    }
  }
}

constexpr int kRowsAtOnce = 4;  // a lane's independent rows in a loop

/// Reads this lane's part of up to kRowsAtOnce rows as Element, lets `change` have them as f32, and writes them as f32.
template <class Element, int kPerLane, class Change>
__device__ __forceinline__ void rewrite_rows(int padded_rows, float* shared, const Change& change) {
  const int lane = threadIdx.x % kWarpSize, warps = blockDim.x / kWarpSize;
#pragma unroll 1
  for (int base = threadIdx.x / kWarpSize; base < padded_rows; base += warps * kRowsAtOnce) {
    float x[kRowsAtOnce][kPerLane];
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int next = base + i * warps;
      const int row = next < padded_rows ? next : base;  // past the end: a row of this warp again, not written
      const auto raw = reinterpret_cast<const Piece<Element, kPerLane>*>(shared + row * kPerLane * kWarpSize)[lane];
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) x[i][e] = to_float(raw.element[e]);
    }
    __syncwarp();  // 16-bit rows: every lane has read before any writes
    change(x);
#pragma unroll
    for (int i = 0; i < kRowsAtOnce; ++i) {
      const int row = base + i * warps;
      if (row >= padded_rows) continue;
      Piece<float, kPerLane> done;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) done.element[e] = x[i][e];
      reinterpret_cast<Piece<float, kPerLane>*>(shared + row * kPerLane * kWarpSize)[lane] = done;
    }
  }
}

}  // namespace detail

/// Starts copying rows [0, padded_rows) into shared[padded_rows][kPerLane * 32]; what does not exist becomes 0 and its memory is not
/// touched. All warps of the block.
template <int kPerLane>
__device__ __forceinline__ void start_rows(const RowsView& view, int padded_rows, float* shared) {
  if (view.dtype == DType::f32) {
    detail::start_rows_of<std::uint32_t, kPerLane>(view, padded_rows, shared);
  } else {
    detail::start_rows_of<std::uint16_t, kPerLane>(view, padded_rows, shared);
  }
}

/// Waits for all rows that the block has started.
__device__ __forceinline__ void wait_for_rows() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
  __syncthreads();
}

/// Turns raw rows of 16-bit elements into f32 rows, in place. f32 rows are left alone.
template <int kPerLane>
__device__ __forceinline__ void widen_rows(DType dtype, int padded_rows, float* shared) {
  const auto as_they_are = [](auto&) {};
  if (dtype == DType::f16) detail::rewrite_rows<Half, kPerLane>(padded_rows, shared, as_they_are);
  if (dtype == DType::bf16) detail::rewrite_rows<BFloat16, kPerLane>(padded_rows, shared, as_they_are);
}

/// Changes f32 rows in place, several at a time: transform(x) changes this lane's part x[i] of each. A row is read and written by one
/// warp only, here as in widen_rows: row r by warp r % warps.
template <int kPerLane, class Transform>
__device__ __forceinline__ void transform_rows(int padded_rows, float* shared, const Transform& transform) {
  detail::rewrite_rows<float, kPerLane>(padded_rows, shared, transform);
}

}  // namespace delta_attention
