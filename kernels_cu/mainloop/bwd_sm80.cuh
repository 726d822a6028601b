// The backward loop on tensor cores of sm_80 and later, for 16-bit inputs. Layer: mainloop.
//
//   copy K, V of the keys that the CTA owns
//   per query tile of each query head of the group:
//     wait | copy the next Q, dO
//     one half of the warps      S = K Q^T    P = exp(S - lse)     dV += P dO
//     the other half             dP = V dO^T  dS = P (dP - delta)  dK += dS Q
//     all                        dQ += dS K, as its way does it (mainloop/dq_sm80.cuh)
//
// delta comes from memory, or from O beside Q and dO (mainloop/delta_sm80.cuh).
// The loop of mainloop/bwd_kv_simt.cuh, shared by two roles: a warp that weighs and one that
// differentiates own the same keys and do the same two products, with other operands. So each has
// one result in its registers, and one's exponentials run beside the other's products. P passes
// from the first to the second as the registers that dV += P dO multiplies; dS, which every warp
// needs for dQ, through a tile of shared memory. S and its kin are transposed, P[key][query]: what
// a warp computed is its left operand. source: Dao et al. 2022, Algorithm 4.
#pragma once
#include "mainloop/bwd_layout_sm80.cuh"
#include "mainloop/bwd_rows_sm80.cuh"
#include "mainloop/copy_sm80.cuh"
#include "mainloop/delta_sm80.cuh"
#include "mainloop/dq_sm80.cuh"
#include "mainloop/work.cuh"
#include "ptx/special.cuh"
#include "softmax/gradient.cuh"
#include "softmax/schedule.cuh"
#include "softmax/score.cuh"
#include "tile/gemm_16bit.cuh"

namespace cuattn::mainloop {

template <Sm80Config C, class DqWay, class Delta, class Ctas = WholeGrid>
struct BackwardSm80 {
  using Element = Storage<C.dtype>;
  using Layout = typename DqWay::Layout;
  static constexpr int kDims = C.block_d, kThreads = C.num_threads;
  static constexpr int kGroups = Layout::kGroups, kSteps = Layout::kSteps;
  static_assert(kThreads == 2 * kGroups * kWarpSize && kThreads >= 2 * C.block_m);

  using OwnTile = typename Layout::OwnTile;
  using StreamTile = typename Layout::StreamTile;
  using Scores = typename Layout::Scores;
  using Results = tile::MmaFragment<f32, kGroups, C.block_n, kDims>;
  using Operand = tile::LeftOperand<Scores::kRows / 2>;
  using Rows = tile::GlobalRows<const Element>;
  using Copy = PairCopy<kThreads, StreamTile, Element>;
  static constexpr int kSharedBytes = Layout::kBytes + Delta::kBytes;

