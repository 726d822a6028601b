// Entries of the plain loops: the dynamic shared memory meets a main loop. Layer: kernel.
//
// A generated unit (cuattn/jit/source.py) calls one of these from its only __global__ function.
#pragma once
#include "mainloop/bwd_kv_simt.cuh"
#include "mainloop/bwd_q_simt.cuh"
#include "mainloop/fwd_simt.cuh"

namespace cuattn::kernel {

template <SimtConfig C, class Loop, class Params>
CUATTN_DEVICE void run_simt(const Params& params) {
  static_assert(C.smem_bytes == Loop::kSharedBytes, "the plan and the kernel disagree");
  extern __shared__ __align__(16) unsigned char shared[];
  Loop::run(params, reinterpret_cast<typename Loop::Value*>(shared));
}

template <SimtConfig C>
CUATTN_DEVICE void fwd_simt(const FwdParams& params) {
  run_simt<C, mainloop::ForwardSimt<C>>(params);
}
template <SimtConfig C>
CUATTN_DEVICE void bwd_q_simt(const BwdParams& params) {
  run_simt<C, mainloop::BackwardSimtQ<C>>(params);
}
template <SimtConfig C>
CUATTN_DEVICE void bwd_kv_simt(const BwdParams& params) {
  run_simt<C, mainloop::BackwardSimtKv<C>>(params);
}

}  // namespace cuattn::kernel
