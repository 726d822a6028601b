// Merges what splits of the keys have left: the same softmax once more. Layer: kernel.
//
// A part (out, lse) counts like one key with score lse and value out, so the parts of a row are
// pushed like keys, 32 at a time. A row is a warp's: a lane weighs one part of these, then each has
// some columns of all. source: cuattn/states.py, the same merge in Python.
#pragma once
#include "ptx/convert.cuh"
#include "softmax/state.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::kernel {

// One row: a score a lane.
struct PartScores {
  using Value = f32;
  static constexpr int kRows = 1, kCols = 1;
  f32 data;
  CUATTN_DEVICE f32& at(int, int) { return data; }
  CUATTN_DEVICE f32 at(int, int) const { return data; }
  CUATTN_DEVICE static f32 row_max(f32 x) {
#pragma unroll
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) x = ptx::max(x, ptx::shuffle_xor(x, mask));
    return x;
  }
  CUATTN_DEVICE static f32 row_sum(f32 x) {
#pragma unroll
    for (int mask = kWarpSize / 2; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
    return x;
  }
};

// The same row: some columns a lane, kWidth neighbours at a time.
template <int kColCount, int kWidth>
struct PartColumns {
  using Value = f32;
  static constexpr int kRows = 1, kCols = kColCount;
  using Neighbours = tile::Vector<f32, kWidth>;
  Neighbours data[kCols / kWidth];
  CUATTN_DEVICE f32& at(int, int j) { return data[j / kWidth].at[j % kWidth]; }
  CUATTN_DEVICE f32 at(int, int j) const { return data[j / kWidth].at[j % kWidth]; }
  CUATTN_DEVICE static int col_of(int j) {
    return (j / kWidth * kWarpSize + threadIdx.x % kWarpSize) * kWidth + j % kWidth;
  }
  CUATTN_DEVICE static PartColumns load(const f32* row, int cols) {
    PartColumns its = {};
#pragma unroll
    for (int j = 0; j < kCols; j += kWidth) {
      if (col_of(j) < cols) {
        its.data[j / kWidth] = *reinterpret_cast<const Neighbours*>(row + col_of(j));
      }
    }
    return its;
  }
};

template <MergeConfig C, int kWidth>
CUATTN_DEVICE void merge_row(const FwdParams& params, i64 rows, i64 index) {
  constexpr int kTogether = 4;  // parts under way
  const Shape& shape = params.shape;
  const int lane = threadIdx.x % kWarpSize, cols = shape.head_dim_v;
  const f32* part_lse = static_cast<const f32*>(params.part_lse) + index;
  const f32* part_out = static_cast<const f32*>(params.part_out) + index * cols;

  using Columns = PartColumns<ceil_div(C.block_d, kWarpSize), kWidth>;
  softmax::OnlineSoftmax<softmax::NaturalUnits<f32>, 1> state({});
  Columns o = {};
  PartScores weight = {};
#pragma unroll 1
  for (int first = 0; first < params.num_splits; first += kTogether) {
    Columns parts[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int its_cols = first + i < params.num_splits ? cols : 0;
      parts[i] = Columns::load(part_out + (first + i) * rows * cols, its_cols);
    }
    if (first % kWarpSize == 0) {  // after the loads, so that these are under way meanwhile
      const int split = first + lane;
      weight.data = split < params.num_splits ? part_lse[split * rows] : -infinity<f32>();
      state.push(weight, o);
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const f32 its = ptx::shuffle(weight.data, (first + i) % kWarpSize);
      if (its == 0.0f) continue;  // a part without keys, or outweighed, holds nothing
#pragma unroll
      for (int j = 0; j < Columns::kCols; ++j) {
        o.at(0, j) = ptx::fma(its, parts[i].at(0, j), o.at(0, j));
      }
    }
  }
  state.template finish<PartScores>(o);

  const int row = index % shape.seqlen_q;
  const int head_idx = index / shape.seqlen_q % shape.num_heads_q;
  const int batch_idx = index / shape.seqlen_q / shape.num_heads_q;
  using Element = Storage<C.out_dtype>;
  const tile::GlobalRows<Element> gO(params.out, batch_idx, head_idx);
  const bool in_vectors = gO.in_vectors(cols);
#pragma unroll
  for (int j = 0; j < Columns::kCols; j += kWidth) {
    if (Columns::col_of(j) >= cols) continue;
    tile::Vector<Element, kWidth> rounded;
#pragma unroll
    for (int e = 0; e < kWidth; ++e) ptx::narrow(o.at(0, j + e), rounded.at[e]);
    if (in_vectors) {
      *reinterpret_cast<tile::Vector<Element, kWidth>*>(&gO.at(row, Columns::col_of(j))) = rounded;
    } else {
#pragma unroll
      for (int e = 0; e < kWidth; ++e) gO.at(row, Columns::col_of(j) + e) = rounded.at[e];
    }
  }
  if (params.lse != nullptr && lane == 0) static_cast<f32*>(params.lse)[index] = state.lse(0);
}

template <MergeConfig C>
CUATTN_DEVICE void fwd_merge(const FwdParams& params) {
  const Shape& shape = params.shape;
  const i64 rows = i64(shape.batch) * shape.num_heads_q * shape.seqlen_q;
  const i64 index = i64(blockIdx.x) * (C.num_threads / kWarpSize) + threadIdx.x / kWarpSize;
  if (index >= rows) return;
  if (shape.head_dim_v % 4 == 0) {
    merge_row<C, 4>(params, rows, index);
  } else {
    merge_row<C, 1>(params, rows, index);
  }
}

}  // namespace cuattn::kernel
