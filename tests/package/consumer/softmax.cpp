// A decoder's layer with the other calls of the library: fused projection, softmax attention, and MLA over a cache.

#include <delta_attention/fused_qkv.h>
#include <delta_attention/mla_decode.h>
#include <delta_attention/softmax_attention.h>

#include <cmath>
#include <cstdio>

using namespace delta_attention;

namespace {

bool near(const float* x, float first, float second) { return std::abs(x[0] - first) < 1e-6f && std::abs(x[1] - second) < 1e-6f; }

/// q and k are 0, so that the second token sees the mean of both values.
bool project_and_attend() {
  const float x[] = {1, 3}, w[] = {0, 0, 2};  // two tokens of one channel; a column each for q, k and v
  float q[2], k[2], v[2], out[2];
  FusedQkvArgs project;
  project.x = tensor(x, {1, 2, 1});
  project.w = tensor(w, {1, 3});
  project.q = tensor(q, {1, 2, 1, 1});
  project.k = tensor(k, {1, 2, 1, 1});
  project.v = tensor(v, {1, 2, 1, 1});
  fused_qkv_forward(project);

  SoftmaxArgs attend;
  attend.q = project.q, attend.k = project.k, attend.v = project.v;
  attend.out = tensor(out, {1, 2, 1, 1});
  attend.causal = true;
  softmax_attention_forward(attend);
  return near(v, 2, 6) && near(out, 2, 4) && softmax_dispatch_info(attend).kernel == "softmax_reference";
}

/// A query of 0 sees the mean of the latent rows, whatever their rope channel holds.
bool decode_latents() {
  const float none[] = {0}, w_uk[] = {1, 1}, cache[] = {1, 2, 5, 3, 6, 7};
  float out[2];
  MlaArgs decode;
  decode.q_nope = decode.q_rope = tensor(none, {1, 1, 1, 1});
  decode.w_uk = tensor(w_uk, {1, 1, 2});
  decode.cache = tensor(cache, {1, 2, 3});
  decode.out = tensor(out, {1, 1, 1, 2});
  mla_decode_forward(decode);
  return near(out, 2, 4);
}

}  // namespace

int main() {
  const bool attended = project_and_attend(), decoded = decode_latents();
  std::printf("softmax attention %s, MLA %s\n", attended ? "right" : "wrong", decoded ? "right" : "wrong");
  return attended && decoded ? 0 : 1;
}
