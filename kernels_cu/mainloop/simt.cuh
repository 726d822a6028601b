// What the three plain main loops share: types, thread grid, the shared tiles. Layer: mainloop.
//
// Every loop has the same shape. A CTA owns one tile of positions (queries or keys), streams the
// tiles of the other kind past it, and keeps its results in registers:
//
//   forward      owns queries, streams keys     S = Q K^T                O  += P V
//   backward q   owns queries, streams keys     S = Q K^T, dP = dO V^T   dQ += dS K
//   backward kv  owns keys, streams queries     S = K Q^T, dP = V dO^T   dV += P dO, dK += dS Q
//
// Head dims come in chunks of block_d: products over them are summed chunk by chunk, results are
// cut into slices of that size, one CTA each. Where a head is one chunk, the owned tile stays in
// shared memory; otherwise its chunks are read again for every streamed tile. So any head size
// runs, with registers and shared memory that do not depend on it.
#pragma once
#include "mainloop/work.cuh"
#include "softmax/gradient.cuh"
#include "softmax/schedule.cuh"
#include "softmax/score.cuh"
#include "softmax/state.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/fragment_simt.cuh"
#include "tile/gemm_mma.cuh"
#include "tile/gemm_simt.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::mainloop {

// kOwn positions by kStream positions, kDims head dims at a time.
template <SimtConfig C, int kOwnPositions, int kStreamPositions>
struct Simt {
  static constexpr int kOwn = kOwnPositions, kStream = kStreamPositions, kDims = C.block_d;
  using Value = Accumulator<C.dtype>;
  static constexpr int kThreads = C.num_threads;
  static_assert(kOwn / C.rows_per_thread * C.num_lanes == kThreads);

  // What multiplies decides who holds what, and nothing else in the loops.
  using Grid = tile::ThreadGrid<kOwn / C.rows_per_thread, C.num_lanes>;
  static constexpr int kWarps = kThreads / kWarpSize;
  static constexpr bool kTensorCores = C.product == Product::kMma;
  using Scores = select<kTensorCores, tile::MmaFragment<Value, kWarps, kOwn, kStream>,
                        tile::Scores<Value, Grid, kOwn, kStream>>;
  using Results = select<kTensorCores, tile::MmaFragment<Value, kWarps, kOwn, kDims>,
                         tile::Results<Value, Grid, kOwn, kDims>>;

  // Elements between rows that keep the lanes of a read apart: see tile/shared_tile.cuh.
  static constexpr int kPadding = (kTensorCores ? 32 : 16) / sizeof(Value);
  static constexpr int kWeightPadding = kTensorCores ? 4 : 8;
  using OwnTile = tile::SharedTile<Value, kOwn, kDims, kPadding>;
  using StreamTile = tile::SharedTile<Value, kStream, kDims, kPadding>;
  using WeightTile = tile::SharedTile<Value, kOwn, kStream, kWeightPadding>;

  // Rows of P or dS pass from the lanes that computed them to the lanes that sum over them; both
  // are in one warp, so its barrier suffices. The first one waits for readers of what stood there.
  CUATTN_DEVICE static void exchange(const Scores& s, WeightTile weights) {
    ptx::sync_warp();
    Scores::each(
        [&](int i, int j) { weights.at(Scores::row_of(i), Scores::col_of(j)) = s.at(i, j); });
    ptx::sync_warp();
  }

  // Runs over the chunks of `dims` head dims: `load(d)` brings tiles in, `multiply(d)` uses them.
  // Everyone must be done with those tiles when this is called.
  template <class Load, class Multiply>
  CUATTN_DEVICE static void for_each_chunk(int dims, Load load, Multiply multiply) {
#pragma unroll 1
    for (int d = 0; d < dims; d += kDims) {
      if (d > 0) ptx::sync_cta();  // everyone has read the chunk before
      load(d);
      ptx::sync_cta();  // everyone's part of the chunk is there
      multiply(d);
    }
  }

  // Brings in the chunk of this CTA's slice, where the products over all chunks left another.
  template <class Load>
  CUATTN_DEVICE static void reload(Load load, int slice_begin) {
    ptx::sync_cta();
    load(slice_begin);
    ptx::sync_cta();
  }

  // sums += own stream^T over the chunk at d of `dims` head dims; kScores if they are scores.
  template <bool kScores>
  CUATTN_DEVICE static void multiply(Scores& sums, OwnTile own, StreamTile stream, int dims,
                                     int d) {
    tile::gemm_nt<kScores>(sums, own, stream, min(kDims, dims - d));
  }

  // Writes a slice of results, rounded once.
  template <class Stored>
  CUATTN_DEVICE static void store(const Results& results, const tile::GlobalRows<Stored>& rows,
                                  softmax::Range own, int slice_begin, int dims) {
    Results::each([&](int i, int j) {
      const int row = own.begin + Results::row_of(i), col = slice_begin + Results::col_of(j);
      if (row < own.end && col < dims) ptx::narrow(results.at(i, j), rows.at(row, col));
    });
  }
};

// Carves the dynamic shared memory into tiles.
template <class T>
struct SharedAllocator {
  T* next;
  template <class Tile>
  CUATTN_DEVICE Tile tile() {
    Tile t{next};
    next += Tile::kSize;
    return t;
  }
  CUATTN_DEVICE T* row(int size) {
    T* data = next;
    next += size;
    return data;
  }
};

}  // namespace cuattn::mainloop
