// Barriers and shuffles. Layer: ptx.
//
// source: PTX ISA, "Parallel Synchronization and Communication Instructions": bar.sync,
// bar.warp.sync, shfl.sync.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

CUATTN_DEVICE void sync_cta() { __syncthreads(); }
CUATTN_DEVICE void sync_warp() { __syncwarp(); }

template <class T>
CUATTN_DEVICE T shuffle_xor(T x, int lane_mask) {
  return __shfl_xor_sync(kFullWarp, x, lane_mask);
}

}  // namespace cuattn::ptx
