#pragma once

// The launches of v5_chunkwise for one dtype; each is compiled in a file of its own (chunkwise_bf16.cu and so on).

#include <algorithm>
#include <type_traits>

#include "cuda/delta/chunkwise.h"
#include "cuda/delta/chunkwise_chain.cuh"
#include "cuda/delta/chunkwise_launch.cuh"
#include "cuda/delta/chunkwise_prepare.cuh"
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

/// Teams of warps a block: as few as leave every block a multiprocessor of its own, or else as many as go, for fewer reads of each image, with
/// two stages still.
template <class P>
int choose_teams(const Problem& p, const DeviceProperties& device) {
  const std::int64_t columns = ceil_div(p.value_dim, kColumns), chains = p.sequences * p.value_heads;
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

/// Few blocks get a multiprocessor each: blocks that start while the launch before still runs would gather where it ends first, so they ask for
/// more than half of the shared memory. Many share multiprocessors, if that leaves them two stages.
template <class P>
void plan_chain(const Problem& p, const DeviceProperties& device, const Settings& settings, Plan& plan) {
  plan.most_teams = P::kMostTeams;
  plan.teams = settings.get("teams", choose_teams<P>(p, device));
  plan.slices = ceil_div(p.value_dim, std::int64_t{plan.teams} * kColumns);
  ChainShared<P> shared = {plan.teams, 1};
  const auto most = static_cast<int>(device.shared_memory), reserved = static_cast<int>(kReservedSharedMemory);
  const int half = (most + reserved) / 2 - reserved;
  const auto stages_in = [&](int bytes) {
    const int a_stage = shared.stage_bytes() + static_cast<int>(sizeof(StageArrivals));
    return std::clamp((bytes - plan.teams * shared.exchange_bytes()) / a_stage, 1, kMostStages);
  };
  const bool alone = plan.chain_blocks(p) <= device.multiprocessors;
  shared.stages = settings.get("stages", alone || stages_in(half) < 2 ? stages_in(most) : stages_in(half));
  plan.stages = shared.stages;
  plan.chain_bytes = alone && shared.bytes() <= half ? half + 1 : shared.bytes();
}

template <class Element>
void Kernels<Element>::plan(const Problem& p, const DeviceProperties& device, const Settings& settings, Plan& plan) {
  with_keys(p, [&](auto keys) {
    plan.prepare_bytes = sizeof(PrepareShared<PreparePolicy<Element, keys.value>>);
    plan.image_bytes = PreparePolicy<Element, keys.value>::kImage.bytes();
    plan_chain<ChainPolicy<Element, keys.value>>(p, device, settings, plan);
  });
}

template <class Element>
void Kernels<Element>::launch(const Launch& call, const Plan& plan, const Params& params) {
  const Problem& p = call.problem;
  with_keys(p, [&](auto keys) {
    using Prepare = PreparePolicy<Element, keys.value>;
    if (plan.most_chunks > 0) start<prepare<Prepare>>(plan.images(p), Prepare::kThreads, plan.prepare_bytes, call, params);
    using Chain = ChainPolicy<Element, keys.value>;
    const ChainShared<Chain> shared = {plan.teams, plan.stages};
    start<chain<Chain>>(plan.chain_blocks(p), chain_threads(plan.teams), plan.chain_bytes, call, params, shared);
  });
}

}  // namespace delta_attention::chunkwise
