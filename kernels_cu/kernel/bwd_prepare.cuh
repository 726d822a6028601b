// What a backward needs before its main kernels: delta = rowsum(dout * out) - dlse, which each of
// them reads, zeros where dQ is summed in memory, and dout in the inputs' dtype. Layer: kernel.
//
// A few lanes a row, rows in the order of delta's memory. A row that saw no key gets 0, whatever
// its dout holds. source: Dao et al. 2022, Algorithm 4, line 19 (D_i).
#pragma once
#include "ptx/convert.cuh"
#include "ptx/sync.cuh"
#include "softmax/gradient.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::kernel {

// Elements col ... col + kSize - 1 of a row, zeros past its end.
template <int kSize, class Stored>
CUATTN_DEVICE tile::Vector<Stored, kSize> read_row(const tile::GlobalRows<const Stored>& rows,
                                                   bool in_vectors, int row, int col, int cols) {
  tile::Vector<Stored, kSize> x = {};
  if (in_vectors) {
    if (col < cols) {
      x = *reinterpret_cast<const tile::Vector<Stored, kSize>*>(&rows.at(row, col));
    }
  } else {
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      if (col + e < cols) x.at[e] = rows.at(row, col + e);
    }
  }
  return x;
}

template <PrepareConfig C>
CUATTN_DEVICE void bwd_prepare(const BwdParams& params) {
  using Value = Accumulator<C.dtype>;
  using Element = Storage<C.dtype>;
  using Stored = Storage<C.out_dtype>;
  constexpr int kLanes = 8, kSize = 16 / sizeof(Stored);
  const Shape& shape = params.shape;
  const i64 thread = i64(blockIdx.x) * C.num_threads + threadIdx.x;

  if (params.dq_sum != nullptr) {
    const i64 size = params.dq_sum_size / 4;
    float4* sums = static_cast<float4*>(params.dq_sum);
    for (i64 i = thread; i < size; i += i64(gridDim.x) * C.num_threads) {
      sums[i] = make_float4(0, 0, 0, 0);
    }
  }

  const i64 index = thread / kLanes;
  // why no return: the lanes of a warp meet in the shuffles below
  const bool inside = index < i64(shape.batch) * shape.num_heads_q * shape.seqlen_q;
  const i64 its = inside ? index : 0;
  const int lane = threadIdx.x % kLanes;
  const int row = its % shape.seqlen_q;
  const int head_idx = its / shape.seqlen_q % shape.num_heads_q;
  const int batch_idx = its / shape.seqlen_q / shape.num_heads_q;

  const tile::GlobalRows<const Stored> gO(params.out, batch_idx, head_idx);
  const tile::GlobalRows<const Stored> gdO(params.dout, batch_idx, head_idx);
  const bool o_in_vectors = gO.in_vectors(shape.head_dim_v);
  const bool do_in_vectors = gdO.in_vectors(shape.head_dim_v);
  Value sum = Value(0);
  for (int col = lane * kSize; inside && col < shape.head_dim_v; col += kLanes * kSize) {
    const auto o = read_row<kSize>(gO, o_in_vectors, row, col, shape.head_dim_v);
    const auto dout = read_row<kSize>(gdO, do_in_vectors, row, col, shape.head_dim_v);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      Value x = Value(ptx::widen(dout.at[e]));
      if constexpr (C.casts_dout) {
        // The products read dout rounded, so must delta, or rows of dS would not sum to 0.
        Element rounded;
        ptx::narrow(x, rounded);
        x = Value(ptx::widen(rounded));
        if (col + e < shape.head_dim_v) {
          static_cast<Element*>(params.dout_cast)[its * shape.head_dim_v + col + e] = rounded;
        }
      }
      sum = ptx::fma(Value(ptx::widen(o.at[e])), x, sum);
    }
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  if (!inside || lane != 0) return;
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
