#include "support/inputs.h"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "support/parallel.h"

namespace bench {
namespace {

/// Counter-based random numbers (splitmix64), so that any thread can draw any element.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream) : base_(mix(seed) ^ mix(~stream)) {}

  /// In (0, 1).
  float uniform(std::int64_t index) const {
    const std::uint64_t bits = mix(base_ + static_cast<std::uint64_t>(index) * kGolden) >> 41;
    return (static_cast<float>(bits) + 0.5f) * 0x1p-23f;
  }

  float normal(std::int64_t index) const {
    constexpr float kTwoPi = 6.2831853f;
    return std::sqrt(-2.0f * std::log(uniform(2 * index))) * std::cos(kTwoPi * uniform(2 * index + 1));
  }

 private:
  static constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15u;
  static std::uint64_t mix(std::uint64_t x) {
    x += kGolden;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
  }
  std::uint64_t base_;
};

/// Round to nearest even. The values here are finite.
std::uint16_t to_bf16(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

void store_row(void* data, DType dtype, std::int64_t begin, const std::vector<float>& row) {
  if (dtype == DType::f32) {
    std::memcpy(static_cast<float*>(data) + begin, row.data(), row.size() * sizeof(float));
    return;
  }
  for (std::size_t i = 0; i < row.size(); ++i) {
    static_cast<std::uint16_t*>(data)[begin + static_cast<std::int64_t>(i)] = to_bf16(row[i]);
  }
}

void fill_features(const Case& c, void* data, const Random& random, bool unit_length) {
  parallel_for(c.batch * c.tokens * c.heads, [&](std::int64_t row) {
    std::vector<float> x(static_cast<std::size_t>(c.dim));
    float squares = 0.0f;
    for (std::int64_t i = 0; i < c.dim; ++i) {
      x[i] = random.normal(row * c.dim + i);
      squares += x[i] * x[i];
    }
    if (unit_length) {
      for (float& value : x) value /= std::sqrt(squares);
    }
    store_row(data, c.dtype, row * c.dim, x);
  });
}

float softplus(float x) { return std::fmax(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

void fill_decays(const Case& c, float* data, std::int64_t elements, std::uint64_t seed) {
  const Random random(seed, kLogDecay), head_parameters(seed, kOperands), bias(seed, kOperands + 1);
  const std::int64_t per_head = c.recurrence().gate == delta_attention::Gate::channel ? c.dim : 1;
  parallel_for(elements / per_head, [&](std::int64_t row) {
    const std::int64_t head = row % c.heads;
    const float rate = std::exp(head_parameters.uniform(head));
    for (std::int64_t i = 0; i < per_head; ++i) {
      const std::int64_t at = row * per_head + i;
      switch (c.decay) {
        case Decay::strong: data[at] = -rate * softplus(random.normal(at) + bias.uniform(head * per_head + i)); break;
        case Decay::weak: data[at] = -0.01f * random.uniform(at); break;
        case Decay::fixed: data[at] = std::log1p(-std::exp2(-5.0f - static_cast<float>(head))); break;
        case Decay::none: break;
      }
    }
  });
}

}  // namespace

HostOperands::HostOperands(const Case& c, std::uint64_t seed) : case_(c) {
  if (c.fused || c.initial_state || c.value_heads != c.heads) throw std::invalid_argument(c.name("") + " is for delta_operands.h");
  const Sizes sizes = operand_sizes(c);
  for (int i = 0; i < kOperands; ++i) memory_[i].resize(sizes[i]);
  const Addresses at = addresses();

  fill_features(c, at[kQ], Random(seed, kQ), true);
  fill_features(c, at[kK], Random(seed, kK), true);
  fill_features(c, at[kV], Random(seed, kV), false);
  fill_decays(c, static_cast<float*>(at[kLogDecay]), static_cast<std::int64_t>(sizes[kLogDecay] / sizeof(float)), seed);
  const Random beta(seed, kBeta);
  for (std::size_t i = 0; i < sizes[kBeta] / sizeof(float); ++i) {
    static_cast<float*>(at[kBeta])[i] = beta.uniform(static_cast<std::int64_t>(i));
  }
  if (!c.lengths.empty()) {
    auto* offset = static_cast<std::int32_t*>(at[kCuSeqlens]);
    for (std::int64_t value : c.offsets()) *offset++ = static_cast<std::int32_t>(value);
  }
  poison_outputs();
}

Addresses HostOperands::addresses() const {
  Addresses result;
  for (int i = 0; i < kOperands; ++i) result[i] = memory_[i].data();
  return result;
}

void HostOperands::poison_outputs() {
  for (Operand output : {kOut, kFinalState}) std::memset(memory_[output].data(), kPoison, memory_[output].size());
}

}  // namespace bench
