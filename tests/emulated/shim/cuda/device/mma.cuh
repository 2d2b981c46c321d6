#pragma once

// Stands in for the kernels' header of this name: what ldmatrix and mma.sync do with the registers of a warp, by PTX's layout of fragments.
// (The header's story tells it.)

#include <cuda_pipeline_primitives.h>

#include <cstdint>
#include <cstring>

#include "problem/element.h"

namespace delta_attention {

template <int kChunks>
int swizzled(int row, int chunk) {
  static_assert(kChunks % 8 == 0);
  return row * kChunks + (chunk ^ (row & 7));
}

/// Shared memory is addressed from its start, as on a GPU.
inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(static_cast<const char*>(pointer) - test::this_gpu_thread.shared_memory);
}

template <class T>
T* shared_pointer(unsigned address) {
  return reinterpret_cast<T*>(const_cast<char*>(test::this_gpu_thread.shared_memory) + address);
}

inline void start_copy(void* to, const void* from, int bytes) {
  __pipeline_memcpy_async(to, from, 16, static_cast<std::size_t>(16 - bytes));
}

namespace detail {

inline int lane() { return threadIdx.x % 32; }

/// Row `row` of matrix `matrix`, whose address its lane names.
inline const std::uint16_t* matrix_row(const test::BlockThreads::Board& board, int matrix, int row) {
  const unsigned address = board.registers[static_cast<std::size_t>(matrix * 8 + row)][0];
  return reinterpret_cast<const std::uint16_t*>(test::this_gpu_thread.shared_memory + address);
}

inline unsigned pair(std::uint16_t low, std::uint16_t high) { return low | static_cast<unsigned>(high) << 16; }

template <class Element>
float half_of(unsigned pair, int which) {
  const auto bits = static_cast<std::uint16_t>(which == 0 ? pair : pair >> 16);
  Element element;
  std::memcpy(static_cast<void*>(&element), &bits, 2);
  return to_float(element);
}

template <class Element>
std::uint16_t bits_of(float x) {
  const auto element = from_float<Element>(x);
  std::uint16_t bits;
  std::memcpy(&bits, &element, 2);
  return bits;
}

}  // namespace detail

inline void load_matrices(unsigned address, unsigned (&x)[4]) {
  const int lane = detail::lane();
  const auto& board = exchange([&](auto& written, std::size_t own) { written.registers[own][0] = address; });
  for (int m = 0; m < 4; ++m) {
    const std::uint16_t* row = detail::matrix_row(board, m, lane / 4);
    x[m] = detail::pair(row[lane % 4 * 2], row[lane % 4 * 2 + 1]);
  }
}

inline void load_matrices_transposed(unsigned address, unsigned (&x)[4]) {
  const int lane = detail::lane(), row = lane % 4 * 2, column = lane / 4;
  const auto& board = exchange([&](auto& written, std::size_t own) { written.registers[own][0] = address; });
  for (int m = 0; m < 4; ++m) {
    x[m] = detail::pair(detail::matrix_row(board, m, row)[column], detail::matrix_row(board, m, row + 1)[column]);
  }
}

inline void store_matrices_transposed(unsigned address, const unsigned (&x)[4]) {
  const int lane = detail::lane(), row = lane % 4 * 2, column = lane / 4;
  const auto& board = exchange([&](auto& written, std::size_t own) { written.registers[own][0] = address; });
  for (int m = 0; m < 4; ++m) {
    for (int e = 0; e < 2; ++e) {
      const_cast<std::uint16_t*>(detail::matrix_row(board, m, row + e))[column] = static_cast<std::uint16_t>(x[m] >> e * 16);
    }
  }
}

template <class Element>
void multiply_add(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
  const int lane = detail::lane();
  const auto& board = exchange([&](auto& written, std::size_t own) { written.registers[own] = {a[0], a[1], a[2], a[3], b0, b1}; });
  const auto register_of = [&](int owner, int i) { return board.registers[static_cast<std::size_t>(owner)][static_cast<std::size_t>(i)]; };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const unsigned in_a = register_of(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2);
      const unsigned in_b = register_of(column * 4 + k % 8 / 2, 4 + k / 8);
      c[e] += detail::half_of<Element>(in_a, k % 2) * detail::half_of<Element>(in_b, k % 2);
    }
  }
}

template <class Element>
void multiply(const unsigned (&a)[4], unsigned b0, unsigned b1, float (&c)[4]) {
  for (float& x : c) x = 0.0f;
  multiply_add<Element>(a, b0, b1, c);
}

template <class Element>
unsigned pack(float low, float high) {
  return detail::pair(detail::bits_of<Element>(low), detail::bits_of<Element>(high));
}

template <class Element>
float2 unpack(unsigned pair) {
  return {detail::half_of<Element>(pair, 0), detail::half_of<Element>(pair, 1)};
}

/// To 11 bits, halves away from zero.
inline unsigned to_tf32(float x) {
  return std::isfinite(x) ? (__float_as_uint(x) + 0x1000u) & 0xffffe000u : __float_as_uint(x);
}

inline float round_for_tf32(float x) { return __uint_as_float(__float_as_uint(x) + 0x1000u); }

inline void multiply_add_tf32(const unsigned (&a)[4], const unsigned (&b)[2], float (&c)[4]) {
  const int lane = detail::lane();
  const auto& board = exchange([&](auto& written, std::size_t own) { written.registers[own] = {a[0], a[1], a[2], a[3], b[0], b[1]}; });
  const auto number_of = [&](int owner, int i) {
    return __uint_as_float(board.registers[static_cast<std::size_t>(owner)][static_cast<std::size_t>(i)] & 0xffffe000u);
  };
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 8; ++k) c[e] += number_of(row % 8 * 4 + k % 4, row / 8 + k / 4 * 2) * number_of(column * 4 + k % 4, 4 + k / 4);
  }
}

}  // namespace delta_attention
