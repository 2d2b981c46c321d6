#include "support/run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace delta_attention::test {
namespace {

// Bits of 16-bit floats, written out here so that the tests do not lean on the conversions they test. Arrays hold numbers that
// their dtype can hold, so encoding never rounds.
std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

std::uint16_t half_bits(float value) {
  const std::uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
  if (magnitude == 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7C00u);
  const float size = float_of(magnitude);
  if (size < 0x1p-14f) return static_cast<std::uint16_t>(sign | static_cast<std::uint32_t>(size * 0x1p24f));
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000u) >> 13));
}

float float_of_half(std::uint16_t half) {
  const std::uint32_t exponent = (half >> 10) & 31u, fraction = half & 1023u;
  float size;
  if (exponent == 31u) {
    size = float_of(fraction != 0 ? 0x7FC00000u : 0x7F800000u);
  } else if (exponent == 0) {
    size = static_cast<float>(fraction) * 0x1p-24f;
  } else {
    size = float_of(((exponent + 112u) << 23) | (fraction << 13));
  }
  return (half & 0x8000u) != 0 ? -size : size;
}

void encode(unsigned char* target, float value, DType dtype) {
  if (dtype == DType::f32) {
    std::memcpy(target, &value, 4);
    return;
  }
  const std::uint16_t bits = dtype == DType::f16 ? half_bits(value) : static_cast<std::uint16_t>(bits_of(value) >> 16);
  std::memcpy(target, &bits, 2);
}

Extents strides_for(const std::vector<Index>& shape, const Placement& placement, Index* elements) {
  Extents strides{};
  Index step = 1;
  for (std::size_t level = shape.size(); level-- > 0;) {
    const std::size_t axis = placement.order.empty() ? level : static_cast<std::size_t>(placement.order[level]);
    strides[axis] = step;
    step = step * shape[axis] + (placement.pad.empty() ? 0 : placement.pad[level]);
  }
  *elements = step;
  return strides;
}

}  // namespace

float decode(const unsigned char* source, DType dtype) {
  if (dtype == DType::f32) {
    float value;
    std::memcpy(&value, source, 4);
    return value;
  }
  std::uint16_t bits;
  std::memcpy(&bits, source, 2);
  return dtype == DType::f16 ? float_of_half(bits) : float_of(static_cast<std::uint32_t>(bits) << 16);
}

Placements placements_of(const Case& c) {
  Placements p;
  if (c.layout == Layout::bhtd) {
    p.q.order = p.k.order = p.v.order = p.out.order = {0, 2, 1, 3};
    p.beta.order = {0, 2, 1};
    p.log_decay.order = c.recurrence.gate == Gate::channel ? std::vector<int>{0, 2, 1, 3} : std::vector<int>{0, 2, 1};
  } else if (c.layout == Layout::padded) {
    p.q.pad = {0, 7, 3, 5};
    p.k.pad = {2, 0, 9, 1};
    p.v.pad = {1, 4, 2, 3};
    p.out.pad = {3, 1, 5, 7};
    p.beta.pad = {1, 2, 3};
    p.log_decay.pad = c.recurrence.gate == Gate::channel ? std::vector<Index>{1, 3, 2, 5} : std::vector<Index>{1, 2, 3};
    p.initial_state.pad = {4, 3, 2, 6};
    p.final_state.pad = {1, 2, 3, 4};
    p.intermediate_states.pad = {2, 1, 5, 3};
  }
  if (c.state_layout == StateLayout::vk) {
    p.initial_state.order = p.final_state.order = p.intermediate_states.order = {0, 1, 3, 2};
  }
  return p;
}

bool operator==(const Outputs& a, const Outputs& b) {
  return a.out.values == b.out.values && a.final_state.values == b.final_state.values &&
         a.final_normalizer.values == b.final_normalizer.values &&
         a.intermediate_states.values == b.intermediate_states.values;
}

Stored::Stored(const Array& array, const Placement& placement, Device device, unsigned char guard)
    : like_(array), offset_(placement.offset) {
  Index elements = 0;
  strides_ = strides_for(array.shape, placement, &elements);
  const std::size_t size = size_of(array.dtype);
  buffer_ = std::make_unique<GuardedBuffer>(device, static_cast<std::size_t>(elements) * size,
                                            static_cast<std::size_t>(offset_) * size, guard);
  view_.data = buffer_->data();
  view_.dtype = array.dtype;
  view_.device = device;
  view_.rank = static_cast<int>(array.shape.size());
  for (std::size_t axis = 0; axis < array.shape.size(); ++axis) view_.shape[axis] = array.shape[axis];
  view_.strides = strides_;
}

