// Who brings delta to the loops for tensor cores of sm_80 and later. Layer: mainloop.
//
//   DeltaInMemory   a kernel before has computed it (kernel/bwd_prepare.cuh)
//   DeltaFromOut    the CTA computes it from O, which it copies with Q and dO
//
// A loop that owns keys calls copy() with the copies of Q and dO, and complete() when they are
// there; one that owns queries calls of_row(), where four neighbouring lanes hold a row and the
// warp comes together. A row that is not inside has 0.
#pragma once
#include "mainloop/bwd_rows_sm80.cuh"
#include "mainloop/work.cuh"
#include "softmax/gradient.cuh"
#include "tile/row_dot.cuh"

namespace cuattn::mainloop {

template <Sm80Config C>
struct DeltaInMemory {
  using Tile = tile::SwizzledTile<C.block_m, C.block_d>;
  static constexpr int kBytes = 0;
  static constexpr bool kInMemory = true;

  CUATTN_DEVICE DeltaInMemory(const BwdParams&, u32) {}
  CUATTN_DEVICE void copy(QueryPlace, softmax::Range) const {}
  CUATTN_DEVICE void complete(Tile, u32, u32) const {}
  CUATTN_DEVICE static f32 of_row(const BwdParams& params, const Work& work, int row, bool inside) {
    const Shape& shape = params.shape;
    const i64 head = i64(work.batch_idx) * shape.num_heads_q + work.head_idx;
    return inside ? static_cast<const f32*>(params.delta)[head * shape.seqlen_q + row] : 0.0f;
  }
};

template <Sm80Config C>
struct DeltaFromOut {
  using Tile = tile::SwizzledTile<C.block_m, C.block_d>;
  using Element = Storage<C.dtype>;
  using Rows = tile::GlobalRows<const Element>;
  static constexpr int kBytes = Tile::kBytes;  // O
  static constexpr bool kInMemory = false;

  const BwdParams& params;
  Tile out;

  CUATTN_DEVICE DeltaFromOut(const BwdParams& its_params, u32 shared)
      : params(its_params), out{shared} {}

  CUATTN_DEVICE void copy(QueryPlace next, softmax::Range rows) const {
    using Copy = tile::TileCopy<C.num_threads, Tile>;
    Copy::template start_any<tile::Passes(C.rolled_copies)>(
        out, Rows(params.out, next.batch_idx, next.head_idx), next.m_block * C.block_m,
        params.shape.head_dim_v, [&](int row) { return row >= rows.begin && row < rows.end; });
  }
  CUATTN_DEVICE static f32 of_row(const BwdParams& params, const Work& work, int row, bool inside) {
    const f32 sum =
        tile::row_dot<4, 4, f32>(Rows(params.out, work.batch_idx, work.head_idx),
                                 Rows(params.dout, work.batch_idx, work.head_idx), row,
                                 params.shape.head_dim_v, inside, [](f32 x, int) { return x; });
    return inside
               ? sum - softmax::lse_gradient<f32>(params.dlse, work.batch_idx, work.head_idx, row)
               : 0.0f;
  }
  // Of the rows of a tile, whose lse and, until then, dlse lie there in shared memory.
  CUATTN_DEVICE void complete(Tile dout, u32 lse, u32 delta) const {
    put_delta(dout, lse, delta);
    ptx::sync_cta();
  }

 private:
  // Puts delta = rowsum(dout * out) - dlse in the place of dlse; a row that saw no key gets 0.
  // Lanes of a row are a few rows apart, so that those that read together meet different banks.
  CUATTN_DEVICE void put_delta(Tile dout, u32 lse, u32 delta) const {
    constexpr int kLanes = C.num_threads / C.block_m, kRowsOfWarp = kWarpSize / kLanes;
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
    const bool is_seen = ptx::load_shared(lse + row * 4) != infinity<f32>();
    ptx::store_shared(delta + row * 4, is_seen ? sum - ptx::load_shared(delta + row * 4) : 0.0f);
  }
};

}  // namespace cuattn::mainloop
