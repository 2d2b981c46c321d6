// The shipped activations of a trained transformer, where neighbouring keys are alike and norms vary severalfold.

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>

#include "support/kernel_test.h"

namespace delta_attention::test {
namespace {

std::string data_folder() {
  const char* given = std::getenv("DELTA_ATTENTION_DATA_DIR");
  return given != nullptr ? given : DELTA_ATTENTION_DATA_DIR;
}

/// One file in the safetensors format: 8 bytes of header length, a JSON header, the numbers.
class Activations {
 public:
  Activations() {
    std::ifstream file(data_folder() + "/minilm_attention.safetensors", std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    std::uint64_t length = 0;
    if (bytes_.size() > sizeof length) {
      std::memcpy(&length, bytes_.data(), sizeof length);
      header_ = bytes_.substr(8, length);
    }
  }
  bool found() const { return !header_.empty(); }

  /// The named tensor, seen with another shape of as many elements.
  Array get(const std::string& name, DType dtype, std::vector<Index> shape) const {
    Array array(dtype, std::move(shape));
    const std::size_t entry = header_.find("\"" + name + "\":");
    const std::size_t offsets = header_.find("\"data_offsets\":[", entry) + 16;
    const char* source = bytes_.data() + 8 + header_.size() + std::strtoull(header_.c_str() + offsets, nullptr, 10);
    const bool half = header_.find("\"F16\"", entry) < header_.find('}', entry);
    for (std::size_t i = 0; i < array.values.size(); ++i) {
      const float value = half ? from_half(source + 2 * i) : from_single(source + 4 * i);
      array.values[i] = rounded(value, dtype);
    }
    return array;
  }

 private:
  static float from_single(const char* source) {
    float value;
    std::memcpy(&value, source, sizeof value);
    return value;
  }
  static float from_half(const char* source) {
    return decode(reinterpret_cast<const unsigned char*>(source), DType::f16);
  }

  std::string bytes_, header_;
};

class RealData : public KernelTest {
 protected:
  /// Heads of `dim` channels from the 384 of the layer.
  Inputs activations(Recurrence recurrence, Index dim, DType dtype) {
    static const Activations data;
    Case c;
    c.recurrence = recurrence;
    c.dtype = dtype;
    c.gate_dtype = recurrence.gate == Gate::channel ? DType::f16 : DType::f32;
    c.tokens = 1024;
    c.heads = c.value_heads = 384 / dim;
    c.key_dim = c.value_dim = dim;
    c.qk_l2norm = true;
    Inputs inputs = zero_inputs(c);
    found_ = data.found();
    if (!found_) return inputs;
    const std::string suffix = dim == 128 ? "_d128" : "";
    inputs.q = data.get("q", dtype, inputs.q.shape);
    inputs.k = data.get("k", dtype, inputs.k.shape);
    inputs.v = data.get("v", dtype, inputs.v.shape);
    inputs.beta = data.get("beta" + suffix, DType::f32, inputs.beta.shape);
    if (recurrence.gate == Gate::channel) inputs.log_decay = data.get("log_decay", DType::f16, inputs.log_decay.shape);
    if (recurrence.gate == Gate::scalar) {
      inputs.log_decay = data.get("log_decay_scalar" + suffix, DType::f32, inputs.log_decay.shape);
    }
    return inputs;
  }
  bool found_ = false;
};

TEST_P(RealData, MatchesReferenceOnTrainedActivations) {
  for (Recurrence recurrence : {kda(), gated_delta_net(), delta_net(), gla(), mamba2()}) {
    for (Index dim : {32, 128}) {
      for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
        Inputs inputs = activations(recurrence, dim, dtype);
        ASSERT_TRUE(found_) << "no minilm_attention.safetensors in " << data_folder()
                            << "; set DELTA_ATTENTION_DATA_DIR";
        expect_matches_oracle(inputs);
        if (small_run()) return;
      }
    }
  }
}

TEST_P(RealData, MatchesReferenceOnTwoWindows) {
  Inputs inputs = activations(kda(), 32, DType::f16);
  ASSERT_TRUE(found_) << "no minilm_attention.safetensors in " << data_folder() << "; set DELTA_ATTENTION_DATA_DIR";
  inputs.problem.cu_seqlens = {0, 512, 1024};
  expect_matches_oracle(inputs);
}

EVERY_KERNEL(RealData);

}  // namespace
}  // namespace delta_attention::test
