// What a backward needs before its main kernels: delta = rowsum(dout * out) - dlse, which each of
// them reads, zeros where dQ is summed in memory, and dout in the inputs' dtype. Layer: kernel.
//
// A few lanes a row, some rows a thread, in the order of delta's memory. A row that saw no key gets
// 0, whatever its dout holds. source: Dao et al. 2022, Algorithm 4, line 19 (D_i).
#pragma once
#include "ptx/convert.cuh"
#include "softmax/gradient.cuh"
#include "tile/row_dot.cuh"

namespace cuattn::kernel {

// A query row: rows lie by batch, head and position, as in lse.
struct RowPlace {
  int batch_idx, head_idx, row;

  CUATTN_DEVICE RowPlace(const Shape& shape, i64 index) {
    row = index % shape.seqlen_q;
    head_idx = index / shape.seqlen_q % shape.num_heads_q;
    batch_idx = index / shape.seqlen_q / shape.num_heads_q;
  }
  // why no division: one takes longer than all else that is done for a row
  CUATTN_DEVICE void advance(const Shape& shape, int num_rows) {
    for (row += num_rows; row >= shape.seqlen_q; row -= shape.seqlen_q) {
      if (++head_idx == shape.num_heads_q) head_idx = 0, ++batch_idx;
    }
  }
};

// One row's delta, by its lanes.
template <PrepareConfig C, int kLanes>
CUATTN_DEVICE void prepare_row(const BwdParams& params, i64 index, RowPlace at, bool inside) {
  using Value = Accumulator<C.dtype>;
  using Matrix = tile::GlobalRows<const Storage<C.out_dtype>>;
  const Matrix gO(params.out, at.batch_idx, at.head_idx);
  const Matrix gdO(params.dout, at.batch_idx, at.head_idx);
  const int cols = params.shape.head_dim_v;
  Storage<C.dtype>* cast = static_cast<Storage<C.dtype>*>(params.dout_cast) + index * cols;
  Value sum = tile::row_dot<kLanes, 1, Value>(gO, gdO, at.row, cols, inside, [&](Value x, int col) {
    if constexpr (C.casts_dout) {
      // The products read dout rounded, so must delta, or rows of dS would not sum to 0.
      ptx::narrow(x, cast[col]);
      x = Value(ptx::widen(cast[col]));
    }
    return x;
  });
  if (!inside || threadIdx.x % kLanes != 0) return;
  sum -= softmax::lse_gradient<Value>(params.dlse, at.batch_idx, at.head_idx, at.row);
  const bool seen = softmax::is_seen(static_cast<const Value*>(params.lse)[index]);
  static_cast<Value*>(params.delta)[index] = seen ? sum : Value(0);
}

template <PrepareConfig C>
CUATTN_DEVICE void bwd_prepare(const BwdParams& params) {
  constexpr int kLanes = 8, kRowStep = C.num_threads / kLanes;
  const Shape& shape = params.shape;

  if (params.dq_sum != nullptr) {
    const i64 size = params.dq_sum_size / 4;
    float4* sums = static_cast<float4*>(params.dq_sum);
    for (i64 i = i64(blockIdx.x) * C.num_threads + threadIdx.x; i < size;
         i += i64(gridDim.x) * C.num_threads) {
      sums[i] = make_float4(0, 0, 0, 0);
    }
  }

  const i64 num_rows = i64(shape.batch) * shape.num_heads_q * shape.seqlen_q;
  i64 index = i64(blockIdx.x) * (kRowStep * C.rows_per_thread) + threadIdx.x / kLanes;
  RowPlace at(shape, index);
#pragma unroll 1
  for (int k = 0; k < C.rows_per_thread; ++k) {
    // why none returns past the end: the lanes of a warp meet in shuffles
    prepare_row<C, kLanes>(params, index, at, index < num_rows);
    index += kRowStep;
    at.advance(shape, kRowStep);
  }
}

}  // namespace cuattn::kernel
