// Additions in global memory. Layer: ptx.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

// Adds four numbers to those at a multiple of 16 bytes, each addition by itself, in any order among
// threads. source: PTX ISA, "red" and "red.vector"; the vector needs sm_90.
CUATTN_DEVICE void add_global(f32* address, f32 a, f32 b, f32 c, f32 d) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(address), "f"(a), "f"(b), "f"(c),
               "f"(d)
               : "memory");
#else
  asm volatile(
      "red.global.add.f32 [%0], %1; red.global.add.f32 [%0+4], %2;"
      "red.global.add.f32 [%0+8], %3; red.global.add.f32 [%0+12], %4;" ::"l"(address),
      "f"(a), "f"(b), "f"(c), "f"(d)
      : "memory");
#endif
}

}  // namespace cuattn::ptx
