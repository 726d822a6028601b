// Which part of the problem a CTA does. Layer: mainloop.
#pragma once
#include "base/abi.cuh"

namespace cuattn::mainloop {

// CTAs whose heads share L2: two or three times what runs at once.
inline constexpr int kSectionCtas = 512;

// Which CTAs of a launch share a loop: here all of them.
struct WholeGrid {
  CUATTN_DEVICE static u32 begin(const BwdParams&) { return 0; }
  CUATTN_DEVICE static u32 count(const BwdParams&) { return gridDim.x; }
};

// The place of a CTA in the problem. All heads' first tiles come before any head's second, so that
// the CTAs that start last, and decide when the device falls idle, are those of the shortest tiles.
struct Work {
  int batch_idx, head_idx, slice, block;

  // kOwnsQueries: under a causal band the last query tile is the longest, and the first key tile.
  // kSection: heads are taken in sections of about so many CTAs, each by itself in that order, so
  // that what the heads at work read stays in L2; 0 is one section of all.
  template <bool kOwnsQueries, int kSection = 0>
  CUATTN_DEVICE static Work of(u32 index, int num_blocks, int num_slices, int num_heads,
                               u32 num_ctas = gridDim.x) {
    const u32 heads = num_ctas / num_blocks;  // times slices and batch
    u32 first = 0, count = heads;
    if constexpr (kSection > 0) {
      const u32 most = ceil_div<u32>(kSection, num_blocks);
      first = index / (most * num_blocks) * most;
      index -= first * num_blocks;
      count = min(most, heads - first);
    }
    const int block = index / count;
    const u32 rest = first + index % count;
    return {int(rest / num_slices / num_heads), int(rest / num_slices % num_heads),
            int(rest % num_slices), kOwnsQueries ? num_blocks - 1 - block : block};
  }
};

}  // namespace cuattn::mainloop
