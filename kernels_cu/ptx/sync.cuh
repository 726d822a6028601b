// Barriers and shuffles. Layer: ptx.
//
// source: PTX ISA, "Parallel Synchronization and Communication Instructions": bar, barrier,
// bar.warp.sync, vote.sync, shfl.sync.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

CUATTN_DEVICE void sync_cta() { __syncthreads(); }
CUATTN_DEVICE void sync_warp() { __syncwarp(); }

// A barrier that also tells every thread whether any of them said so.
CUATTN_DEVICE bool sync_cta_or(bool said) { return __syncthreads_or(said); }
CUATTN_DEVICE bool any_of_warp(bool said) { return __any_sync(kFullWarp, said); }

// A barrier of some warps, of so many threads, which may come to it by different ways: so the form
// that is not .aligned. Barrier 0 is the CTA's, 1 to 15 are free.
// why no barrier.arrive for those that need not wait: it gave nothing, and racecheck loses the
// order.
CUATTN_DEVICE void sync_named(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

template <class T>
CUATTN_DEVICE T shuffle_xor(T x, int lane_mask) {
  return __shfl_xor_sync(kFullWarp, x, lane_mask);
}
template <class T>
CUATTN_DEVICE T shuffle(T x, int lane) {
  return __shfl_sync(kFullWarp, x, lane);
}

}  // namespace cuattn::ptx