Tensor Stored::writable() const {
  Tensor view;
  view.data = buffer_->data();
  view.dtype = view_.dtype;
  view.device = view_.device;
  view.rank = view_.rank;
  view.shape = view_.shape;
  view.strides = view_.strides;
  return view;
}

/// Calls visit(row-major index, byte offset in memory) for every element.
template <class Visit>
void Stored::for_each_element(Visit visit) const {
  std::vector<Index> index(like_.shape.size(), 0);
  for (Index flat = 0; flat < like_.size(); ++flat) {
    Index at = 0;
    for (std::size_t axis = 0; axis < index.size(); ++axis) at += index[axis] * strides_[axis];
    visit(static_cast<std::size_t>(flat), static_cast<std::size_t>(at) * size_of(like_.dtype));
    for (std::size_t axis = index.size(); axis-- > 0;) {
      if (++index[axis] < like_.shape[axis]) break;
      index[axis] = 0;
    }
  }
}

void Stored::put(const Array& array) {
  for_each_element(
      [&](std::size_t flat, std::size_t at) { encode(buffer_->image() + at, array.values[flat], like_.dtype); });
  buffer_->upload();
}

Array Stored::get() const {
  Array result = like_;
  const std::vector<unsigned char> all = buffer_->download_all();
  const unsigned char* middle = GuardedBuffer::middle(all, *buffer_);
  for_each_element([&](std::size_t flat, std::size_t at) { result.values[flat] = decode(middle + at, like_.dtype); });
  return result;
}

void Stored::poison() {
  std::fill(buffer_->image(), buffer_->image() + buffer_->bytes(), buffer_->guard());
  buffer_->upload();
}

bool Stored::gaps_intact() const {
  std::vector<unsigned char> all = buffer_->download_all();
  unsigned char* middle = all.data() + (GuardedBuffer::middle(all, *buffer_) - all.data());
  for_each_element(
      [&](std::size_t, std::size_t at) { std::fill_n(middle + at, size_of(like_.dtype), buffer_->guard()); });
  return std::all_of(all.begin(), all.end(), [&](unsigned char byte) { return byte == buffer_->guard(); });
}

Call::Call(const Inputs& inputs, Device device) : Call(inputs, device, CallOptions{placements_of(inputs.problem)}) {}

Call::Call(const Inputs& inputs, Device device, const CallOptions& options) : device_(device), options_(options) {
  const Case& c = inputs.problem;
  const Placements& p = options.placements;
  args.recurrence = c.recurrence;
  args.scale = c.scale;
  args.qk_l2norm = c.qk_l2norm;
  args.gate_space = c.gate_space;
  args.beta_space = c.beta_space;
  args.q = add_input("q", inputs.q, p.q);
  args.k = add_input("k", inputs.k, p.k);
  args.v = add_input("v", inputs.v, p.v);
  args.log_decay = add_input("log_decay", inputs.log_decay, p.log_decay);
  args.beta = add_input("beta", inputs.beta, p.beta);
  args.a_log = add_input("a_log", inputs.a_log, {});
  args.dt_bias = add_input("dt_bias", inputs.dt_bias, {});

  args.out = add_output("out", Array(c.dtype, {c.batch, c.tokens, c.value_heads, c.value_dim}), p.out);
  const std::vector<Index> state_shape = {c.sequences(), c.value_heads, c.key_dim, c.value_dim};
  if (options.in_place) {
    args.final_state = add_output("final_state", Array(c.state_dtype, state_shape), p.final_state);
    args.initial_state = args.final_state;
  } else {
    args.initial_state = add_input("initial_state", inputs.initial_state, p.initial_state);
    if (c.with_final_state) {
      args.final_state = add_output("final_state", Array(c.state_dtype, state_shape), p.final_state);
    }
  }
  if (c.recurrence.normalize && c.with_final_state) {
    args.final_normalizer = add_output(
        "final_normalizer", Array(c.state_dtype, {c.sequences(), c.value_heads, c.key_dim}), p.final_normalizer);
  }
  if (options.in_place && c.recurrence.normalize) {
    args.initial_normalizer = args.final_normalizer;
  } else {
    args.initial_normalizer = add_input("initial_normalizer", inputs.initial_normalizer, p.initial_normalizer);
  }
  if (c.state_interval != 0) {
    args.state_interval = c.state_interval;
    args.intermediate_states = add_output(
        "intermediate_states", Array(c.state_dtype, {c.intermediate_states(), c.value_heads, c.key_dim, c.value_dim}),
        p.intermediate_states);
  }
  if (!c.cu_seqlens.empty()) {
    const std::size_t bytes = c.cu_seqlens.size() * size_of(c.cu_dtype);
    offsets_ = std::make_unique<GuardedBuffer>(device, bytes);
    args.cu_seqlens = tensor(static_cast<const void*>(offsets_->data()), c.cu_dtype,
                             {static_cast<Index>(c.cu_seqlens.size())}, device);
  }
  put(inputs);
}

