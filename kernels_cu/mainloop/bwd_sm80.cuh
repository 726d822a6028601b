// The backward loop on tensor cores of sm_80 and later, for 16-bit inputs. Layer: mainloop.
//
//   copy K, V of the keys that the CTA owns
//   per query tile of each query head of the group:
//     wait | copy the next Q, dO
//     one half of the warps      S = K Q^T    P = exp(S - lse)     dV += P dO
//     the other half             dP = V dO^T  dS = P (dP - delta)  dK += dS Q
//     all                        dQ += dS K, of the tile before, added in global memory
//
// The loop of mainloop/bwd_kv_simt.cuh, shared by two roles: a warp that weighs and one that
// differentiates own the same keys and do the same two products, with other operands. So each has
// one result in its registers, and one's exponentials run beside the other's products. P passes
// from the first to the second as the registers that dV += P dO multiplies; dS, which every warp
// needs for dQ, through a tile of shared memory. S and its kin are transposed, P[key][query]: what
// a warp computed is its left operand. source: Dao et al. 2022, Algorithm 4.
//
// Where one tile holds all keys (one_tile), a CTA has all that its rows need: it computes delta of
// a tile from O, copied with Q and dO, and stores dQ itself; no kernel comes before or after.
#pragma once
#include "mainloop/bwd_rows_sm80.cuh"
#include "mainloop/copy_sm80.cuh"
#include "mainloop/work.cuh"
#include "ptx/special.cuh"
#include "softmax/gradient.cuh"
#include "softmax/schedule.cuh"
#include "softmax/score.cuh"
#include "tile/gemm_16bit.cuh"
#include "tile/sum_in_memory.cuh"

namespace cuattn::mainloop {

// One of the query tiles that pass: of a query head of the group, in one of two buffers.
struct QueryTile {
  int member, m_block, buffer;

  CUATTN_DEVICE QueryTile next(softmax::Range tiles) const {
    const bool is_last = m_block + 1 == tiles.end;
    return {member + is_last, is_last ? tiles.begin : m_block + 1, buffer ^ 1};
  }
};

template <Sm80Config C>
struct BackwardSm80 {
  using Element = Storage<C.dtype>;
  static constexpr int kDims = C.block_d, kThreads = C.num_threads;
  static constexpr int kGroups = C.block_n / C.warp_rows;  // of keys, each with a warp a role
  static_assert(kThreads == 2 * kGroups * kWarpSize && kThreads >= 2 * C.block_m);
  // Of dS: dQ of a tile is summed during the next one, or, in one_tile, stored at once.
  static constexpr int kDqBuffers = C.one_tile ? 1 : C.wrt & kWrtDq ? 2 : 0;

  using OwnTile = tile::SwizzledTile<C.block_n, kDims>;
  using StreamTile = tile::SwizzledTile<C.block_m, kDims>;
  using GradientTile = tile::SwizzledTile<C.block_n, C.block_m>;
  using Scores = tile::MmaFragment<f32, kGroups, C.block_n, C.block_m>;
  using Results = tile::MmaFragment<f32, kGroups, C.block_n, kDims>;
  using Operand = tile::LeftOperand<Scores::kRows / 2>;
  using Rows = tile::GlobalRows<const Element>;
  using Copy = PairCopy<kThreads, StreamTile, Element>;
  using DqSum = tile::SumInMemory<C.block_m, kDims, C.block_n, 2 * kGroups>;
  static constexpr int kSteps = C.block_m / 16, kNone = -1;
  static constexpr int kStages = 2;
  static constexpr int kWeightBytes = C.block_n * C.block_m * 2;
  static constexpr int kRowBytes = C.block_m * 4;  // lse or delta of a query tile
  static constexpr int kSharedBytes = 2 * OwnTile::kBytes + kStages * 2 * StreamTile::kBytes +
                                      kWeightBytes + kDqBuffers * GradientTile::kBytes +
                                      kStages * 2 * kRowBytes +
                                      (C.one_tile ? StreamTile::kBytes : 0);

