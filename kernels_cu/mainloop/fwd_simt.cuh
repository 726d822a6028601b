// The forward loop in plain CUDA: the reference that faster loops overlap. Layer: mainloop.
//
//   per key tile:   load K, V | S = Q K^T | scale, mask | push: m, l, P, rescale O | O += P V
//
// cuattn/cpu/tiled.py is the same loop in NumPy. source: Dao 2023, Algorithm 1 (queries outside,
// O unnormalised until the end).
#pragma once
#include "mainloop/simt.cuh"

namespace cuattn::mainloop {

template <SimtConfig C>
struct ForwardSimt : Simt<C, C.block_m, C.block_n> {
  using Base = Simt<C, C.block_m, C.block_n>;
  using typename Base::OwnTile, typename Base::Results, typename Base::Scores,
      typename Base::StreamTile, typename Base::Value, typename Base::WeightTile;
  static constexpr int kDims = Base::kDims, kThreads = Base::kThreads;
  static constexpr int kSharedBytes =
      (OwnTile::kSize + 2 * StreamTile::kSize + WeightTile::kSize) * sizeof(Value);

  CUATTN_DEVICE static void run(const FwdParams& params, Value* shared) {
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    const Work work = Work::of<true>(blockIdx.x, ceil_div(shape.seqlen_q, C.block_m),
                                     ceil_div(shape.head_dim_v, kDims), shape.num_heads_q);
    const int head_kv = work.head_idx / (shape.num_heads_q / shape.num_heads_kv);
    const int slice_begin = work.slice * kDims;

    SharedAllocator<Value> allocator{shared};
    const auto sQ = allocator.template tile<OwnTile>();
    const auto sK = allocator.template tile<StreamTile>();
    const auto sV = allocator.template tile<StreamTile>();
    const auto sP = allocator.template tile<WeightTile>();

    using Stored = Storage<C.dtype>;
    const tile::GlobalRows<const Stored> gQ(params.q, work.batch_idx, work.head_idx);
    const tile::GlobalRows<const Stored> gK(params.k, work.batch_idx, head_kv);
    const tile::GlobalRows<const Stored> gV(params.v, work.batch_idx, head_kv);

    const softmax::Range rows = schedule.rows(work.block);
    const softmax::Range keys = schedule.key_range(work.block);
    const softmax::Range tiles = schedule.key_tiles(work.block);
    const Value scale = static_cast<Value>(params.softmax_scale);
    const bool one_chunk = shape.head_dim <= kDims;

    softmax::OnlineSoftmax<softmax::NaturalUnits<Value>, Scores::kRows> state({});
    Results rO;
    rO.clear();
    for (int n_block = tiles.begin; n_block < tiles.end; ++n_block) {
      const int key_begin = n_block * C.block_n;
      ptx::sync_cta();  // everyone is done with the tiles of the iteration before
      Scores rS;
      rS.clear();
      Base::for_each_chunk(
          shape.head_dim,
          [&](int d) {
            if (d == 0) {
              tile::load<kThreads>(sV, gV, key_begin, keys.end, slice_begin, shape.head_dim_v);
            }
            if (!one_chunk || n_block == tiles.begin) {
              tile::load<kThreads>(sQ, gQ, rows.begin, rows.end, d, shape.head_dim);
            }
            tile::load<kThreads>(sK, gK, key_begin, keys.end, d, shape.head_dim);
          },
          [&](int d) { Base::template multiply<true>(rS, sQ, sK, shape.head_dim, d); });
      softmax::finish_scores(rS, scale, schedule.kind(work.block, n_block), [&](int row) {
        return schedule.keys_of(rows.begin + row) - key_begin;
      });
      state.push(rS, rO);
      Base::exchange(rS, sP);
      tile::gemm_nn(rO, sP, sV);
    }
    state.template finish<Scores>(rO);

    const tile::GlobalRows<Storage<C.out_dtype>> gO(params.out, work.batch_idx, work.head_idx);
    Base::store(rO, gO, rows, slice_begin, shape.head_dim_v);
    // Every slice computes the same lse; the first one's lane 0 writes it.
    if (params.lse != nullptr && work.slice == 0 && Scores::lane() == 0) {
      Value* lse = static_cast<Value*>(params.lse) +
                   (i64(work.batch_idx) * shape.num_heads_q + work.head_idx) * shape.seqlen_q;
#pragma unroll
      for (int i = 0; i < Scores::kRows; ++i) {
        const int row = rows.begin + Scores::row_of(i);
        if (row < rows.end) lse[row] = state.lse(i);
      }
    }
  }
};

}  // namespace cuattn::mainloop
