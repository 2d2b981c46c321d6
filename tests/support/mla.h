#pragma once

// Runs absorbed MLA through the public API, with every operand in guarded memory, and the oracle that does not absorb.

#include <memory>
#include <optional>
#include <vector>

#include "delta_attention/mla_decode.h"
#include "support/softmax.h"

namespace delta_attention::test {

struct MlaSizes {
  Index batch = 1, queries = 1, keys = 1, heads = 1, nope = 1, rope = 0, latent = 1;
};

/// Numbers and options of one call.
struct MlaInputs {
  MlaSizes sizes;
  Array q_nope, q_rope, w_uk, cache;
  std::vector<Index> valid_len;
  bool causal = false;
  std::optional<float> scale;
  Placement placement;  // of all but w_uk and lse
};

/// Normal numbers, rounded to the dtype, W so scaled that keys are of the size of one.
MlaInputs random_mla_inputs(Random& random, DType dtype, const MlaSizes& sizes);

/// Arguments whose memory this object owns. Outputs start as NaN.
class MlaCall {
 public:
  MlaCall(const MlaInputs& inputs, Device device);
  MlaArgs args;
  SoftmaxOutputs outputs() const { return {out_->get(), lse_->get()}; }
  bool rest_untouched() const;

 private:
  std::vector<std::unique_ptr<Stored>> stored_;
  std::unique_ptr<StoredIntegers> lengths_;
  std::unique_ptr<Stored> out_, lse_;
};

SoftmaxTruth mla_oracle(const MlaInputs& inputs);

/// Adds test failures where f32 arithmetic does not explain the difference.
void expect_mla_matches(const MlaInputs& inputs, const SoftmaxOutputs& got);

}  // namespace delta_attention::test
