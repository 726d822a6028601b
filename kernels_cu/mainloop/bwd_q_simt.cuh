// The backward loop that owns queries and yields dQ. Layer: mainloop.
//
//   per key tile:   load K, V | S = Q K^T | P = exp(S - lse) | dP = dO V^T | dS | dQ += dS K
//
// No two CTAs write the same row, so nothing is added in memory and the bits are always the same.
// source: Dao et al. 2022, Algorithm 4, with the loops the other way round.
#pragma once
#include "mainloop/simt.cuh"
#include "ptx/special.cuh"

namespace cuattn::mainloop {

template <SimtConfig C>
struct BackwardSimtQ : Simt<C, C.block_m, C.block_n> {
  using Base = Simt<C, C.block_m, C.block_n>;
  using typename Base::OwnTile, typename Base::Results, typename Base::Scores,
      typename Base::StreamTile, typename Base::Value, typename Base::WeightTile;
  static constexpr int kDims = Base::kDims, kThreads = Base::kThreads;
  static constexpr int kSharedBytes =
      (2 * OwnTile::kSize + 2 * StreamTile::kSize + WeightTile::kSize) * sizeof(Value);

  CUATTN_DEVICE static void run(const BwdParams& params, Value* shared) {
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    const Work work = work_of(shape);
    const int head_kv = work.head_idx / (shape.num_heads_q / shape.num_heads_kv);
    const int slice_begin = work.slice * kDims;

    SharedAllocator<Value> allocator{shared};
    const auto sQ = allocator.template tile<OwnTile>();
    const auto sdO = allocator.template tile<OwnTile>();
    const auto sK = allocator.template tile<StreamTile>();
    const auto sV = allocator.template tile<StreamTile>();
    const auto sdS = allocator.template tile<WeightTile>();

    using Stored = Storage<C.dtype>;
    const tile::GlobalRows<const Stored> gQ(params.q, work.batch_idx, work.head_idx);
    const tile::GlobalRows<const Stored> gK(params.k, work.batch_idx, head_kv);
    const tile::GlobalRows<const Stored> gV(params.v, work.batch_idx, head_kv);
    const tile::GlobalRows<const Storage<C.out_dtype>> gdO(params.dout, work.batch_idx,
                                                           work.head_idx);

    const softmax::Range rows = schedule.rows(work.block);
    const softmax::Range keys = schedule.key_range(work.block);
    const softmax::Range tiles = schedule.key_tiles(work.block);
    const Value scale = static_cast<Value>(params.softmax_scale);
    const int dims = max(shape.head_dim, shape.head_dim_v);
    const bool one_chunk = dims <= kDims;

    const Value* lse = static_cast<const Value*>(params.lse);
    const Value* delta = static_cast<const Value*>(params.delta);
    const i64 row_offset =
        (i64(work.batch_idx) * shape.num_heads_q + work.head_idx) * shape.seqlen_q;
    softmax::RowStatistics<Value> statistics[Scores::kRows];
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      statistics[i] = softmax::row_statistics(
          lse, [&](i64 index) { return delta[index]; }, row_offset, rows.begin + Scores::row_of(i),
          rows.end);
    }

    const auto seen = [&](int row) { return softmax::is_seen(lse[row_offset + rows.begin + row]); };

    Results rdQ;
    rdQ.clear();
    for (int n_block = tiles.begin; n_block < tiles.end; ++n_block) {
      const int key_begin = n_block * C.block_n;
      const auto load_k = [&](int d) {
        tile::load<kThreads>(sK, gK, key_begin, keys.end, d, shape.head_dim);
      };
      ptx::sync_cta();  // everyone is done with the tiles of the iteration before
      Scores rP, rdS;
      rP.clear();
      rdS.clear();
      Base::for_each_chunk(
          dims,
          [&](int d) {
            if (!one_chunk || n_block == tiles.begin) {
              tile::load<kThreads>(sQ, gQ, rows.begin, rows.end, d, shape.head_dim, seen);
              tile::load<kThreads>(sdO, gdO, rows.begin, rows.end, d, shape.head_dim_v, seen);
            }
            load_k(d);
            tile::load<kThreads>(sV, gV, key_begin, keys.end, d, shape.head_dim_v);
          },
          [&](int d) {
            Base::template multiply<true>(rP, sQ, sK, shape.head_dim, d);
            Base::template multiply<false>(rdS, sdO, sV, shape.head_dim_v, d);
          });
      softmax::finish_scores(rP, scale, schedule.kind(work.block, n_block), [&](int row) {
        return schedule.keys_of(rows.begin + row) - key_begin;
      });
      Scores::each([&](int i, int j) {
        const Value p = softmax::probability(rP.at(i, j), statistics[i].lse);
        rdS.at(i, j) = softmax::score_gradient(p, rdS.at(i, j), statistics[i].delta);
      });
      Base::exchange(rdS, sdS);
      if (!one_chunk) Base::reload(load_k, slice_begin);
      tile::gemm_nn(rdQ, sdS, sK);
    }
    Results::each([&](int i, int j) {
      const bool is_seen = statistics[i].lse != infinity<Value>();
      rdQ.at(i, j) = softmax::query_gradient(rdQ.at(i, j), scale, is_seen);
    });
    const Work same = work_of(shape);
    const tile::GlobalRows<Stored> gdQ(params.dq, same.batch_idx, same.head_idx);
    Base::store(rdQ, gdQ, schedule.rows(same.block), same.slice * kDims, shape.head_dim);
  }

  CUATTN_DEVICE static Work work_of(const Shape& shape) {
    return Work::of<true>(ptx::block_index(), ceil_div(shape.seqlen_q, C.block_m),
                          ceil_div(shape.head_dim, kDims), shape.num_heads_q);
  }
};

}  // namespace cuattn::mainloop