  // Where everything lies in shared memory.
  u32 shared;
  CUATTN_DEVICE OwnTile sK() const { return {shared}; }
  CUATTN_DEVICE OwnTile sV() const { return {shared + OwnTile::kBytes}; }
  CUATTN_DEVICE StreamTile sQ(int stage) const {
    return {shared + 2 * OwnTile::kBytes + stage * 2 * StreamTile::kBytes};
  }
  CUATTN_DEVICE StreamTile sdO(int stage) const { return {sQ(stage).address + StreamTile::kBytes}; }
  CUATTN_DEVICE u32 sRows(int stage) const {  // lse, then delta
    return sQ(kStages).address + stage * 2 * kRowBytes;
  }
  // A warp's registers of P, in its own order: 16 bytes a lane.
  CUATTN_DEVICE u32 sP(int group, int step, int i) const {
    const int index = (group * kSteps + step) * (Scores::kRows / 2) + i;
    return sRows(kStages) + (index * kWarpSize + threadIdx.x % kWarpSize) * 16;
  }
  CUATTN_DEVICE GradientTile sdS(int buffer) const {
    return {sRows(kStages) + kWeightBytes + buffer * GradientTile::kBytes};
  }

  CUATTN_DEVICE StreamTile sO() const { return {sdS(kDqBuffers).address}; }

