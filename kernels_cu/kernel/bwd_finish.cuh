// dQ from the sums that mainloop/dq_sm80.cuh has left in memory: scaled, rounded and brought into
// the caller's order. Layer: kernel.
//
// A thread four numbers, in the order of the sums.
#pragma once
#include "mainloop/dq_sm80.cuh"

namespace cuattn::kernel {

template <Sm80Config C>
CUATTN_DEVICE void bwd_finish(const BwdParams& params) {
  using DqSum = mainloop::DqSum<C>;
  using Element = Storage<C.dtype>;
  const Shape& shape = params.shape;
  const int num_tiles = ceil_div(shape.seqlen_q, C.block_m);
  const i64 first = i64(blockIdx.x) * C.num_threads;  // a CTA stays inside a tile
  const i64 tile_idx = first / (DqSum::kSize / 4);
  const int index = first % (DqSum::kSize / 4) + threadIdx.x;
  const int head_idx = tile_idx / num_tiles % shape.num_heads_q;
  const int batch_idx = tile_idx / num_tiles / shape.num_heads_q;

  int row, col;
  DqSum::place_of(index, row, col);
  row += int(tile_idx % num_tiles) * C.block_m;
  const float4 sum =
      static_cast<const float4*>(params.dq_sum)[tile_idx * (DqSum::kSize / 4) + index];
  const f32 scale = static_cast<f32>(params.softmax_scale);
  const f32* lse = static_cast<const f32*>(params.lse) +
                   (i64(batch_idx) * shape.num_heads_q + head_idx) * shape.seqlen_q;
  const tile::GlobalRows<Element> gdQ(params.dq, batch_idx, head_idx);
  const bool in_vectors = gdQ.in_vectors(shape.head_dim);
#pragma unroll
  for (int half = 0; half < 2; ++half, row += 8) {
    if (row >= shape.seqlen_q) continue;
    const bool is_seen = softmax::is_seen(lse[row]);
    const f32 x = softmax::query_gradient(half ? sum.z : sum.x, scale, is_seen);
    const f32 y = softmax::query_gradient(half ? sum.w : sum.y, scale, is_seen);
    tile::store_pair(&gdQ.at(row, 0), gdQ.stride_col, in_vectors, col, shape.head_dim,
                     ptx::pack<Element>(x, y));
  }
}

}  // namespace cuattn::kernel
