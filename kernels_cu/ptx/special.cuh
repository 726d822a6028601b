// Special registers. Layer: ptx.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

// blockIdx.x, read anew by every call: what is worked out from it may be worked out again after a
// loop, instead of staying in registers through it. source: PTX ISA, "Special Registers: %ctaid".
CUATTN_DEVICE u32 block_index() {
  u32 index;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index));
  return index;
}

// Makes the compiler forget what it knows of a number: what follows from it is worked out where it
// is used, not ahead of a loop.
CUATTN_DEVICE void forget(int& x) { asm volatile("" : "+r"(x)); }

}  // namespace cuattn::ptx
