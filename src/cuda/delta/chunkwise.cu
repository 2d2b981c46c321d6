// v5_chunkwise: the recurrence in chunks of 32 tokens on tensor cores (V5). For every GPU from compute capability 8.0 on.
//
// Algorithm. The chunk form of the recurrence (docs/math.md). Over a chunk, with b_i the decay from its start up to token i and S the state
// before it,
//     L_ij = beta_i <k_i, k_j>, A_ij = scale <q_i, k_j>   with the decay from j to i, j < i and j <= i
//     T = (I + L)^-1 diag(beta)                           R = V - (b k) S
//     O = scale (b q) S + (A T) R                         S = D S + (T^T d k)^T R   (D over the chunk, d from a token to its end)
// Everything but R, O and S is known without the state. The additive update has T = diag(beta) and R = V. T is folded into A and d k, not
// multiplied with R: what cancels between tokens then cancels in f32, before anything is rounded, and the chain has a product less.
//
// Data flow. Two launches, the second overlapping the end of the first where the GPU can:
//     prepare          every chunk of every value head at once: A T, T^T d k, b k, b q, D -> an image in global memory, laid out as shared memory
//                      will hold it (chunkwise_layout.cuh)
//     chain            every (sequence, value head) and slice of V at once, chunk after chunk: images -> shared memory, R, O, S
// The output is made where the state is, not by a third launch from stored states: those would be 4 V bytes a channel and chunk, more than the
// image itself.
//
// Decays. Products of decays, not differences of their logarithms' sums: from the start and to the end of halves of the chunk, so that no
// factor but one kind exceeds 1; where that one would overflow, scores are summed pair by pair (chunkwise_prepare.cuh). Any gate down to a
// decay of 0 gives what the recurrence gives. T is inverted in f32, by substitution and one block product.
//
// Packed sequences. Which chunk has which number follows from where its sequence begins alone (chunkwise_layout.cuh): no launch has to count
// before, and every block finds its chunk by itself.
//
// Precision. Products are of bf16 numbers, sums and the state f32. A bf16 tensor's numbers are one bf16 term, an f16 tensor's the sum of two,
// an f32 tensor's of three: 8, 16 and 24 bits, whatever the range. An f32 product then is six bf16 products.
//
// Roles and budget. prepare: a warp has 8 tokens and 64 channels, 2 K threads a block; 75 KB of shared memory at K = 128 and 80 registers, so
// that three blocks share a multiprocessor of sm_90. chain: teams of warps with a slice of the value columns each (chunkwise_chain.cuh): of three
// warps for 16 columns, up to 128 registers, where all chains run at once; of two for 32, up to 255, where they take turns. The more teams a
// block, the fewer blocks read each image; a stage takes 28 to 36 KB at K = 128 and bf16. Images of which two do not fit are loaded in thirds, so that
// 99 KiB are enough for every K and dtype.
//
// Wins wherever T is more than a few chunks. Loses for long sequences of few heads to what cuts a sequence into pieces. Measured:
// docs/performance.md.
//
// Source: the WY form of DeltaNet (arXiv:2406.06484), gated (arXiv:2412.06464) and by channel (arXiv:2510.26692).

#include <string>
#include <vector>

#include "api/architectures.h"
#include "cuda/delta/chunkwise.h"
#include "cuda/delta/chunkwise_launch.cuh"
#include "cuda/delta/chunkwise_layout.cuh"
#include "cuda/device/rows.cuh"

