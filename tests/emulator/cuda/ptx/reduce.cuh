// Emulates kernels_cu/ptx/reduce.cuh: red.global.add.v4.f32.
#pragma once
#include "base/prelude.cuh"
#include "machine/instructions.h"

namespace cuattn::ptx {

inline void add_global(f32* address, f32 a, f32 b, f32 c, f32 d) {
  emulator::add_in_global(
      address, {{__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d)}});
}

}  // namespace cuattn::ptx