  CUATTN_DEVICE static void run(const BwdParams& params, u32 shared) {
    const BackwardSm80 at{shared};
    const Shape& shape = params.shape;
    const softmax::RangeSchedule schedule(shape, C.block_m, C.block_n);
    Work work = work_of(shape);
    const int warp = threadIdx.x / kWarpSize, group = warp % kGroups;
    const bool weighs = warp < kGroups;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;

    const softmax::Range keys = schedule.keys(work.block);
    softmax::Range row_range = schedule.row_range(work.block);
    softmax::Range tiles = schedule.query_tiles(work.block);
    const auto first_head = [&] {
      return work.batch_idx * shape.num_heads_q + work.head_idx * group_size;
    };
    const softmax::Log2Units units(params.softmax_scale);

    using OwnCopy = PairCopy<kThreads, OwnTile, Element>;
    OwnCopy::template start_any<OwnCopy::kBoth>(
        at.sK(), Rows(params.k, work.batch_idx, work.head_idx), shape.head_dim, at.sV(),
        Rows(params.v, work.batch_idx, work.head_idx), shape.head_dim_v, keys.begin,
        [&](int key) { return key < keys.end; });

    // Of the first head's rows, and then of those of any head of the group.
    const int first = work.head_idx * group_size;
    const Rows gQ(params.q, work.batch_idx, first);
    const Rows gdO = output_gradient<Element>(params, work.batch_idx, first);
    const bool is_usual = Copy::is_usual(gQ, shape.head_dim, gdO, shape.head_dim_v) &&
                          (group_size == 1 || (params.q.stride_head % tile::kChunk == 0 &&
                                               params.dout.stride_head % tile::kChunk == 0));
    if (is_usual) {
      const Copy copy(gQ, shape.head_dim, gdO, shape.head_dim_v, 0);
      for (int i = 0; i < kStages; ++i) copy.clear_past(at.sQ(i), at.sdO(i));
    }
    RowsOfTile<C> prefetched;
    const auto copy_queries = [&](const QueryTile& next) {
      const int head = work.head_idx * group_size + next.member;
      const int row_begin = next.m_block * C.block_m;
      const Rows gQ(params.q, work.batch_idx, head);
      const Rows gdO = output_gradient<Element>(params, work.batch_idx, head);
      if (is_usual && row_begin >= row_range.begin && row_begin + C.block_m <= row_range.end) {
        Copy(gQ, shape.head_dim, gdO, shape.head_dim_v, row_begin)
            .template start<Copy::kBoth>(at.sQ(next.buffer), at.sdO(next.buffer));
      } else {
        Copy::template start_any<Copy::kBoth>(
            at.sQ(next.buffer), gQ, shape.head_dim, at.sdO(next.buffer), gdO, shape.head_dim_v,
            row_begin, [&](int row) { return row >= row_range.begin && row < row_range.end; });
      }
      if constexpr (C.one_tile) {
        tile::TileCopy<kThreads, StreamTile>::start_any(
            at.sO(), Rows(params.out, work.batch_idx, head), row_begin, shape.head_dim_v,
            [&](int row) { return row >= row_range.begin && row < row_range.end; });
      }
      ptx::async_commit();
      prefetched.load(params, work.batch_idx, head, row_begin, row_range);
    };
    QueryTile now{0, tiles.begin, 0};
    const bool has_tiles = tiles.begin < tiles.end;
    if constexpr (C.one_tile) clear_dq(params, work, tiles);
    if (has_tiles) {
      copy_queries(now);
      prefetched.store(at.sRows(0));
    }

    const tile::DownBlocks<OwnTile> own(weighs ? at.sK() : at.sV(), group * C.warp_rows);
    Results results;  // dV of a warp that weighs, dK of one that differentiates
    results.clear();
    int tile_before = kNone;  // whose dQ is still to be summed
    const auto add_dq_before = [&] {
      if (kDqBuffers == 2 && tile_before != kNone) at.add_dq(params, tile_before, now.buffer ^ 1);
    };
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
      if constexpr (C.one_tile) {
        complete_delta<C>(at.sO(), at.sdO(stage), at.sRows(stage));
        ptx::sync_cta();
      }
      if (more) copy_queries(now.next(tiles));
      if (!weighs) add_dq_before();

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
          at.weigh(rS, operand, group, stage,
                   [](f32 score, f32 lse) { return softmax::probability(score, lse); });
        } else {
          at.weigh(rS, operand, group, stage,
                   [&](f32 score, f32 lse) { return softmax::probability(units, score, lse); });
        }
        ptx::sync_named(1 + group, 2 * kWarpSize);
        add_dq_before();
      } else {
        ptx::sync_named(1 + group, 2 * kWarpSize);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < Scores::kRows / 2; ++i) {
            ptx::load_shared(operand[step].at[i], at.sP(group, step, i));
          }
          each_row_pair(at.sRows(stage) + kRowBytes, step, [&](int j, f32 delta0, f32 delta1) {
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
        if constexpr (kDqBuffers > 0) at.store_gradients(operand, stage % kDqBuffers);
      }
      const tile::DownBlocks<StreamTile> second(sSecond);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        tile::gemm_nn_step<Element>(results, operand[step], second, step * 16);
      }
      prefetched.store(at.sRows(stage ^ 1));
      if constexpr (C.one_tile) {
        ptx::sync_cta();
        at.store_dq(params, work, now);
      }
      tile_before = (first_head() + now.member) * ceil_div(shape.seqlen_q, C.block_m) + now.m_block;
      now = now.next(tiles);
    }
    ptx::async_wait<0>();
    ptx::sync_cta();
    add_dq_before();
    ptx::sync_cta();  // K has been read: results may take its place

    const Tensor& tensor = weighs ? params.dv : params.dk;
    if (tensor.data == nullptr) return;
    if (!weighs) softmax::scale_scores(results, static_cast<f32>(params.softmax_scale));
    const Work same = work_of(shape);
    const softmax::Range own_keys = schedule.keys(same.block);
    const tile::GlobalRows<Element> rows(tensor, same.batch_idx, same.head_idx);
    tile::store_rows(results, weighs ? at.sV() : at.sK(), rows, own_keys.begin, own_keys.end,
                     weighs ? shape.head_dim_v : shape.head_dim);
  }

  CUATTN_DEVICE static Work work_of(const Shape& shape) {
    return Work::of<false, kSectionCtas>(ptx::block_index(), ceil_div(shape.seqlen_k, C.block_n), 1,
                                         shape.num_heads_kv);
  }

  // P from S, rounded, as operand of dV and for the warp that differentiates.
  template <class Probability>
  CUATTN_DEVICE void weigh(Scores& rS, Operand (&operand)[kSteps], int group, int stage,
                           Probability probability) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      each_row_pair(sRows(stage), step, [&](int j, f32 lse0, f32 lse1) {
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
        ptx::store_shared(sP(group, step, i), operand[step].at[i]);
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

  // dS into shared memory, [key][query]: all registers of a store lie in different banks.
  CUATTN_DEVICE void store_gradients(const Operand (&operand)[kSteps], int buffer) const {
    const GradientTile tile = sdS(buffer);
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

  // Calls f(part, index) for this warp's parts of dS K.
  template <class F>
  CUATTN_DEVICE void each_dq_part(int buffer, F f) const {
    const tile::AcrossBlocks<GradientTile> dS(sdS(buffer), DqSum::depth_begin(),
                                              DqSum::row_begin());
#pragma unroll
    for (int i = 0; i < DqSum::kParts; ++i) {
      typename DqSum::Part part;
      part.clear();
      const tile::DownBlocks<OwnTile> K(sK(), DqSum::depth_begin(), DqSum::col_begin(i));
      tile::gemm_tn<Element, DqSum::kDepth>(part, dS, K);
      f(part, i);
    }
  }

  // dQ += dS K of one query tile of all heads; every warp adds its part.
  CUATTN_DEVICE void add_dq(const BwdParams& params, int tile, int buffer) const {
    f32* sums = static_cast<f32*>(params.dq_sum) + i64(tile) * DqSum::kSize;
    each_dq_part(buffer,
                 [&](const typename DqSum::Part& part, int i) { DqSum::add(part, i, sums); });
  }

  // dQ = dS K of one query tile, where no other CTA has a part of it.
  CUATTN_DEVICE void store_dq(const BwdParams& params, const Work& work,
                              const QueryTile& at) const {
    if (params.dq.data == nullptr) return;
    each_dq_part(0, [&](const typename DqSum::Part& part, int i) {
      const Shape& shape = params.shape;
      const int head = work.head_idx * (shape.num_heads_q / shape.num_heads_kv) + at.member;
      const f32* lse = static_cast<const f32*>(params.lse) +
                       (i64(work.batch_idx) * shape.num_heads_q + head) * shape.seqlen_q;
      DqSum::store(part, i, tile::GlobalRows<Element>(params.dq, work.batch_idx, head),
                   at.m_block * C.block_m, shape.seqlen_q, shape.head_dim,
                   static_cast<f32>(params.softmax_scale),
                   [&](int row) { return softmax::is_seen(lse[row]); });
    });
  }

  // Zeros in the rows of dQ that lie in no tile which sees a key.
  CUATTN_DEVICE static void clear_dq(const BwdParams& params, const Work& work,
                                     softmax::Range tiles) {
    const Shape& shape = params.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    const softmax::Range rows{tiles.begin * C.block_m, min(tiles.end * C.block_m, shape.seqlen_q)};
    if (params.dq.data == nullptr || rows.end - rows.begin == shape.seqlen_q) return;
#pragma unroll 1
    for (int member = 0; member < group_size; ++member) {
      const tile::GlobalRows<Element> gdQ(params.dq, work.batch_idx,
                                          work.head_idx * group_size + member);
#pragma unroll 1
      for (int row = threadIdx.x / kWarpSize; row < shape.seqlen_q; row += kThreads / kWarpSize) {
        if (row >= rows.begin && row < rows.end) continue;
#pragma unroll 1
        for (int col = threadIdx.x % kWarpSize; col < shape.head_dim; col += kWarpSize) {
          gdQ.at(row, col).bits = 0;
        }
      }
    }
  }
};

}  // namespace cuattn::mainloop
