#pragma once

// The host side of v5_chunkwise: what a call comes to, and the launches of each dtype, whose kernels are compiled in files of their own.

#include <cstdint>

#include "api/kernel.h"

namespace delta_attention::chunkwise {

struct Params;

/// Sizes of a call, decided on the host from shapes, settings and the device.
struct Plan {
  int team_warps = 0;                      // of a team of the chain
  bool in_sections = false;                // whether the chain's stages hold sections of images
  int teams = 0, most_teams = 0;           // a block of the chain
  int stages = 0, least_stages = 0;        // chunks, or sections, in its shared memory at once
  int states = 0;                          // places for a team's state
  std::int64_t slices = 0;                 // of value columns
  std::int64_t most_chunks = 0;            // of all sequences together
  std::int64_t image_bytes = 0;            // of a chunk of a value head
  int prepare_bytes = 0, chain_bytes = 0;  // of shared memory a block

  std::int64_t images(const Problem& p) const { return most_chunks * p.value_heads; }
  std::int64_t chain_blocks(const Problem& p) const { return p.sequences * p.value_heads * slices; }
};

/// The kernels for tensors of `Element`.
template <class Element>
struct Kernels {
  /// Fills in what depends on the kernels' types: bytes and stages.
  static void plan(const Problem& problem, const DeviceProperties& device, const Settings& settings, Plan& plan);
  static void launch(const Launch& call, const Plan& plan, const Params& params);
};

}  // namespace delta_attention::chunkwise
