// vec_fused: the tiled kernel that automatic dispatch takes (tile_kernel.cuh): one call for self, causal and cross attention, lengths,
// masks, windows, softcap, packed sequences, pages, grouped heads, any strides, f32, f16 and bf16. Tiles of 8 to 64 keys (setting `keys`);
// 64 by default, the winner of the scan in docs/performance.md for every head_dim. A mask costs what it
// hides: tiles that no row sees are skipped, and only tiles that some row sees in part are masked element by element.
//
// Wins where tensor cores cannot be used: f32, or channels that flash_tc does not take. Measured: docs/performance.md.

#include "cuda/softmax/tile_kernel.cuh"

namespace delta_attention {
namespace {

template <int kKeys>
using Fused = tile::Family<tile::Always<kKeys>::template Keys, tile::Loads::vectors, 4, 1>;

struct Choice {
  static std::vector<Setting> settings() { return {{"keys", "keys of a tile", {8, 16, 32, 64}}}; }

  template <class Use>
  static void with_family(const Settings& settings, const Use& use) {
    switch (settings.get("keys", 64)) {
      case 8: return use(Fused<8>());
      case 16: return use(Fused<16>());
      case 32: return use(Fused<32>());
      default: return use(Fused<64>());
    }
  }
};

}  // namespace

extern const SoftmaxKernel vec_fused_softmax_kernel;
const SoftmaxKernel vec_fused_softmax_kernel =
    tile::kernel_of_choice<Choice>("vec_fused", "tiles for every mask, layout and dtype", 10);

}  // namespace delta_attention
