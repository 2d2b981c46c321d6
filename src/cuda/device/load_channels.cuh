#pragma once

// Rows of channels from global to shared memory, converted to f32, with the widest access that the rows' alignment allows.

#include <cstdint>

#include "cuda/device/warp.cuh"
#include "problem/problem.h"
#include "state/gate.h"

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

/// Rows of one operand: row r starts at data[start + r * stride].
struct RowsView {
  const void* data;
  DType dtype;
  bool in_pieces;
  std::int64_t start, stride;
  int rows;  // rows that exist
  int size;  // channels that exist
};

/// Neighbouring elements that move together: up to 16 bytes an access.
template <class Element, int kWidth>
struct alignas(sizeof(Element) * kWidth < 16 ? sizeof(Element) * kWidth : 16) Piece {
  Element element[kWidth];
};

namespace detail {

constexpr int kRowsInFlight = 8;  // loads that a lane issues before it needs the first

/// Lane l of the warp moves channels [l * kPerLane, (l + 1) * kPerLane) of rows warp, warp + warps, ...
template <class Element, int kPerLane>
__device__ __forceinline__ void load_rows_of(const RowsView& view, int padded_rows, float* shared) {
  constexpr int kTile = kPerLane * kWarpSize;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = blockDim.x / kWarpSize;
  const int first = lane * kPerLane;
  const auto* data = static_cast<const Element*>(view.data) + view.start + first;
  for (int base = warp; base < padded_rows; base += warps * kRowsInFlight) {
    Piece<Element, kPerLane> piece[kRowsInFlight];
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int row = base + i * warps;
      const Element* at = data + row * view.stride;
      if (row >= view.rows) continue;
      if (view.in_pieces && first < view.size) {
        piece[i] = *reinterpret_cast<const Piece<Element, kPerLane>*>(at);
      } else {
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) {
          if (first + e < view.size) piece[i].element[e] = at[e];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRowsInFlight; ++i) {
      const int row = base + i * warps;
      if (row >= padded_rows) continue;
      Piece<float, kPerLane> out;
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) {
        out.element[e] = row < view.rows && first + e < view.size ? to_float(piece[i].element[e]) : 0.0f;
      }
      *reinterpret_cast<Piece<float, kPerLane>*>(shared + row * kTile + first) = out;
    }
  }
}

}  // namespace detail

/// Loads rows [0, padded_rows) into shared[padded_rows][kPerLane * 32] by all warps of the block; what does not exist becomes 0
/// and its memory is not touched.
template <int kPerLane>
__device__ __forceinline__ void load_rows(const RowsView& view, int padded_rows, float* shared) {
  switch (view.dtype) {
    case DType::f16: return detail::load_rows_of<Half, kPerLane>(view, padded_rows, shared);
    case DType::bf16: return detail::load_rows_of<BFloat16, kPerLane>(view, padded_rows, shared);
    default: return detail::load_rows_of<float, kPerLane>(view, padded_rows, shared);
  }
}

/// Every row of shared[rows][kPerLane * 32] l2-normalised in place.
template <int kPerLane>
__device__ __forceinline__ void l2normalize_rows(int rows, float* shared) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll 4
  for (int row = threadIdx.x / kWarpSize; row < rows; row += blockDim.x / kWarpSize) {
    float* at = shared + row * kPerLane * kWarpSize + lane;
    float squares = 0.0f;
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) squares += at[e * kWarpSize] * at[e * kWarpSize];
    const float factor = l2norm_factor(warp_sum(squares));
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) at[e * kWarpSize] *= factor;
  }
}

}  // namespace delta_attention
