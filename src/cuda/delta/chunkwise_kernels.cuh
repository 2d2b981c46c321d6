#pragma once

// The launches of v5_chunkwise for one dtype; each is compiled in a file of its own (chunkwise_bf16.cu and so on).

#include <algorithm>
#include <type_traits>

#include "cuda/delta/chunkwise.h"
#include "cuda/delta/chunkwise_launch.cuh"
#include "cuda/delta/chunkwise_prepare.cuh"
#include "cuda/delta/chunkwise_three_warps.cuh"
#include "cuda/delta/chunkwise_two_warps.cuh"
#include "cuda/device/workspace.h"

namespace delta_attention::chunkwise {

template <class P>
__global__ void __launch_bounds__(P::kThreads, P::kBlocksAtOnce) prepare(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  let_next_launch_start();
  wait_for_launch_before();
  prepare_chunk(params, blockIdx.x, *reinterpret_cast<PrepareShared<P>*>(dynamic_shared));
}

template <class P>
__global__ void __launch_bounds__(P::kMostThreads, 1)
    chain(const __grid_constant__ Params params, const __grid_constant__ ChainShared<P> shared) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  wait_for_launch_before();
  run_chain<P>(params, blockIdx.x, shared, dynamic_shared);
}

constexpr int kMostStages = 4;

/// Teams a block: as few as leave every block a multiprocessor of its own, or else as many as go, for fewer reads of each image, with
/// two stages still.
template <class P>
int choose_teams(const Problem& p, const DeviceProperties& device) {
  const std::int64_t columns = ceil_div(p.value_dim, P::kColumns), chains = p.sequences * p.value_heads;
  const auto go = [&](int teams) {
    const int bytes = ChainShared<P>{teams, 2}.bytes();
    return teams <= P::kMostTeams && teams < 2 * columns && bytes <= static_cast<std::int64_t>(device.shared_memory);
  };
  int teams = 1;
  while (chains * ceil_div(columns, teams) > device.multiprocessors && go(teams * 2)) teams *= 2;
  return teams;
}

/// Calls use(keys) with the number of channels that the problem's are padded to.
template <class Use>
void with_keys(const Problem& p, const Use& use) {
  if (p.key_dim <= 64) return use(std::integral_constant<int, 64>());
  if (p.key_dim <= 128) return use(std::integral_constant<int, 128>());
  use(std::integral_constant<int, 256>());
}

/// Whether images come to the chain in sections: where it has no room for two.
template <class Element, int kKeys>
bool choose_sections(const DeviceProperties& device) {
  using Whole = ThreeWarps<Element, kKeys, false>;
  const bool two_fit = Whole::kExists && ChainShared<Whole>{1, 2}.bytes() <= static_cast<std::int64_t>(device.shared_memory);
  return ThreeWarps<Element, kKeys, true>::kExists && !two_fit;
}

/// Warps of a team: two where teams of three would have to take turns on the multiprocessors.
template <class Element, int kKeys>
int choose_team_warps(const Problem& p, const DeviceProperties& device) {
  using Three = ThreeWarps<Element, kKeys, false>;
  using Two = TwoWarps<Element, kKeys>;
  const int least_bytes = ChainShared<Two>{1, Two::kLeastStages}.bytes();
  if (!Two::kExists || least_bytes > static_cast<std::int64_t>(device.shared_memory)) return Three::kTeamWarps;
  const std::int64_t blocks = p.sequences * p.value_heads * ceil_div(p.value_dim, Three::kMostTeams * Three::kColumns);
  return blocks <= device.multiprocessors ? Three::kTeamWarps : Two::kTeamWarps;
}

/// Calls use(policy) with the chain's policy.
template <class Element, int kKeys, class Use>
void with_team(const Plan& plan, const Use& use) {
  if constexpr (TwoWarps<Element, kKeys>::kExists) {
    if (plan.team_warps == 2) return use(TwoWarps<Element, kKeys>());
  }
  if constexpr (ThreeWarps<Element, kKeys, true>::kExists) {
    if (plan.in_sections) return use(ThreeWarps<Element, kKeys, true>());
  }
  if constexpr (ThreeWarps<Element, kKeys, false>::kExists) use(ThreeWarps<Element, kKeys, false>());
}

/// Few blocks get a multiprocessor each: blocks that start while the launch before still runs would gather where it ends first, so they ask for
/// more than half of the shared memory. Many share multiprocessors, if that leaves them stages enough.
template <class P>
void plan_chain(const Problem& p, const DeviceProperties& device, const Settings& settings, Plan& plan) {
  plan.most_teams = P::kMostTeams;
  plan.teams = settings.get("teams", choose_teams<P>(p, device));
  plan.slices = ceil_div(p.value_dim, std::int64_t{plan.teams} * P::kColumns);
  ChainShared<P> shared = {plan.teams, 1};
  const auto most = static_cast<int>(device.shared_memory), reserved = static_cast<int>(kReservedSharedMemory);
  const int half = (most + reserved) / 2 - reserved;
  const auto stages_in = [&](int bytes) {
    return (bytes - plan.teams * shared.team_bytes()) / (shared.stage_bytes() + static_cast<int>(sizeof(StageArrivals)));
  };
  const bool alone = plan.chain_blocks(p) <= device.multiprocessors;
  const int stages = alone || stages_in(half) < P::kEnoughStages ? stages_in(most) : stages_in(half);
  shared.stages = settings.get("stages", std::clamp(stages, P::kLeastStages, kMostStages));
  shared.states = P::kMostStates;
  if (shared.bytes() > most) shared.states = 1;
  plan.stages = shared.stages;
  plan.states = shared.states;
  plan.least_stages = P::kLeastStages;
  plan.chain_bytes = alone && shared.bytes() <= half ? half + 1 : shared.bytes();
}

template <class Element>
void Kernels<Element>::plan(const Problem& p, const DeviceProperties& device, const Settings& settings, Plan& plan) {
  with_keys(p, [&](auto keys) {
    plan.prepare_bytes = sizeof(PrepareShared<PreparePolicy<Element, keys.value>>);
    plan.image_bytes = PreparePolicy<Element, keys.value>::kImage.bytes();
    plan.team_warps = settings.get("team_warps", choose_team_warps<Element, keys.value>(p, device));
    plan.in_sections = choose_sections<Element, keys.value>(device);
    if (plan.team_warps == 2 && !TwoWarps<Element, keys.value>::kExists) return;
    with_team<Element, keys.value>(plan, [&](auto chain) { plan_chain<decltype(chain)>(p, device, settings, plan); });
  });
}

template <class Element>
void Kernels<Element>::launch(const Launch& call, const Plan& plan, const Params& params) {
  const Problem& p = call.problem;
  with_keys(p, [&](auto keys) {
    using Prepare = PreparePolicy<Element, keys.value>;
    if (plan.most_chunks > 0) start<prepare<Prepare>>(plan.images(p), Prepare::kThreads, plan.prepare_bytes, call, params);
    with_team<Element, keys.value>(plan, [&](auto policy) {
      using Chain = decltype(policy);
      const ChainShared<Chain> shared = {plan.teams, plan.stages, plan.states};
      start<chain<Chain>>(plan.chain_blocks(p), chain_threads<Chain>(plan.teams), plan.chain_bytes, call, params, shared);
    });
  });
}

}  // namespace delta_attention::chunkwise
