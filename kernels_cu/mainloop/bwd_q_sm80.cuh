// The backward loop that owns queries and yields dQ, on tensor cores of sm_80 and later, for 16-bit
// inputs: where nothing may be added in memory, or dQ alone is asked for. Layer: mainloop.
//
//   per key tile:   wait | copy the next K, V
//                   S = Q K^T | P = exp(S - lse) | dP = dO V^T | dS | dQ += dS K
//
// The loop of mainloop/bwd_q_simt.cuh with the copies of mainloop/fwd_sm80.cuh; nothing is added in
// memory. source: Dao et al. 2022, Algorithm 4, with the loops the other way round.
#pragma once
#include "mainloop/bwd_rows_sm80.cuh"
#include "mainloop/copy_sm80.cuh"
#include "mainloop/delta_sm80.cuh"
#include "mainloop/work.cuh"
#include "ptx/special.cuh"
#include "softmax/gradient.cuh"
#include "softmax/schedule.cuh"
#include "softmax/score.cuh"
#include "tile/gemm_16bit.cuh"

namespace cuattn::mainloop {

template <Sm80Config C, class Delta, class Ctas = WholeGrid>
struct BackwardSm80Q {
  using Element = Storage<C.dtype>;
  static constexpr int kDims = C.block_d, kThreads = C.num_threads, kWarps = kThreads / kWarpSize;
  using QTile = tile::SwizzledTile<C.block_m, kDims>;
  using KeyTile = tile::SwizzledTile<C.block_n, kDims>;
  using Scores = tile::MmaFragment<f32, kWarps, C.block_m, C.block_n>;
  using Results = tile::MmaFragment<f32, kWarps, C.block_m, kDims>;
  using Rows = tile::GlobalRows<const Element>;
  using Copy = PairCopy<kThreads, KeyTile, Element>;
  static constexpr int kStages = 2;
  static constexpr int kSharedBytes = 2 * QTile::kBytes + kStages * 2 * KeyTile::kBytes;

  CUATTN_DEVICE static void run(const BwdParams& params, u32 shared) {
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    const Work work = work_of(params);
    const softmax::Range rows = schedule.rows(work.block);
    const softmax::Range tiles = schedule.key_tiles(work.block);

    const QTile sQ{shared}, sdO{shared + QTile::kBytes};
    const auto same_work = [&] { return work_of(params); };
    KeyStream<kThreads, KeyTile, Element, decltype(same_work)> stream(
        shared + 2 * QTile::kBytes, params.k, params.v, shape, tiles.end - 1,
        schedule.key_range(work.block).end, same_work);

    const f32* lse = static_cast<const f32*>(params.lse);
    const i64 row_offset =
        (i64(work.batch_idx) * shape.num_heads_q + work.head_idx) * shape.seqlen_q;
    softmax::RowStatistics<f32> statistics[Scores::kRows];
    bool is_rare = false;
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      // delta is asked for when the copies are under way
      statistics[i] = softmax::row_statistics(
          lse, [](i64) { return 0.0f; }, row_offset, rows.begin + Scores::row_of(i), rows.end);
      is_rare |= !(::fabsf(statistics[i].lse) <= softmax::Log2Units::kLargeLse);
    }
    is_rare = ptx::any_of_warp(is_rare);  // then logarithms of P come first
    const softmax::Log2Units units(is_rare ? 0.0 : params.softmax_scale);

    if (tiles.begin < tiles.end) {
      const auto seen = [&](int row) {
        return row < rows.end && softmax::is_seen(lse[row_offset + row]);
      };
      using OwnCopy = PairCopy<kThreads, QTile, Element>;
      OwnCopy::template start_any<OwnCopy::kBoth, tile::Passes(C.rolled_copies)>(
          sQ, Rows(params.q, work.batch_idx, work.head_idx), shape.head_dim, sdO,
          output_gradient<Element>(params, work.batch_idx, work.head_idx), shape.head_dim_v,
          rows.begin, seen);
      stream.clear_past(0), stream.clear_past(1);
      stream.template start<Copy::kBoth>(tiles.end - 1, 0);
    }

#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const bool is_seen = statistics[i].lse != infinity<f32>();
      statistics[i].delta = Delta::of_row(params, work, rows.begin + Scores::row_of(i), is_seen);
    }

    const tile::DownBlocks<QTile> bQ(sQ, Scores::warp_row()), bdO(sdO, Scores::warp_row());
    Results rdQ;
    rdQ.clear();
    int stage = 0;
#pragma unroll 1
    for (int n_block = tiles.end - 1; n_block >= tiles.begin; --n_block, stage ^= 1) {
      const int key_begin = n_block * C.block_n;
      ptx::async_wait<0>();
      ptx::sync_cta();  // everyone's copies are there, and the other stage is read
      if (n_block > tiles.begin) stream.template start<Copy::kBoth>(n_block - 1, stage ^ 1);

      const tile::AcrossBlocks<KeyTile> bK(stream.sK(stage)), bV(stream.sV(stage));
      const tile::DownBlocks<KeyTile> bK_down(stream.sK(stage));
      Scores rP, rdS;
      rP.clear();
      rdS.clear();
      tile::gemm_nt<Element, kDims>(rP, bQ, bK);
      tile::gemm_nt<Element, kDims>(rdS, bdO, bV);
      if (is_rare) {
        const f32 scale = static_cast<f32>(params.softmax_scale);
        Scores::each([&](int i, int j) {
          rP.at(i, j) = softmax::log_probability(rP.at(i, j), scale, statistics[i].lse);
        });
      } else {
        softmax::Log2Units::bring(rP, params.softmax_scale);
      }
      softmax::mask_scores(rP, schedule.kind(work.block, n_block),
                           [&](int row) { return schedule.keys_of(rows.begin + row) - key_begin; });
      Scores::each([&](int i, int j) {
        const f32 lse = is_rare ? 0.0f : statistics[i].lse * f32(kLog2E);
        const f32 p = softmax::probability(units, rP.at(i, j), lse);
        rdS.at(i, j) = softmax::score_gradient(p, rdS.at(i, j), statistics[i].delta);
      });
#pragma unroll
      for (int step = 0; step < C.block_n; step += 16) {
        tile::gemm_nn_step<Element>(rdQ, tile::rounded<Element>(rdS, step), bK_down, step);
      }
    }
    const Work same = work_of(params);
    const softmax::Range own_rows = schedule.rows(same.block);
    const f32 scale = static_cast<f32>(params.softmax_scale);
    Results::each([&](int i, int j) {
      const bool is_seen = statistics[i].lse != infinity<f32>();
      rdQ.at(i, j) = softmax::query_gradient(rdQ.at(i, j), scale, is_seen);
    });
    const tile::GlobalRows<Element> gdQ(params.dq, same.batch_idx, same.head_idx);
    tile::store_rows(rdQ, sQ, gdQ, own_rows.begin, own_rows.end, shape.head_dim);
  }

  CUATTN_DEVICE static Work work_of(const BwdParams& params) {
    const Shape& shape = params.shape;
    return Work::of<true, kSectionCtas>(ptx::block_index() - Ctas::begin(params),
                                        ceil_div(shape.seqlen_q, C.block_m), 1, shape.num_heads_q,
                                        Ctas::count(params));
  }
};

}  // namespace cuattn::mainloop