namespace delta_attention {

extern const Kernel chunkwise_kernel;

namespace chunkwise {
namespace {

/// Calls use(element) with the type of the problem's tensors.
template <class Use>
void with_element(const Problem& p, const Use& use) {
  if (p.dtype == DType::f32) return use(float());
  if (p.dtype == DType::f16) return use(Half());
  use(BFloat16());
}

Plan make_plan(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  Plan plan;
  plan.most_chunks = Chunking::of(p).numbers(p);
  with_element(p, [&](auto element) { Kernels<decltype(element)>::plan(p, device, settings, plan); });
  return plan;
}

std::vector<Setting> settings() {
  return {{"team_warps", "warps of a team: three have 16 value columns, two have 32", {2, 3}},
          {"teams", "teams a block of the chain", {1, 2, 4}},
          {"stages", "chunks, or sections of them, in shared memory at once", {1, 2, 3, 4}}};
}

std::string needs_more_shared_memory(const char* what, int bytes, const DeviceProperties& device) {
  return std::string(what) + " needs " + std::to_string(bytes) + " bytes of shared memory a block; " + device.name + " has " +
         std::to_string(device.shared_memory);
}

std::string unsupported(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  if (p.has_f64) return needs_f32(p);
  if (const std::string reason = missing_code_reason(device); !reason.empty()) return reason;
  if (p.normalize) return "no normaliser";
  if (p.key_dim > 256) return "K = " + std::to_string(p.key_dim) + "; compiled for at most 256";
  const Plan plan = make_plan(p, device, settings);
  if (plan.teams == 0) return "team_warps = 2; registers of two warps last for bf16 and K <= 128";
  if (plan.stages < plan.least_stages) return "stages = " + std::to_string(plan.stages) + "; teams of two warps load a chunk ahead";
  if (plan.teams > plan.most_teams) {
    return "teams = " + std::to_string(plan.teams) + "; with this K and dtype registers last for " + std::to_string(plan.most_teams);
  }
  const auto most = static_cast<std::int64_t>(device.shared_memory);
  if (plan.prepare_bytes > most) return needs_more_shared_memory("the preparation", plan.prepare_bytes, device);
  if (plan.chain_bytes > most) return needs_more_shared_memory("the chain", plan.chain_bytes, device);
  if (p.tokens > 1 << 30) return "more than 2^30 tokens";
  constexpr std::int64_t kMostBlocks = 0x7fffffff;
  if (plan.images(p) > kMostBlocks || plan.chain_blocks(p) > kMostBlocks) return "more than 2^31 blocks";
  return "";
}

std::size_t workspace(const Problem& p, const DeviceProperties& device, const Settings& settings) {
  const Plan plan = make_plan(p, device, settings);
  return static_cast<std::size_t>(plan.images(p) * plan.image_bytes);
}

Params params_of(const Launch& call) {
  const Problem& p = call.problem;
  const int piece = 16 / static_cast<int>(size_of(p.dtype));
  Params params;
  params.problem = p;
  params.factors = static_cast<unsigned char*>(call.workspace);
  params.chunks = Chunking::of(p).chunks(p.tokens);
  params.group = static_cast<int>(p.value_heads / p.heads);
  params.pairs_in_q = reads_in_pieces(p.q, p.key_dim, 2);
  params.pairs_in_k = reads_in_pieces(p.k, p.key_dim, 2);
  params.pairs_in_gate = p.gate == Gate::channel && reads_in_pieces(p.log_decay, p.key_dim, 2);
  params.pieces_in_v = starts_pieces(p.v, piece);
  params.pieces_in_out = starts_pieces(p.out, piece);
  return params;
}

void launch(const Launch& call) {
  const Plan plan = make_plan(call.problem, call.device, call.settings);
  const Params params = params_of(call);
  with_element(call.problem, [&](auto element) { Kernels<decltype(element)>::launch(call, plan, params); });
}

}  // namespace
}  // namespace chunkwise

const Kernel chunkwise_kernel = {
    "v5_chunkwise", "tensor cores, chunks of 32 tokens: factors of all chunks at once, then the states (V5)", DeviceType::cuda, true, 20,
    chunkwise::settings, chunkwise::unsupported, chunkwise::workspace, chunkwise::launch, nullptr,
    [](DType dtype) { return dtype == DType::bf16 ? 8 : dtype == DType::f16 ? 16 : 24; },  // one, two or three bf16 terms
};

}  // namespace delta_attention
