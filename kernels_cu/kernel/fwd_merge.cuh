// Merges what splits of the keys have left: the same softmax once more. Layer: kernel.
//
// A part (out, lse) counts like one key with score lse and value out, so the parts of a row are
// pushed like keys. One warp a row. source: cuattn/states.py, the same merge in Python.
#pragma once
#include "ptx/convert.cuh"
#include "softmax/state.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::kernel {

// A fragment of one score, and one of `kColCount` results, of a single row.
template <int kColCount>
struct RowFragment {
  using Value = f32;
  static constexpr int kRows = 1, kCols = kColCount;
  f32 data[kCols];
  CUATTN_DEVICE f32& at(int, int j) { return data[j]; }
  CUATTN_DEVICE f32 at(int, int j) const { return data[j]; }
  CUATTN_DEVICE static f32 row_max(f32 x) { return x; }
  CUATTN_DEVICE static f32 row_sum(f32 x) { return x; }
};

template <MergeConfig C>
CUATTN_DEVICE void fwd_merge(const FwdParams& params) {
  const Shape& shape = params.shape;
  const int lane = threadIdx.x % kWarpSize;
  const i64 rows = i64(shape.batch) * shape.num_heads_q * shape.seqlen_q;
  const i64 index = i64(blockIdx.x) * (C.num_threads / kWarpSize) + threadIdx.x / kWarpSize;
  if (index >= rows) return;
  const int row = index % shape.seqlen_q;
  const int head_idx = index / shape.seqlen_q % shape.num_heads_q;
  const int batch_idx = index / shape.seqlen_q / shape.num_heads_q;

  using Score = RowFragment<1>;
  using Out = RowFragment<ceil_div(C.block_d, kWarpSize)>;
  softmax::OnlineSoftmax<softmax::NaturalUnits<f32>, 1> state({});
  Out o = {};
  const f32* part_out = static_cast<const f32*>(params.part_out);
  const f32* part_lse = static_cast<const f32*>(params.part_lse);
#pragma unroll 1
  for (int split = 0; split < params.num_splits; ++split) {
    const i64 at = split * rows + index;
    Score weight{part_lse[at]};
    state.push(weight, o);
    if (weight.at(0, 0) == 0.0f) continue;  // a part without keys holds nothing
#pragma unroll
    for (int j = 0; j < Out::kCols; ++j) {
      const int col = j * kWarpSize + lane;
      if (col < shape.head_dim_v) {
        o.at(0, j) = ptx::fma(weight.at(0, 0), part_out[at * shape.head_dim_v + col], o.at(0, j));
      }
    }
  }
  state.template finish<Score>(o);
  const tile::GlobalRows<Storage<C.out_dtype>> gO(params.out, batch_idx, head_idx);
#pragma unroll
  for (int j = 0; j < Out::kCols; ++j) {
    const int col = j * kWarpSize + lane;
    if (col < shape.head_dim_v) ptx::narrow(o.at(0, j), gO.at(row, col));
  }
  if (params.lse != nullptr && lane == 0) static_cast<f32*>(params.lse)[index] = state.lse(0);
}

}  // namespace cuattn::kernel
