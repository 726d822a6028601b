// delta = rowsum(dout * out) - dlse, which every backward reads. Layer: kernel.
//
// One warp a row, rows in the order of delta's memory. A row that saw no key gets 0, whatever its
// dout holds. source: Dao et al. 2022, Algorithm 4, line 19 (D_i).
#pragma once
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "softmax/gradient.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::kernel {

template <DeltaConfig C>
CUATTN_DEVICE void bwd_delta(const BwdParams& params) {
  using Value = Accumulator<C.dtype>;
  using Stored = Storage<C.out_dtype>;
  const Shape& shape = params.shape;
  const int lane = threadIdx.x % kWarpSize;
  const i64 index = i64(blockIdx.x) * (C.num_threads / kWarpSize) + threadIdx.x / kWarpSize;
  if (index >= i64(shape.batch) * shape.num_heads_q * shape.seqlen_q) return;
  const int row = index % shape.seqlen_q;
  const int head_idx = index / shape.seqlen_q % shape.num_heads_q;
  const int batch_idx = index / shape.seqlen_q / shape.num_heads_q;

  const tile::GlobalRows<const Stored> gO(params.out, batch_idx, head_idx);
  const tile::GlobalRows<const Stored> gdO(params.dout, batch_idx, head_idx);
  Value sum = Value(0);
  for (int d = lane; d < shape.head_dim_v; d += kWarpSize) {
    sum = ptx::fma(Value(ptx::widen(gO.at(row, d))), Value(ptx::widen(gdO.at(row, d))), sum);
  }
#pragma unroll
  for (int mask = kWarpSize / 2; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  if (lane != 0) return;
  const Rows& dlse = params.dlse;
  if (dlse.data != nullptr) {
    const i64 at =
        batch_idx * dlse.stride_batch + head_idx * dlse.stride_head + row * dlse.stride_seqlen;
    sum -= static_cast<const Value*>(dlse.data)[at];
  }
  const bool seen = softmax::is_seen(static_cast<const Value*>(params.lse)[index]);
  static_cast<Value*>(params.delta)[index] = seen ? sum : Value(0);
}

}  // namespace cuattn::kernel
