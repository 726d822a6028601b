// Emulates kernels_cu/ptx/async_copy.cuh: the same functions on machine/async_copies.h.
#pragma once
#include "base/prelude.cuh"
#include "machine/instructions.h"

namespace cuattn::ptx {

inline void async_copy_16(u32 shared, const void* global, bool wanted) {
  emulator::start_copy(shared, global, wanted);
}
inline void async_copy_16(u32 shared, const void* global) {
  emulator::start_copy(shared, global, true);
}
inline void async_commit() { emulator::commit_copies(); }
template <int kPending>
inline void async_wait() {
  emulator::wait_for_copies(kPending);
}

}  // namespace cuattn::ptx
