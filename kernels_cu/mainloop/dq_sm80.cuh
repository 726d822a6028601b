// The ways to dQ of the loop in mainloop/bwd_sm80.cuh, and who brings delta. Layer: mainloop.
//
//   DqElsewhere   a kernel that owns queries yields dQ
//   DqInSums      other CTAs have other keys: the terms of all are added in memory
//   DqInRows      one tile holds all keys, so a CTA has all that its rows need
//
// Before and after the first two come other kernels; the third computes delta from O, which it
// copies with Q and dO, and stores dQ itself. A way says how many tiles of dS there are (Layout),
// what it needs of shared memory beside (kBytes), whether delta is there (kHasDelta), and takes the
// steps that the loop calls, some of them empty:
//
//   begin()        before the first query tile
//   copy()         with the copies of Q and dO
//   complete()     when these are there
//   add_before()   amid the products of a tile: dQ of the one before
//   finish()       at the end of a tile; other warps may still write their dS
#pragma once
#include "mainloop/bwd_layout_sm80.cuh"
#include "mainloop/bwd_rows_sm80.cuh"
#include "mainloop/work.cuh"
#include "tile/gemm_16bit.cuh"
#include "tile/sum_in_memory.cuh"

namespace cuattn::mainloop {

template <Sm80Config C>
struct DqElsewhere {
  static_assert((C.wrt & kWrtDq) == 0);
  using Layout = BackwardLayout<C, 0>;
  static constexpr int kBytes = 0;
  static constexpr bool kHasDelta = true;

  CUATTN_DEVICE DqElsewhere(const BwdParams&, Layout) {}
  CUATTN_DEVICE void begin(const Work&, softmax::Range) const {}
  CUATTN_DEVICE void copy(QueryPlace, softmax::Range) const {}
  CUATTN_DEVICE void complete(int) const {}
  CUATTN_DEVICE void add_before(int) const {}
  CUATTN_DEVICE void finish(QueryPlace) const {}
};

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
struct DqInSums {
  static_assert((C.wrt & kWrtDq) != 0);
  using Layout = BackwardLayout<C, 2>;
  using Sum = DqSum<C>;
  static constexpr int kBytes = 0, kNone = -1;
  static constexpr bool kHasDelta = true;

  const BwdParams& params;
  Layout at;
  int tile = kNone;  // whose dQ is still to be added, of those of all heads

  CUATTN_DEVICE DqInSums(const BwdParams& its_params, Layout layout)
      : params(its_params), at(layout) {}
  CUATTN_DEVICE void begin(const Work&, softmax::Range) const {}
  CUATTN_DEVICE void copy(QueryPlace, softmax::Range) const {}
  CUATTN_DEVICE void complete(int) const {}

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
struct DqInRows {
  using Layout = BackwardLayout<C, 1>;
  using Element = Storage<C.dtype>;
  using Tile = typename Layout::StreamTile;
  using Sum = DqSum<C>;
  static constexpr int kBytes = Tile::kBytes;  // O
  static constexpr bool kHasDelta = false;

  const BwdParams& params;
  Layout at;

  CUATTN_DEVICE DqInRows(const BwdParams& its_params, Layout layout)
      : params(its_params), at(layout) {}
  CUATTN_DEVICE Tile sO() const { return {at.end()}; }

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
  CUATTN_DEVICE void copy(QueryPlace next, softmax::Range rows) const {
    const tile::GlobalRows<const Element> gO(params.out, next.batch_idx, next.head_idx);
    tile::TileCopy<C.num_threads, Tile>::start_any(
        sO(), gO, next.m_block * C.block_m, params.shape.head_dim_v,
        [&](int row) { return row >= rows.begin && row < rows.end; });
  }
  CUATTN_DEVICE void complete(int stage) const {
    complete_delta(stage);
    ptx::sync_cta();
  }
  CUATTN_DEVICE void add_before(int) const {}

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

 private:
  // Puts delta = rowsum(dout * out) - dlse in the place of dlse; a row that saw no key gets 0.
  // Lanes of a row are a few rows apart, so that those that read together meet different banks.
  CUATTN_DEVICE void complete_delta(int stage) const {
    constexpr int kLanes = C.num_threads / C.block_m, kRowsOfWarp = kWarpSize / kLanes;
    const Tile out = sO(), dout = at.sdO(stage);
    const u32 rows = at.sRows(stage);
    const int lane = threadIdx.x % kWarpSize;
    const int row = threadIdx.x / kWarpSize * kRowsOfWarp + lane % kRowsOfWarp;
    f32 sum = 0;
#pragma unroll
    for (int i = 0; i < ceil_div(Tile::kChunks, kLanes); ++i) {
      const int chunk = i * kLanes + lane / kRowsOfWarp;
      if (Tile::kChunks % kLanes != 0 && chunk >= Tile::kChunks) break;
      u32 o[4], its_dout[4];
      ptx::load_shared(o, out.at(row, chunk));
      ptx::load_shared(its_dout, dout.at(row, chunk));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        f32 o0, o1, dout0, dout1;
        ptx::unpack<Element>(o[e], o0, o1);
        ptx::unpack<Element>(its_dout[e], dout0, dout1);
        sum = ptx::fma(o1, dout1, ptx::fma(o0, dout0, sum));
      }
    }
#pragma unroll
    for (int mask = kRowsOfWarp; mask < kWarpSize; mask *= 2) sum += ptx::shuffle_xor(sum, mask);
    if (lane >= kRowsOfWarp) return;
    const u32 place = rows + Layout::kRowBytes + row * 4;
    const bool is_seen = ptx::load_shared(rows + row * 4) != infinity<f32>();
    ptx::store_shared(place, is_seen ? sum - ptx::load_shared(place) : 0.0f);
  }
};

}  // namespace cuattn::mainloop
