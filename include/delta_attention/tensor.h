#pragma once

// Non-owning strided views of memory that the caller owns, on the CPU or on a CUDA device.

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

namespace delta_attention {

enum class DType : std::int32_t { f32, f16, bf16, f64, i32, i64 };

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f16:
    case DType::bf16: return 2;
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: break;
  }
  return 4;
}

constexpr const char* name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::f64: return "f64";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "unknown";
}

enum class DeviceType : std::int32_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;  // CUDA ordinal; 0 for the CPU
};

constexpr bool operator==(Device a, Device b) { return a.type == b.type && a.index == b.index; }
constexpr bool operator!=(Device a, Device b) { return !(a == b); }

constexpr Device cpu() { return {}; }
constexpr Device cuda(int index = 0) { return {DeviceType::cuda, index}; }

constexpr int kMaxRank = 4;
using Extents = std::array<std::int64_t, kMaxRank>;

/// A view: `element(i, j, ...) = data[i * strides[0] + j * strides[1] + ...]`, strides counted in elements.
/// A default-constructed view (rank 0) means "none" wherever an operand is optional.
template <class Pointer>
struct BasicTensor {
  Pointer data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int rank = 0;
  Extents shape{};
  Extents strides{};

  constexpr bool present() const { return rank > 0; }

  constexpr std::int64_t elements() const {
    std::int64_t count = present() ? 1 : 0;
    for (int axis = 0; axis < rank; ++axis) count *= shape[axis];
    return count;
  }

  /// The same memory with its axes reordered: axis `i` of the result is axis `order[i]` of this view.
  /// `view.permuted({0, 2, 1, 3})` reads a [B,H,T,K] buffer as [B,T,H,K].
  constexpr BasicTensor permuted(std::initializer_list<int> order) const {
    BasicTensor result = *this;
    int axis = 0;
    for (int source : order) {
      result.shape[axis] = shape[source];
      result.strides[axis] = strides[source];
      ++axis;
    }
    return result;
  }
};

struct Tensor : BasicTensor<void*> {
  constexpr Tensor() = default;
  constexpr Tensor(const BasicTensor<void*>& view) : BasicTensor<void*>(view) {}
};

struct ConstTensor : BasicTensor<const void*> {
  constexpr ConstTensor() = default;
  constexpr ConstTensor(const BasicTensor<const void*>& view) : BasicTensor<const void*>(view) {}
  constexpr ConstTensor(const BasicTensor<void*>& view)
      : BasicTensor<const void*>{view.data, view.dtype, view.device, view.rank, view.shape, view.strides} {}
};

namespace detail {
template <class Element>
struct dtype_of;
template <>
struct dtype_of<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of<std::int64_t> {
  static constexpr DType value = DType::i64;
};

template <class View, class Pointer>
constexpr View strided(Pointer data, DType dtype, std::initializer_list<std::int64_t> shape,
                       std::initializer_list<std::int64_t> strides, Device device) {
  View view;
  view.data = data;
  view.dtype = dtype;
  view.device = device;
  for (std::int64_t extent : shape) view.shape[view.rank++] = extent;
  int axis = 0;
  for (std::int64_t stride : strides) view.strides[axis++] = stride;
  return view;
}

template <class View, class Pointer>
constexpr View contiguous(Pointer data, DType dtype, std::initializer_list<std::int64_t> shape, Device device) {
  View view = strided<View>(data, dtype, shape, {}, device);
  std::int64_t stride = 1;
  for (int axis = view.rank - 1; axis >= 0; --axis) {
    view.strides[axis] = stride;
    stride *= view.shape[axis];
  }
  return view;
}
}  // namespace detail

/// A contiguous (row-major) view; the dtype follows from the pointer.
template <class Element>
constexpr Tensor tensor(Element* data, std::initializer_list<std::int64_t> shape, Device device = {}) {
  return detail::contiguous<Tensor>(data, detail::dtype_of<Element>::value, shape, device);
}
template <class Element>
constexpr ConstTensor tensor(const Element* data, std::initializer_list<std::int64_t> shape, Device device = {}) {
  return detail::contiguous<ConstTensor>(data, detail::dtype_of<Element>::value, shape, device);
}

/// A contiguous view with the dtype named, for f16 and bf16, whose C++ types differ from toolkit to toolkit.
constexpr Tensor tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape, Device device = {}) {
  return detail::contiguous<Tensor>(data, dtype, shape, device);
}
constexpr ConstTensor tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                             Device device = {}) {
  return detail::contiguous<ConstTensor>(data, dtype, shape, device);
}

/// A view with every stride named. Inputs may repeat memory with stride 0: one decay per head, for example.
constexpr Tensor strided_tensor(void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                                std::initializer_list<std::int64_t> strides, Device device = {}) {
  return detail::strided<Tensor>(data, dtype, shape, strides, device);
}
constexpr ConstTensor strided_tensor(const void* data, DType dtype, std::initializer_list<std::int64_t> shape,
                                     std::initializer_list<std::int64_t> strides, Device device = {}) {
  return detail::strided<ConstTensor>(data, dtype, shape, strides, device);
}

}  // namespace delta_attention
