// The backward loop that owns keys and yields dK and dV. Layer: mainloop.
//
//   per query tile of each query head of the group:
//   load Q, dO | S = K Q^T | P = exp(S - lse) | dP = V dO^T | dS | dV += P dO | dK += dS Q
//
// The transpose of the schedule: which query tiles see these keys. Everything is transposed with
// it, P[key][query] above all, so that the owned rows are keys. The sum over the query heads of a
// group stays in registers. source: Dao et al. 2022, Algorithm 4.
#pragma once
#include "mainloop/simt.cuh"

namespace cuattn::mainloop {

template <SimtConfig C>
struct BackwardSimtKv : Simt<C, C.block_n, C.block_m> {
  using Base = Simt<C, C.block_n, C.block_m>;
  using typename Base::OwnTile, typename Base::Results, typename Base::Scores,
      typename Base::StreamTile, typename Base::Value, typename Base::WeightTile;
  static constexpr int kDims = Base::kDims, kThreads = Base::kThreads;
  static constexpr bool kWantsDk = C.wrt & kWrtDk, kWantsDv = C.wrt & kWrtDv;
  static constexpr int kSharedBytes =
      (2 * OwnTile::kSize + 2 * StreamTile::kSize + WeightTile::kSize + 2 * C.block_m) *
      sizeof(Value);

  CUATTN_DEVICE static void run(const BwdParams& params, Value* shared) {
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    const int results = max(kWantsDk ? shape.head_dim : 0, kWantsDv ? shape.head_dim_v : 0);
    const Work work = Work::of<false>(blockIdx.x, ceil_div(shape.seqlen_k, C.block_n),
                                      ceil_div(results, kDims), shape.num_heads_kv);
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const int slice_begin = work.slice * kDims;

    SharedAllocator<Value> allocator{shared};
    const auto sK = allocator.template tile<OwnTile>();
    const auto sV = allocator.template tile<OwnTile>();
    const auto sQ = allocator.template tile<StreamTile>();
    const auto sdO = allocator.template tile<StreamTile>();
    const auto sP = allocator.template tile<WeightTile>();  // P, then dS
    Value* sLse = allocator.row(C.block_m);
    Value* sDelta = allocator.row(C.block_m);

    using Stored = Storage<C.dtype>;
    const tile::GlobalRows<const Stored> gK(params.k, work.batch_idx, work.head_idx);
    const tile::GlobalRows<const Stored> gV(params.v, work.batch_idx, work.head_idx);

    const softmax::Range keys = schedule.keys(work.block);
    const softmax::Range row_range = schedule.row_range(work.block);
    const softmax::Range tiles = schedule.query_tiles(work.block);
    const Value scale = static_cast<Value>(params.softmax_scale);
    const int dims = kWantsDk ? max(shape.head_dim, shape.head_dim_v) : shape.head_dim;
    const bool one_chunk = max(shape.head_dim, shape.head_dim_v) <= kDims;

    Results rdK, rdV;
    rdK.clear();
    rdV.clear();
    for (int member = 0; member < group_size; ++member) {
      const int head_q = work.head_idx * group_size + member;
      const tile::GlobalRows<const Stored> gQ(params.q, work.batch_idx, head_q);
      const tile::GlobalRows<const Storage<C.out_dtype>> gdO(params.dout, work.batch_idx, head_q);
      const i64 row_offset = (i64(work.batch_idx) * shape.num_heads_q + head_q) * shape.seqlen_q;

      for (int m_block = tiles.begin; m_block < tiles.end; ++m_block) {
        const int row_begin = m_block * C.block_m;
        const bool first = member == 0 && m_block == tiles.begin;
        ptx::sync_cta();  // everyone is done with the tiles of the iteration before
        for (int row = threadIdx.x; row < C.block_m; row += kThreads) {
          const auto delta_of = [&](i64 index) {
            return static_cast<const Value*>(params.delta)[index];
          };
          const auto statistics =
              softmax::row_statistics(static_cast<const Value*>(params.lse), delta_of, row_offset,
                                      row_begin + row, row_range.end);
          sLse[row] = statistics.lse;
          sDelta[row] = statistics.delta;
        }
        ptx::sync_cta();  // the statistics are there; the loads ask them which rows count
        const auto seen = [&](int row) { return sLse[row] != infinity<Value>(); };
        const auto load_q = [&](int d) {
          tile::load<kThreads>(sQ, gQ, row_begin, row_range.end, d, shape.head_dim, seen);
        };
        const auto load_do = [&](int d) {
          tile::load<kThreads>(sdO, gdO, row_begin, row_range.end, d, shape.head_dim_v, seen);
        };
        Scores rP, rdS;
        rP.clear();
        rdS.clear();
        Base::for_each_chunk(
            dims,
            [&](int d) {
              if (!one_chunk || first) {
                tile::load<kThreads>(sK, gK, keys.begin, keys.end, d, shape.head_dim);
                if (kWantsDk) {
                  tile::load<kThreads>(sV, gV, keys.begin, keys.end, d, shape.head_dim_v);
                }
              }
              load_q(d);
              load_do(d);
            },
            [&](int d) {
              Base::template multiply<true>(rP, sK, sQ, shape.head_dim, d);
              if (kWantsDk) Base::template multiply<false>(rdS, sV, sdO, shape.head_dim_v, d);
            });
        softmax::finish_scores(rP, scale, schedule.kind(m_block, work.block), [&](int key) {
          return schedule.rows_of(keys.begin + key) - row_begin;
        });
        Scores::each([&](int i, int j) {
          const int row = Scores::col_of(j);
          rP.at(i, j) = softmax::probability(rP.at(i, j), sLse[row]);
          rdS.at(i, j) = softmax::score_gradient(rP.at(i, j), rdS.at(i, j), sDelta[row]);
        });
        if constexpr (kWantsDv) {
          Base::exchange(rP, sP);
          if (!one_chunk) Base::reload(load_do, slice_begin);
          tile::gemm_nn(rdV, sP, sdO);
        }
        if constexpr (kWantsDk) {
          Base::exchange(rdS, sP);
          if (!one_chunk) Base::reload(load_q, slice_begin);
          tile::gemm_nn(rdK, sP, sQ);
        }
      }
    }
    if constexpr (kWantsDv) {
      const tile::GlobalRows<Stored> gdV(params.dv, work.batch_idx, work.head_idx);
      Base::store(rdV, gdV, keys, slice_begin, shape.head_dim_v);
    }
    if constexpr (kWantsDk) {
      Results::each([&](int i, int j) { rdK.at(i, j) *= scale; });
      const tile::GlobalRows<Stored> gdK(params.dk, work.batch_idx, work.head_idx);
      Base::store(rdK, gdK, keys, slice_begin, shape.head_dim);
    }
  }
};

}  // namespace cuattn::mainloop