ConstTensor Call::add_input(const char* name, const Array& array, const Placement& placement) {
  if (!array.present()) return {};
  inputs_.push_back({name, std::make_unique<Stored>(array, placement, device_, options_.guard)});
  return inputs_.back().stored->view();
}

Tensor Call::add_output(const char* name, const Array& array, const Placement& placement) {
  outputs_.push_back({name, std::make_unique<Stored>(array, placement, device_, kNanByte)});
  return outputs_.back().stored->writable();
}

void Call::put(const Inputs& inputs) {
  const std::pair<const char*, const Array*> arrays[] = {{"q", &inputs.q},
                                                         {"k", &inputs.k},
                                                         {"v", &inputs.v},
                                                         {"beta", &inputs.beta},
                                                         {"a_log", &inputs.a_log},
                                                         {"dt_bias", &inputs.dt_bias},
                                                         {"log_decay", &inputs.log_decay},
                                                         {"initial_state", &inputs.initial_state},
                                                         {"initial_normalizer", &inputs.initial_normalizer}};
  for (const auto& [name, array] : arrays) {
    for (const Operand& operand : inputs_) {
      if (std::strcmp(operand.name, name) == 0) operand.stored->put(*array);
    }
  }
  if (options_.in_place) {
    for (const Operand& operand : outputs_) {
      if (std::strcmp(operand.name, "final_state") == 0) operand.stored->put(inputs.initial_state);
      if (std::strcmp(operand.name, "final_normalizer") == 0) operand.stored->put(inputs.initial_normalizer);
    }
  }
  if (offsets_ != nullptr) {
    const std::vector<Index>& cu = inputs.problem.cu_seqlens;
    for (std::size_t n = 0; n < cu.size(); ++n) {
      if (inputs.problem.cu_dtype == DType::i32) {
        const auto entry = static_cast<std::int32_t>(cu[n]);
        std::memcpy(offsets_->image() + 4 * n, &entry, 4);
      } else {
        std::memcpy(offsets_->image() + 8 * n, &cu[n], 8);
      }
    }
    offsets_->upload();
  }
}

void Call::run(const Execution& execution) {
  delta_attention_forward(args, execution);
  device_synchronize(device_);
}

Outputs Call::outputs() const {
  for (const Operand& operand : inputs_) {
    EXPECT_TRUE(operand.stored->unchanged()) << "the call modified its input " << operand.name;
  }
  EXPECT_TRUE(offsets_ == nullptr || offsets_->unchanged()) << "the call modified cu_seqlens";
  Outputs result;
  for (const Operand& operand : outputs_) {
    EXPECT_TRUE(operand.stored->gaps_intact()) << "the call wrote outside the elements of " << operand.name;
    const std::string name = operand.name;
    (name == "out"                ? result.out
     : name == "final_state"      ? result.final_state
     : name == "final_normalizer" ? result.final_normalizer
                                  : result.intermediate_states) = operand.stored->get();
  }
  return result;
}

bool Call::outputs_untouched() const {
  return std::all_of(outputs_.begin(), outputs_.end(),
                     [](const Operand& operand) { return operand.stored->unchanged(); });
}

void Call::poison_outputs() {
  for (const Operand& operand : outputs_) operand.stored->poison();
}

void Call::fill_outputs(float value) {
  for (const Operand& operand : outputs_) {
    Array array = operand.stored->get();
    array.fill(value);
    operand.stored->put(array);
  }
}

}  // namespace delta_attention::test
