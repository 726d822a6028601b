// Emulates kernels_cu/ptx/special.cuh.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

inline u32 block_index() { return blockIdx.x; }
inline void forget(int&) {}

}  // namespace cuattn::ptx