  CUATTN_DEVICE static void run(const BwdParams& params, u32 shared) {
    const Layout at{shared};
    DqWay dq(params, at);
    const Delta delta(params, at.end());
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    Work work = work_of(params);
    const int warp = threadIdx.x / kWarpSize, group = warp % kGroups;
    const bool weighs = warp < kGroups;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;

    const softmax::Range keys = schedule.keys(work.block);
    softmax::Range row_range = schedule.row_range(work.block);
    softmax::Range tiles = schedule.query_tiles(work.block);
    const softmax::Log2Units units(params.softmax_scale);

    using OwnCopy = PairCopy<kThreads, OwnTile, Element>;
    OwnCopy::template start_any<OwnCopy::kBoth, tile::Passes(C.rolled_copies)>(
        at.sK(), Rows(params.k, work.batch_idx, work.head_idx), shape.head_dim, at.sV(),
        Rows(params.v, work.batch_idx, work.head_idx), shape.head_dim_v, keys.begin,
        [&](int key) { return key < keys.end; });
    // why here: where no tile passes nothing else commits, and results take the place of K and V
    ptx::async_commit();

    // Of the first head's rows, and then of those of any head of the group.
    const int first = work.head_idx * group_size;
    const Rows gQ(params.q, work.batch_idx, first);
    const Rows gdO = output_gradient<Element>(params, work.batch_idx, first);
    const bool is_usual = Copy::is_usual(gQ, shape.head_dim, gdO, shape.head_dim_v) &&
                          (group_size == 1 || (params.q.stride_head % tile::kChunk == 0 &&
                                               params.dout.stride_head % tile::kChunk == 0));
    if (is_usual) {
      const Copy copy(gQ, shape.head_dim, gdO, shape.head_dim_v, 0);
      for (int i = 0; i < Layout::kStages; ++i) copy.clear_past(at.sQ(i), at.sdO(i));
    }
    const auto place_of = [&](const QueryTile& its) {
      return QueryPlace{work.batch_idx, work.head_idx * group_size + its.member, its.m_block};
    };
    RowsOfTile<C, Delta::kInMemory> prefetched;
    const auto copy_queries = [&](const QueryTile& next) {
      const QueryPlace place = place_of(next);
      const int row_begin = next.m_block * C.block_m;
      const Rows gQ(params.q, place.batch_idx, place.head_idx);
      const Rows gdO = output_gradient<Element>(params, place.batch_idx, place.head_idx);
      if (is_usual && row_begin >= row_range.begin && row_begin + C.block_m <= row_range.end) {
        Copy(gQ, shape.head_dim, gdO, shape.head_dim_v, row_begin)
            .template start<Copy::kBoth>(at.sQ(next.buffer), at.sdO(next.buffer));
      } else {
        Copy::template start_any<Copy::kBoth>(
            at.sQ(next.buffer), gQ, shape.head_dim, at.sdO(next.buffer), gdO, shape.head_dim_v,
            row_begin, [&](int row) { return row >= row_range.begin && row < row_range.end; });
      }
      delta.copy(place, row_range);
      ptx::async_commit();
      prefetched.load(params, place.batch_idx, place.head_idx, row_begin, row_range);
    };
    QueryTile now{0, tiles.begin, 0};
    const bool has_tiles = tiles.begin < tiles.end;
    dq.begin(work, tiles);
    if (has_tiles) {
      copy_queries(now);
      prefetched.store(at.sRows(0));
    }

    const tile::DownBlocks<OwnTile> own(weighs ? at.sK() : at.sV(), group * C.warp_rows);
    Results results;  // dV of a warp that weighs, dK of one that differentiates
    results.clear();
#pragma unroll 1
    for (bool more = has_tiles; more;) {
      ptx::forget(row_range.begin), ptx::forget(row_range.end);
      ptx::forget(work.batch_idx), ptx::forget(work.head_idx), ptx::forget(work.block);
      tiles = softmax::RangeSchedule::tiles(row_range, C.block_m);
      const int stage = now.buffer, row_begin = now.m_block * C.block_m;
      more = now.next(tiles).member < group_size;
      ptx::async_wait<0>();
      // Everyone's copies are there, and what the iteration before has read is free.
      const bool is_rare = ptx::sync_cta_or(prefetched.is_rare());
      if (is_rare) {
        prefetched.store(at.sRows(stage), 1.0f);  // for finished scores
        ptx::sync_cta();
        clear_unseen<C>(at.sQ(stage), at.sdO(stage), at.sRows(stage));
        ptx::sync_cta();
      }
      delta.complete(at.sdO(stage), at.sRows(stage), at.sRows(stage) + Layout::kRowBytes);
      if (more) copy_queries(now.next(tiles));
      if (!weighs) dq.add_before(stage);

      const StreamTile sFirst = weighs ? at.sQ(stage) : at.sdO(stage);
      const StreamTile sSecond = weighs ? at.sdO(stage) : at.sQ(stage);
      Scores rS;  // S, then P, of a warp that weighs; dP, then dS, of one that differentiates
      rS.clear();
      tile::gemm_nt<Element, kDims>(rS, own, tile::AcrossBlocks<StreamTile>(sFirst));
      Operand operand[kSteps];
      if (weighs) {
        if (is_rare) {
          softmax::scale_scores(rS, static_cast<f32>(params.softmax_scale));
        } else {
          softmax::Log2Units::bring(rS, params.softmax_scale);
        }
        softmax::mask_scores(rS, schedule.kind(now.m_block, work.block), [&](int key) {
          return schedule.rows_of(work.block * C.block_n + key) - row_begin;
        });
        if (is_rare) {
          weigh(at, rS, operand, group, stage,
                [](f32 score, f32 lse) { return softmax::probability(score, lse); });
        } else {
          weigh(at, rS, operand, group, stage,
                [&](f32 score, f32 lse) { return softmax::probability(units, score, lse); });
        }
        ptx::sync_named(1 + group, 2 * kWarpSize);
        dq.add_before(stage);
      } else {
        ptx::sync_named(1 + group, 2 * kWarpSize);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < Scores::kRows / 2; ++i) {
            ptx::load_shared(operand[step].at[i], at.sP(group, step, i));
          }
          each_row_pair(at.sRows(stage) + Layout::kRowBytes, step,
                        [&](int j, f32 delta0, f32 delta1) {
#pragma unroll
                          for (int i = 0; i < Scores::kRows; ++i) {
                            f32 p0, p1;
                            ptx::unpack<Element>(operand[step].at[i / 2][j % 4 + i % 2], p0, p1);
                            rS.at(i, j) = softmax::score_gradient(p0, rS.at(i, j), delta0);
                            rS.at(i, j + 1) = softmax::score_gradient(p1, rS.at(i, j + 1), delta1);
                          }
                        });
          operand[step] = tile::rounded<Element>(rS, step * 16);
        }
        dq.keep(operand, stage);
      }
      const tile::DownBlocks<StreamTile> second(sSecond);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        tile::gemm_nn_step<Element>(results, operand[step], second, step * 16);
      }
      prefetched.store(at.sRows(stage ^ 1));
      dq.finish(place_of(now));
      now = now.next(tiles);
    }
    ptx::async_wait<0>();
    ptx::sync_cta();
    dq.add_before(now.buffer);
    ptx::sync_cta();  // K has been read: results may take its place

    const Tensor& tensor = weighs ? params.dv : params.dk;
    if (tensor.data == nullptr) return;
    if (!weighs) softmax::scale_scores(results, static_cast<f32>(params.softmax_scale));
    const Work same = work_of(params);
    const softmax::Range own_keys = schedule.keys(same.block);
    const tile::GlobalRows<Element> rows(tensor, same.batch_idx, same.head_idx);
    tile::store_rows(results, weighs ? at.sV() : at.sK(), rows, own_keys.begin, own_keys.end,
                     weighs ? shape.head_dim_v : shape.head_dim);
  }

  CUATTN_DEVICE static Work work_of(const BwdParams& params) {
    const Shape& shape = params.shape;
    return Work::of<false, kSectionCtas>(ptx::block_index() - Ctas::begin(params),
                                         ceil_div(shape.seqlen_k, C.block_n), 1, shape.num_heads_kv,
                                         Ctas::count(params));
  }

  // P from S, rounded, as operand of dV and for the warp that differentiates.
  template <class Probability>
  CUATTN_DEVICE static void weigh(Layout at, Scores& rS, Operand (&operand)[kSteps], int group,
                                  int stage, Probability probability) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      each_row_pair(at.sRows(stage), step, [&](int j, f32 lse0, f32 lse1) {
#pragma unroll
        for (int i = 0; i < Scores::kRows; ++i) {
          rS.at(i, j) = probability(rS.at(i, j), lse0);
          rS.at(i, j + 1) = probability(rS.at(i, j + 1), lse1);
        }
      });
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      operand[step] = tile::rounded<Element>(rS, step * 16);
#pragma unroll
      for (int i = 0; i < Scores::kRows / 2; ++i) {
        ptx::store_shared(at.sP(group, step, i), operand[step].at[i]);
      }
    }
  }

  // Calls f(j, x, y) for the columns j and j + 1 of a step of a fragment with their rows' numbers.
  template <class F>
  CUATTN_DEVICE static void each_row_pair(u32 row_address, int step, F f) {
#pragma unroll
    for (int j = step * 4; j < step * 4 + 4; j += 2) {
      f32 x, y;
      ptx::load_shared(x, y, row_address + Scores::col_of(j) * 4);
      f(j, x, y);
    }
  }
};

}  // namespace cuattn::mainloop
