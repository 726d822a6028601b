// Emulates kernels_cu/ptx/sync.cuh: barriers, votes and shuffles.
#pragma once
#include "base/prelude.cuh"
#include "machine/instructions.h"

namespace cuattn::ptx {

using emulator::Where;

inline void sync_cta(Where where = Where::current()) { emulator::barrier(0, 0, false, where); }
inline void sync_warp(Where where = Where::current()) {
  emulator::together(emulator::SyncWarp{}, where);
}
inline bool sync_cta_or(bool said, Where where = Where::current()) {
  return emulator::barrier(0, 0, said, where);
}
inline bool any_of_warp(bool said, Where where = Where::current()) {
  return emulator::together(emulator::AnyOfWarp{said}, where).said;
}
inline void sync_named(int barrier, int threads, Where where = Where::current()) {
  emulator::barrier(barrier, threads, false, where);
}

template <class T>
inline T shuffle(T x, int from, Where where = Where::current()) {
  using Bits = select<sizeof(T) == 8, u64, u32>;
  const auto lane = emulator::together(emulator::Shuffle{__builtin_bit_cast(Bits, x), from}, where);
  return __builtin_bit_cast(T, static_cast<Bits>(lane.bits));
}
template <class T>
inline T shuffle_xor(T x, int lane_mask, Where where = Where::current()) {
  return shuffle(x, static_cast<int>(threadIdx.x % kWarpSize) ^ lane_mask, where);
}

}  // namespace cuattn::ptx
