// Copies from global to shared memory that pass no register. Layer: ptx.
//
// source: PTX ISA, "Data Movement and Conversion Instructions: cp.async"; needs sm_80.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

// Starts a copy of 16 bytes; where `wanted` is false zeros are written, and nothing is read. Both
// addresses are multiples of 16. L2 alone keeps what was read: other CTAs of the head want it.
CUATTN_DEVICE void async_copy_16(u32 shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(wanted ? 16 : 0)
               : "memory");
}

CUATTN_DEVICE void async_copy_16(u32 shared, const void* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(global)
               : "memory");
}

// Closes a group of copies; groups complete in order.
CUATTN_DEVICE void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups but the last kPending ones. Others see the data after a barrier.
template <int kPending>
CUATTN_DEVICE void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuattn::ptx
