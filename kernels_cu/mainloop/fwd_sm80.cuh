// The forward loop on tensor cores of sm_80 and later, for 16-bit inputs. Layer: mainloop.
//
//   copy Q, K, V of the first tile
//   per key tile:   wait | copy the next K, V | S = Q K^T | mask | raise m
//                   per 16 keys: P = exp(S - m), O += P V
//
// The loop of mainloop/fwd_simt.cuh, overlapped: copies of the next tile run beside everything, the
// exponentials of some keys beside the product of those before. A warp keeps its rows of S, P and O
// in registers, so warps meet once a tile, where the copies change hands. The last key tiles come
// first: under a causal band they are the PARTIAL ones. source: Dao 2023, Algorithm 1.
#pragma once
#include "mainloop/copy_sm80.cuh"
#include "mainloop/work.cuh"
#include "ptx/special.cuh"
#include "softmax/schedule.cuh"
#include "softmax/score.cuh"
#include "softmax/state.cuh"
#include "tile/gemm_16bit.cuh"

namespace cuattn::mainloop {

template <Sm80Config C>
struct ForwardSm80 {
  using Element = Storage<C.dtype>;
  static constexpr int kDims = C.block_d, kThreads = C.num_threads, kWarps = kThreads / kWarpSize;
  using QTile = tile::SwizzledTile<C.block_m, kDims>;
  using KeyTile = tile::SwizzledTile<C.block_n, kDims>;
  using Scores = tile::MmaFragment<f32, kWarps, C.block_m, C.block_n>;
  using Results = tile::MmaFragment<f32, kWarps, C.block_m, kDims>;
  using Operand = tile::LeftOperand<Scores::kRows / 2>;
  using Rows = tile::GlobalRows<const Element>;
  using Copy = PairCopy<kThreads, KeyTile, Element>;
  // Two: the copies of a tile run beside the whole tile before. One: those of V beside the scores,
  // those of the next K beside the rest, in half the shared memory. Of the first tile both start.
  static constexpr int kStages = C.num_stages;
  static constexpr typename Copy::Part kNext = kStages == 1 ? Copy::kFirst : Copy::kBoth;
  static constexpr int kSharedBytes = QTile::kBytes + kStages * 2 * KeyTile::kBytes;
  static constexpr int kSteps = kDims / 16;
  static constexpr int kHeld =
      C.held_steps;  // of Q in registers; the others are read for every tile

  CUATTN_DEVICE static void run(const FwdParams& params, u32 shared) {
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    const Work work = work_of(params);
    const softmax::Range rows = schedule.rows(work.block);
    const softmax::Range tiles = schedule.key_tiles(work.block).part(work.slice, params.num_splits);

    const QTile sQ{shared};
    const auto same_work = [&] { return work_of(params); };
    KeyStream<kThreads, KeyTile, Element, decltype(same_work)> stream(
        shared + QTile::kBytes, params.k, params.v, shape, tiles.end - 1,
        schedule.key_range(work.block).end, same_work);
    if (tiles.begin < tiles.end) {
      using QCopy = tile::TileCopy<kThreads, QTile>;
      QCopy::template start_any<tile::Passes(C.rolled_copies)>(
          sQ, Rows(params.q, work.batch_idx, work.head_idx), rows.begin, shape.head_dim,
          [&](int row) { return row < rows.end; });
      for (int stage = 0; stage < kStages; ++stage) stream.clear_past(stage);
      stream.template start<kNext>(tiles.end - 1, 0);
      if constexpr (kStages == 1) stream.template start<Copy::kSecond>(tiles.end - 1, 0);
    }

    const softmax::Log2Units units(params.softmax_scale);
    softmax::OnlineSoftmax<softmax::Log2Units, Scores::kRows> state(units);
    const tile::DownBlocks<QTile> own(sQ, Scores::warp_row());
    Operand held[max(1, kHeld)];
    Results rO;
    rO.clear();
    int stage = 0;
#pragma unroll 1
    for (int n_block = tiles.end - 1; n_block >= tiles.begin; --n_block, stage ^= kStages - 1) {
      const int key_begin = n_block * C.block_n;
      const bool is_first = n_block == tiles.end - 1;
      if (kStages == 1 && is_first) {
        ptx::async_wait<1>();  // V may be on its way
      } else {
        ptx::async_wait<0>();
      }
      ptx::sync_cta();  // everyone's copies are there, and what is copied over next has been read
      if constexpr (kStages == 1) {
        if (!is_first) stream.template start<Copy::kSecond>(n_block, 0);
      } else if (n_block > tiles.begin) {
        stream.template start<Copy::kBoth>(n_block - 1, stage ^ 1);
      }
      if (kHeld > 0 && is_first) {
#pragma unroll
        for (int step = 0; step < kHeld; ++step) tile::read_left(held[step], own, step * 16);
      }

      const tile::AcrossBlocks<KeyTile> bK(stream.sK(stage));
      const tile::DownBlocks<KeyTile> bV(stream.sV(stage));
      Scores rS;
      rS.clear();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Operand read;
        if (step >= kHeld) tile::read_left(read, own, step * 16);
        tile::gemm_nt_step<Element>(rS, step < kHeld ? held[step] : read, bK, step * 16);
      }
      softmax::Log2Units::bring(rS, params.softmax_scale);
      softmax::mask_scores(rS, schedule.kind(work.block, n_block),
                           [&](int row) { return schedule.keys_of(rows.begin + row) - key_begin; });
      state.raise(rS, rO);
      if constexpr (kStages == 1) {
        ptx::async_wait<0>();
        ptx::sync_cta();  // V is there, and K has been read
        if (n_block > tiles.begin) stream.template start<Copy::kFirst>(n_block - 1, 0);
      }
      each_step(state, state.shifts(rS), rS, rO, bV);
    }
    state.template finish<Scores>(rO);
    store(params, sQ, state, rO);
  }

