// Both backward loops in one launch, on tensor cores of sm_80 and later: the first CTAs own keys
// and yield dK and dV, the rest own queries and yield dQ. Layer: mainloop.
//
// None waits for another, and each computes the delta it needs, so that no kernel comes before or
// after. Seven products instead of five: for problems that do not fill the device for long.
#pragma once
#include "mainloop/bwd_q_sm80.cuh"
#include "mainloop/bwd_sm80.cuh"

namespace cuattn::mainloop {

// The configurations of the two loops. As many warps own 16 queries each as share the keys, and as
// many keys pass them as queries pass the others.
CUATTN_DEVICE constexpr Sm80Config that_owns_keys(Sm80Config its) {
  its.wrt = kWrtDk | kWrtDv;
  return its;
}
CUATTN_DEVICE constexpr Sm80Config that_owns_queries(Sm80Config its) {
  its.wrt = kWrtDq;
  its.warp_rows = 16;
  its.block_n = its.block_m;
  its.block_m = its.num_threads / kWarpSize * its.warp_rows;
  return its;
}

template <Sm80Config C>
struct BackwardSm80Both {
  static constexpr Sm80Config kOwnsKeys = that_owns_keys(C), kOwnsQueries = that_owns_queries(C);

  struct KeyCtas {
    CUATTN_DEVICE static u32 begin(const BwdParams&) { return 0; }
    CUATTN_DEVICE static u32 count(const BwdParams& params) {
      if (params.dk.data == nullptr && params.dv.data == nullptr) return 0;
      const Shape& shape = params.shape;
      return ceil_div(shape.seqlen_k, C.block_n) * shape.num_heads_kv * shape.batch;
    }
  };
  struct QueryCtas {
    CUATTN_DEVICE static u32 begin(const BwdParams& params) { return KeyCtas::count(params); }
    CUATTN_DEVICE static u32 count(const BwdParams& params) { return gridDim.x - begin(params); }
  };

  using Keys = BackwardSm80<kOwnsKeys, DqElsewhere<kOwnsKeys>, DeltaFromOut<kOwnsKeys>, KeyCtas>;
  using Queries = BackwardSm80Q<kOwnsQueries, DeltaFromOut<kOwnsQueries>, QueryCtas>;
  static constexpr int kSharedBytes = max(Keys::kSharedBytes, Queries::kSharedBytes);

  CUATTN_DEVICE static void run(const BwdParams& params, u32 shared) {
    if (ptx::block_index() < KeyCtas::count(params)) {
      Keys::run(params, shared);
    } else {
      Queries::run(params, shared);
    }
  }
};

}  // namespace cuattn::mainloop
