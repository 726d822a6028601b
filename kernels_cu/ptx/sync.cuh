// Barriers, shuffles and reductions to memory. Layer: ptx.
//
// source: PTX ISA, "Parallel Synchronization and Communication Instructions": bar.sync,
// bar.warp.sync, shfl.sync, red.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

CUATTN_DEVICE void sync_cta() { __syncthreads(); }
CUATTN_DEVICE void sync_warp() { __syncwarp(); }

template <class T>
CUATTN_DEVICE T shuffle_xor(T x, int lane_mask) {
  return __shfl_xor_sync(kFullWarp, x, lane_mask);
}

CUATTN_DEVICE void reduce_add(f32* address, f32 x) { atomicAdd(address, x); }
CUATTN_DEVICE void reduce_add(f64* address, f64 x) { atomicAdd(address, x); }

}  // namespace cuattn::ptx
