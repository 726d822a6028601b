// What the backward loops know of the query tiles that pass: which comes next, and its rows'
// numbers beside Q and dO, lse and delta. Layer: mainloop.
#pragma once
#include "ptx/shared.cuh"
#include "softmax/gradient.cuh"
#include "softmax/schedule.cuh"
#include "tile/swizzled_tile.cuh"

namespace cuattn::mainloop {

// One of the query tiles that pass: of a query head of the group, in one of two buffers.
struct QueryTile {
  int member, m_block, buffer;

  CUATTN_DEVICE QueryTile next(softmax::Range tiles) const {
    const bool is_last = m_block + 1 == tiles.end;
    return {member + is_last, is_last ? tiles.begin : m_block + 1, buffer ^ 1};
  }
};

// The same by its place in the problem.
// why two: with this one in the loop, kernels that use every register spill.
struct QueryPlace {
  int batch_idx, head_idx, m_block;
};

// dout of one head, in the inputs' dtype: as given, or rounded by kernel/bwd_prepare.cuh.
template <class Element>
CUATTN_DEVICE tile::GlobalRows<const Element> output_gradient(const BwdParams& params,
                                                              int batch_idx, int head_idx) {
  if (params.dout_cast == nullptr) return {params.dout, batch_idx, head_idx};
  const Shape& shape = params.shape;
  const i64 row = (i64(batch_idx) * shape.num_heads_q + head_idx) * shape.seqlen_q;
  return {static_cast<const Element*>(params.dout_cast) + row * shape.head_dim_v, shape.head_dim_v};
}

// lse and delta of a query tile on their way to shared memory: in a register of a thread each, so
// that the loads overlap an iteration of the loop. A row that the CTA's keys do not see has 0 for
// both, and zeros in Q and dO: it adds nothing. A row that saw no key at all, although the schedule
// lets it, gets lse = +inf. Where no kernel before has computed delta, dlse takes its place.
template <Sm80Config C, bool kDeltaInMemory>
struct RowsOfTile {
  f32 value = 0;

  CUATTN_DEVICE static bool is_lse() { return threadIdx.x < C.block_m; }

  CUATTN_DEVICE void load(const BwdParams& params, int batch_idx, int head_idx, int row_begin,
                          softmax::Range range) {
    const int row = row_begin + threadIdx.x % C.block_m;
    value = 0;
    if (threadIdx.x >= 2 * C.block_m || row < range.begin || row >= range.end) return;
    if (!kDeltaInMemory && !is_lse()) {
      value = softmax::lse_gradient<f32>(params.dlse, batch_idx, head_idx, row);
      return;
    }
    const Shape& shape = params.shape;
    const i64 offset = (i64(batch_idx) * shape.num_heads_q + head_idx) * shape.seqlen_q;
    value = static_cast<const f32*>(is_lse() ? params.lse : params.delta)[offset + row];
  }
  // Whether the tile needs more care: a row that is not seen, or an lse that is large.
  CUATTN_DEVICE bool is_rare() const {
    return is_lse() && !(::fabsf(value) <= softmax::Log2Units::kLargeLse);
  }
  // lse in units of which there are so many to a natural one.
  CUATTN_DEVICE void store(u32 rows, f32 unit = f32(kLog2E)) const {
    if (threadIdx.x >= 2 * C.block_m) return;
    const f32 lse = softmax::is_seen(value) ? value * unit : infinity<f32>();
    ptx::store_shared(rows + threadIdx.x * 4, is_lse() ? lse : value);
  }
};

// Zeros in the rows that saw no key: what they hold may not reach a sum, not even times 0.
template <Sm80Config C, class Tile>
CUATTN_DEVICE void clear_unseen(Tile q, Tile dout, u32 rows) {
  constexpr int kCount = Tile::kRows * Tile::kChunks;
#pragma unroll 1
  for (int index = threadIdx.x; index < kCount; index += C.num_threads) {
    const int row = index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (ptx::load_shared(rows + row * 4) != infinity<f32>()) continue;
    ptx::store_shared(q.at(row, chunk), {0, 0, 0, 0});
    ptx::store_shared(dout.at(row, chunk), {0, 0, 0, 0});
  }
}

}  // namespace cuattn::mainloop
