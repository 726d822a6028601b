// Emulates kernels_cu/ptx/shared.cuh: ldmatrix, and ld and st in the window of shared memory.
#pragma once
#include "base/prelude.cuh"
#include "machine/instructions.h"

namespace cuattn::ptx {

using emulator::Where;

inline u32 shared_address(const void* pointer) {
  return emulator::SharedMemory::address_of(pointer);
}

inline void load_matrix(u32 (&r)[4], u32 address, Where where = Where::current()) {
  emulator::LoadMatrix<false> lane{address, r};
  emulator::together(lane, where);
}
inline void load_matrix_transposed(u32 (&r)[4], u32 address, Where where = Where::current()) {
  emulator::LoadMatrix<true> lane{address, r};
  emulator::together(lane, where);
}

inline void store_shared(u32 address, u32 x) { emulator::store_shared(address, &x, 4); }
inline void store_shared(u32 address, const u32 (&x)[4]) { emulator::store_shared(address, x, 16); }
inline void store_shared(u32 address, f32 x) { emulator::store_shared(address, &x, 4); }
inline f32 load_shared(u32 address) {
  f32 x;
  emulator::load_shared(&x, address, 4);
  return x;
}
inline void load_shared(f32& x, f32& y, u32 address) {
  f32 both[2];
  emulator::load_shared(both, address, 8);
  x = both[0], y = both[1];
}
inline void load_shared(u32 (&x)[4], u32 address) { emulator::load_shared(x, address, 16); }

}  // namespace cuattn::ptx
