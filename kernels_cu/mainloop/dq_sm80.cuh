// The ways to dQ of the loop in mainloop/bwd_sm80.cuh. Layer: mainloop.
//
//   DqElsewhere   CTAs that own queries yield dQ
//   DqInSums      other CTAs have other keys: the terms of all are added in memory
//   DqInRows      one tile holds all keys, so a CTA has all that its rows need and stores dQ
//
// A way says how many tiles of dS there are (Layout), and takes the steps that the loop calls:
//
//   begin()        before the first query tile
//   keep()         a warp's dS
//   add_before()   amid the products of a tile: dQ of the one before
//   finish()       at the end of a tile; other warps may still write their dS
#pragma once
#include "mainloop/bwd_layout_sm80.cuh"
#include "mainloop/bwd_rows_sm80.cuh"
#include "mainloop/work.cuh"
#include "tile/gemm_16bit.cuh"
#include "tile/sum_in_memory.cuh"

namespace cuattn::mainloop {

// Steps that a way need not take.
struct NoDqSteps {
  CUATTN_DEVICE void begin(const Work&, softmax::Range) const {}
  template <class Operands>
  CUATTN_DEVICE void keep(const Operands&, int) const {}
  CUATTN_DEVICE void add_before(int) const {}
  CUATTN_DEVICE void finish(QueryPlace) const {}
};

template <Sm80Config C>
struct DqElsewhere : NoDqSteps {
  static_assert((C.wrt & kWrtDq) == 0);
  using Layout = BackwardLayout<C, 0>;

  CUATTN_DEVICE DqElsewhere(const BwdParams&, Layout) {}
};

// dS of a warp into a tile of shared memory, [key][query]: all registers of a store lie in
// different banks.
template <class Layout, class Operand, int kSteps>
CUATTN_DEVICE void store_gradients(const Operand (&operand)[kSteps],
                                   typename Layout::GradientTile tile) {
  using Scores = typename Layout::Scores;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::store_shared(tile.at(Scores::row_of(i), step * 2 + half) + Scores::lane() * 4,
                          operand[step].at[i / 2][half * 2 + i % 2]);
      }
    }
  }
}

// Calls f(part, index) for this warp's parts of dS K of one query tile.
template <class Sum, class Element, class KeyTile, class GradientTile, class F>
CUATTN_DEVICE void each_dq_part(KeyTile sK, GradientTile sdS, F f) {
  const tile::AcrossBlocks<GradientTile> dS(sdS, Sum::depth_begin(), Sum::row_begin());
#pragma unroll
  for (int i = 0; i < Sum::kParts; ++i) {
    typename Sum::Part part;
    part.clear();
    const tile::DownBlocks<KeyTile> K(sK, Sum::depth_begin(), Sum::col_begin(i));
    tile::gemm_tn<Element, Sum::kDepth>(part, dS, K);
    f(part, i);
  }
}

template <Sm80Config C>
using DqSum = tile::SumInMemory<C.block_m, C.block_d, C.block_n, C.num_threads / kWarpSize>;

// dQ of a tile is added during the next one: so dS of two.
template <Sm80Config C>
struct DqInSums : NoDqSteps {
  static_assert((C.wrt & kWrtDq) != 0);
  using Layout = BackwardLayout<C, 2>;
  using Sum = DqSum<C>;
  static constexpr int kNone = -1;

  const BwdParams& params;
  Layout at;
  int tile = kNone;  // whose dQ is still to be added, of those of all heads

  CUATTN_DEVICE DqInSums(const BwdParams& its_params, Layout layout)
      : params(its_params), at(layout) {}
  template <class Operands>
  CUATTN_DEVICE void keep(const Operands& operands, int stage) const {
    // why the remainder: the compiler does not know that a stage is 0 or 1
    store_gradients<Layout>(operands, at.sdS(stage % Layout::kBuffers));
  }
  CUATTN_DEVICE void add_before(int stage) const {
    if (tile == kNone) return;
    f32* sums = static_cast<f32*>(params.dq_sum) + i64(tile) * Sum::kSize;
    each_dq_part<Sum, Storage<C.dtype>>(
        at.sK(), at.sdS(stage ^ 1),
        [&](const typename Sum::Part& part, int i) { Sum::add(part, i, sums); });
  }
  CUATTN_DEVICE void finish(QueryPlace now) {
    const Shape& shape = params.shape;
    const int head = now.batch_idx * shape.num_heads_q + now.head_idx;
    tile = head * ceil_div(shape.seqlen_q, C.block_m) + now.m_block;
  }
};

template <Sm80Config C>
struct DqInRows : NoDqSteps {
  using Layout = BackwardLayout<C, 1>;
  using Element = Storage<C.dtype>;
  using Sum = DqSum<C>;

  const BwdParams& params;
  Layout at;

  CUATTN_DEVICE DqInRows(const BwdParams& its_params, Layout layout)
      : params(its_params), at(layout) {}

  // Zeros in the rows of dQ that lie in no tile which sees a key.
  CUATTN_DEVICE void begin(const Work& work, softmax::Range tiles) const {
    const Shape& shape = params.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const softmax::Range rows{tiles.begin * C.block_m, min(tiles.end * C.block_m, shape.seqlen_q)};
    if (params.dq.data == nullptr || rows.end - rows.begin == shape.seqlen_q) return;
#pragma unroll 1
    for (int member = 0; member < group_size; ++member) {
      const tile::GlobalRows<Element> gdQ(params.dq, work.batch_idx,
                                          work.head_idx * group_size + member);
#pragma unroll 1
      for (int row = threadIdx.x / kWarpSize; row < shape.seqlen_q;
           row += C.num_threads / kWarpSize) {
        if (row >= rows.begin && row < rows.end) continue;
#pragma unroll 1
        for (int col = threadIdx.x % kWarpSize; col < shape.head_dim; col += kWarpSize) {
          gdQ.at(row, col).bits = 0;
        }
      }
    }
  }
  template <class Operands>
  CUATTN_DEVICE void keep(const Operands& operands, int) const {
    store_gradients<Layout>(operands, at.sdS(0));
  }
  CUATTN_DEVICE void finish(QueryPlace now) const {
    ptx::sync_cta();  // all of dS is written
    if (params.dq.data == nullptr) return;
    const Shape& shape = params.shape;
    const f32* lse = static_cast<const f32*>(params.lse) +
                     (i64(now.batch_idx) * shape.num_heads_q + now.head_idx) * shape.seqlen_q;
    const tile::GlobalRows<Element> gdQ(params.dq, now.batch_idx, now.head_idx);
    const f32 scale = static_cast<f32>(params.softmax_scale);
    each_dq_part<Sum, Element>(at.sK(), at.sdS(0), [&](const typename Sum::Part& part, int i) {
      Sum::store(part, i, gdQ, now.m_block * C.block_m, shape.seqlen_q, shape.head_dim,
                 [&](int row) {
                   const bool is_seen = softmax::is_seen(lse[row]);
                   return [=](f32 sum) { return softmax::query_gradient(sum, scale, is_seen); };
                 });
    });
  }
};

}  // namespace cuattn::mainloop