  CUATTN_DEVICE static Work work_of(const FwdParams& params) {
    return Work::of<true, kSectionCtas>(ptx::block_index(),
                                        ceil_div(params.shape.seqlen_q, C.block_m),
                                        params.num_splits, params.shape.num_heads_q);
  }

  // P = exp(S - m) and O += P V, 16 keys after 16 keys.
  template <int kStep = 0, class State, class Right>
  CUATTN_DEVICE static void each_step(State& state, const typename State::Shifts& shifts,
                                      Scores& rS, Results& rO, Right bV) {
    state.template weigh<kStep / 4, kStep / 4 + 4>(rS, shifts);
    tile::gemm_nn_step<Element>(rO, tile::rounded<Element>(rS, kStep), bV, kStep);
    if constexpr (kStep + 16 < C.block_n) each_step<kStep + 16>(state, shifts, rS, rO, bV);
  }

  // out and lse, or where keys are split the part of them that kernel/fwd_merge.cuh will merge.
  template <class State>
  CUATTN_DEVICE static void store(const FwdParams& params, QTile stage, const State& state,
                                  const Results& rO) {
    const Shape& shape = params.shape;
    const Work work = work_of(params);
    const softmax::Range rows =
        softmax::RangeSchedule(shape, C.block_m, C.block_n).rows(work.block);
    const bool is_part = params.num_splits > 1;
    const i64 head =
        (i64(is_part ? work.slice : 0) * shape.batch + work.batch_idx) * shape.num_heads_q +
        work.head_idx;
    if (is_part) {
      f32* part = static_cast<f32*>(params.part_out) + head * shape.seqlen_q * shape.head_dim_v;
      const tile::GlobalRows<f32> gO(part, shape.head_dim_v);
      tile::store_rows(rO, stage, gO, rows.begin, rows.end, shape.head_dim_v);
    } else {
      const tile::GlobalRows<Storage<C.out_dtype>> gO(params.out, work.batch_idx, work.head_idx);
      tile::store_rows(rO, stage, gO, rows.begin, rows.end, shape.head_dim_v);
    }
    f32* lse = static_cast<f32*>(is_part ? params.part_lse : params.lse);
    if (lse == nullptr || Scores::lane() != 0) return;
#pragma unroll
    for (int i = 0; i < Scores::kRows; ++i) {
      const int row = rows.begin + Scores::row_of(i);
      if (row < rows.end) lse[head * shape.seqlen_q + row] = state.lse(i, params.softmax_scale);
    }
  }
};

}  // namespace cuattn::mainloop
