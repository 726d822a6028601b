// Emulates kernels_cu/ptx/shared.cuh: ldmatrix, and ld and st in the window of shared memory.
#pragma once
#include "base/prelude.cuh"
#include "machine/instructions.h"

namespace cuattn::ptx {

using emulator::Where;

inline u32 shared_address(const void* pointer) {
  return emulator::SharedMemory::address_of(pointer);
}

template <bool kTransposed>
inline void load_matrices(u32 (&r)[4], u32 address, Where where) {
  const auto lane = emulator::together(emulator::LoadMatrix<kTransposed>{address}, where);
  for (int i = 0; i < 4; ++i) r[i] = lane.registers[i];
}
inline void load_matrix(u32 (&r)[4], u32 address, Where where = Where::current()) {
  load_matrices<false>(r, address, where);
}
inline void load_matrix_transposed(u32 (&r)[4], u32 address, Where where = Where::current()) {
  load_matrices<true>(r, address, where);
}

inline void store_shared(u32 address, u32 x) { emulator::store_shared(address, {{x}}, 4); }
inline void store_shared(u32 address, const u32 (&x)[4]) {
  emulator::store_shared(address, {{x[0], x[1], x[2], x[3]}}, 16);
}
inline void store_shared(u32 address, f32 x) { store_shared(address, __float_as_uint(x)); }
inline f32 load_shared(u32 address) {
  return __uint_as_float(emulator::load_shared(address, 4).at[0]);
}
inline void load_shared(f32& x, f32& y, u32 address) {
  const emulator::Words both = emulator::load_shared(address, 8);
  x = __uint_as_float(both.at[0]), y = __uint_as_float(both.at[1]);
}
inline void load_shared(u32 (&x)[4], u32 address) {
  const emulator::Words all = emulator::load_shared(address, 16);
  for (int i = 0; i < 4; ++i) x[i] = all.at[i];
}

}  // namespace cuattn::ptx
