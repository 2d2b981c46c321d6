#include "slices.h"

#include <type_traits>

namespace delta_attention::cli {
namespace {

template <class View>
void narrow(View& x, int axis, std::int64_t first, std::int64_t count) {
  if (!x.present()) return;
  using Byte = std::conditional_t<std::is_same_v<decltype(x.data), void*>, char, const char>;
  x.data = static_cast<Byte*>(x.data) + first * x.strides[axis] * static_cast<std::int64_t>(size_of(x.dtype));
  x.shape[axis] = count;
}

}  // namespace

ForwardArgs head_slice(const ForwardArgs& args, std::int64_t first, std::int64_t count) {
  const std::int64_t group = args.v.shape[2] / args.q.shape[2];
  const std::int64_t first_value = first * group, value_count = count * group;
  ForwardArgs slice = args;
  narrow(slice.q, 2, first, count);
  narrow(slice.k, 2, first, count);
  narrow(slice.v, 2, first_value, value_count);
  narrow(slice.log_decay, 2, first_value, value_count);
  narrow(slice.beta, 2, first_value, value_count);
  narrow(slice.initial_state, 1, first_value, value_count);
  narrow(slice.initial_normalizer, 1, first_value, value_count);
  narrow(slice.a_log, 0, first_value, value_count);
  narrow(slice.dt_bias, 0, first_value, value_count);
  narrow(slice.out, 2, first_value, value_count);
  narrow(slice.final_state, 1, first_value, value_count);
  narrow(slice.final_normalizer, 1, first_value, value_count);
  return slice;
}

ForwardArgs token_slice(const ForwardArgs& args, std::int64_t first, std::int64_t count) {
  ForwardArgs slice = args;
  narrow(slice.q, 1, first, count);
  narrow(slice.k, 1, first, count);
  narrow(slice.v, 1, first, count);
  narrow(slice.log_decay, 1, first, count);
  narrow(slice.beta, 1, first, count);
  narrow(slice.out, 1, first, count);
  return slice;
}

}  // namespace delta_attention::cli
