#include "support/mla.h"

#include <cmath>

#include "mla_decode_reference.h"

namespace delta_attention::test {

MlaInputs random_mla_inputs(Random& random, DType dtype, const MlaSizes& s) {
  MlaInputs inputs;
  inputs.sizes = s;
  inputs.q_nope = Array(dtype, {s.batch, s.queries, s.heads, s.nope});
  inputs.q_rope = Array(dtype, {s.batch, s.queries, s.heads, s.rope});
  inputs.w_uk = Array(dtype, {s.heads, s.nope, s.latent});
  inputs.cache = Array(dtype, {s.batch, s.keys, s.latent + s.rope});
  std::normal_distribution<float> normal;
  for (Array* array : {&inputs.q_nope, &inputs.q_rope, &inputs.w_uk, &inputs.cache}) {
    const float size = array == &inputs.w_uk ? 1.0f / std::sqrt(static_cast<float>(s.latent)) : 1.0f;
    for (float& x : array->values) x = rounded(size * normal(random), dtype);
  }
  return inputs;
}

MlaCall::MlaCall(const MlaInputs& inputs, Device device) {
  const auto store = [&](const Array& array, const Placement& placement) {
    stored_.push_back(std::make_unique<Stored>(array, placement, device, kNanByte));
    stored_.back()->put(array);
    return stored_.back()->view();
  };
  Placement of_cache = inputs.placement;
  if (!of_cache.pad.empty()) of_cache.pad.erase(of_cache.pad.begin());
  args.q_nope = store(inputs.q_nope, inputs.placement);
  args.q_rope = store(inputs.q_rope, inputs.placement);
  args.w_uk = store(inputs.w_uk, {});
  args.cache = store(inputs.cache, of_cache);
  const MlaSizes& s = inputs.sizes;
  if (!inputs.valid_len.empty()) {
    lengths_ = std::make_unique<StoredIntegers>(inputs.valid_len, std::initializer_list<Index>{s.batch}, device);
    args.valid_len = lengths_->view();
  }
  const Array out(inputs.q_nope.dtype, {s.batch, s.queries, s.heads, s.latent});
  out_ = std::make_unique<Stored>(out, inputs.placement, device, kNanByte);
  lse_ = std::make_unique<Stored>(Array(DType::f32, {s.batch, s.queries, s.heads}), Placement{}, device, kNanByte);
  out_->poison();
  lse_->poison();
  args.out = out_->writable();
  args.lse = lse_->writable();
  args.causal = inputs.causal;
  args.scale = inputs.scale;
}

bool MlaCall::rest_untouched() const {
  bool same = out_->gaps_intact() && lse_->gaps_intact() && (lengths_ == nullptr || lengths_->unchanged());
  for (const auto& each : stored_) same = same && each->unchanged();
  return same;
}

SoftmaxTruth mla_oracle(const MlaInputs& inputs) {
  MlaInputs wide = inputs;  // the numbers as f32, which holds every storage type
  wide.q_nope.dtype = wide.q_rope.dtype = wide.w_uk.dtype = wide.cache.dtype = DType::f32;
  wide.placement = {};
  const MlaCall call(wide, Device{});
  MlaArgs args = call.args;
  const MlaSizes& s = inputs.sizes;
  SoftmaxTruth truth;
  truth.out.resize(static_cast<std::size_t>(s.batch * s.queries * s.heads * s.latent));
  truth.lse.resize(static_cast<std::size_t>(s.batch * s.queries * s.heads));
  args.out = tensor(truth.out.data(), {s.batch, s.queries, s.heads, s.latent});
  args.lse = tensor(truth.lse.data(), {s.batch, s.queries, s.heads});
  reference::mla_forward(args);
  return truth;
}

void expect_mla_matches(const MlaInputs& inputs, const SoftmaxOutputs& got) {
  // As attention over L+R channels (support/softmax.cpp), whose tolerances follow from the dtype and the size of q: absorbing adds the
  // rounding of Dn products to each of the L channels of a query, less than the scores themselves cost.
  SoftmaxInputs like;
  like.q = Array(inputs.q_nope.dtype, {1, 1, 1, inputs.sizes.latent + inputs.sizes.rope});
  expect_matches(like, got, mla_oracle(inputs));
}

}  // namespace delta_attention::test
