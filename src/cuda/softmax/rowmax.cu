// rowmax: vec_padded (tile_kernel.cuh) with two choices open.
//
//   merge = 0   a row's sums are rescaled once a tile, to the tile's maximum (what the other tiled kernels do)
//   merge = 1   element-wise: every key may move the maximum, and then rescales the sums; two exponentials a key instead of one
//   exp = 0     expf, right to 2 units in the last place
//   exp = 1     ex2.approx of the scaled argument: relative error up to about 2^-21 for the arguments of a softmax
//
// Measured: docs/performance.md.

#include "cuda/softmax/tile_kernel.cuh"

namespace delta_attention {
namespace {

template <tile::Merge kMerge, tile::Exp kExp>
using Rowmax = tile::Family<tile::Always<32>::Keys, tile::Loads::vectors, 4, 1, kMerge, kExp>;

struct Choice {
  static std::vector<Setting> settings() {
    return {{"merge", "0: one rescaling a tile, 1: one a key", {0, 1}}, {"exp", "0: expf, 1: ex2.approx", {0, 1}}};
  }

  template <class Use>
  static void with_family(const Settings& settings, const Use& use) {
    const bool fast = settings.get("exp", 0) == 1;
    if (settings.get("merge", 0) == 0) {
      fast ? use(Rowmax<tile::Merge::row_max, tile::Exp::fast>()) : use(Rowmax<tile::Merge::row_max, tile::Exp::exact>());
    } else {
      fast ? use(Rowmax<tile::Merge::elements, tile::Exp::fast>()) : use(Rowmax<tile::Merge::elements, tile::Exp::exact>());
    }
  }
};

}  // namespace

extern const SoftmaxKernel rowmax_softmax_kernel;
const SoftmaxKernel rowmax_softmax_kernel =
    tile::kernel_of_choice<Choice>("rowmax", "vec_padded with the merge and the exponential open", -1);

}  // namespace delta_attention
