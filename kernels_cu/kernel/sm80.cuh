// Entries of the loops for tensor cores of sm_80 and later. Layer: kernel.
//
// A generated unit (cuattn/jit/source.py) calls one of these from its only __global__ function.
#pragma once
#include "mainloop/bwd_both_sm80.cuh"
#include "mainloop/bwd_q_sm80.cuh"
#include "mainloop/bwd_sm80.cuh"
#include "mainloop/fwd_sm80.cuh"

namespace cuattn::kernel {

template <Sm80Config C, class Loop, class Params>
CUATTN_DEVICE void run_sm80(const Params& params) {
  static_assert(C.smem_bytes == Loop::kSharedBytes, "the plan and the kernel disagree");
  extern __shared__ __align__(128) unsigned char shared[];
  Loop::run(params, ptx::shared_address(shared));
}

template <Sm80Config C>
CUATTN_DEVICE void fwd_sm80(const FwdParams& params) {
  run_sm80<C, mainloop::ForwardSm80<C>>(params);
}
template <Sm80Config C>
CUATTN_DEVICE void bwd_sm80(const BwdParams& params) {
  using namespace mainloop;
  run_sm80<C, BackwardSm80<C, DqInSums<C>, DeltaInMemory<C>>>(params);
}
template <Sm80Config C>
CUATTN_DEVICE void bwd_one_sm80(const BwdParams& params) {
  using namespace mainloop;
  run_sm80<C, BackwardSm80<C, DqInRows<C>, DeltaFromOut<C>>>(params);
}
template <Sm80Config C>
CUATTN_DEVICE void bwd_kv_sm80(const BwdParams& params) {
  using namespace mainloop;
  run_sm80<C, BackwardSm80<C, DqElsewhere<C>, DeltaInMemory<C>>>(params);
}
template <Sm80Config C>
CUATTN_DEVICE void bwd_q_sm80(const BwdParams& params) {
  using namespace mainloop;
  run_sm80<C, BackwardSm80Q<C, DeltaInMemory<C>>>(params);
}
template <Sm80Config C>
CUATTN_DEVICE void bwd_both_sm80(const BwdParams& params) {
  run_sm80<C, mainloop::BackwardSm80Both<C>>(params);
}

}  // namespace cuattn::kernel
