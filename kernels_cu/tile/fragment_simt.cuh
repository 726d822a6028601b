// Who holds which element in the SIMT family. Layer: tile.
//
//   A CTA is a grid of kThreadRows x kLanes threads; the kLanes threads of one row of that grid sit
//   in one warp. Thread (t, n) holds rows t, t + kThreadRows, t + 2 kThreadRows, ... of a tile and
//     of SCORES   the columns n, n + kLanes, n + 2 kLanes, ...          (read and written singly)
//     of RESULTS  the columns 4 n ... 4 n + 3, then + 4 kLanes, ...     (read four at a time)
//   so a row of either is spread over the same kLanes lanes, and what a warp knows of its rows
//   never leaves the warp.
#pragma once
#include "base/prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace cuattn::tile {

template <int kRowThreads, int kRowLanes>
struct ThreadGrid {
  static constexpr int kThreadRows = kRowThreads;
  static constexpr int kLanes = kRowLanes;
  static constexpr int kThreads = kThreadRows * kLanes;
  static_assert(kWarpSize % kLanes == 0, "the lanes of a row must sit in one warp");

  CUATTN_DEVICE static int thread_row() { return threadIdx.x / kLanes; }
  CUATTN_DEVICE static int lane() { return threadIdx.x % kLanes; }
};

enum class Columns { kSingle, kQuads };

template <class T, class Grid, int kTileRows, int kTileCols, Columns kColumns>
struct Fragment {
  using Value = T;
  static constexpr int kRows = kTileRows / Grid::kThreadRows;
  static constexpr int kCols = kTileCols / Grid::kLanes;
  static_assert(kTileRows % Grid::kThreadRows == 0 && kTileCols % Grid::kLanes == 0);
  static_assert(kColumns == Columns::kSingle || kCols % 4 == 0);

  T data[kRows][kCols];

  CUATTN_DEVICE static int lane() { return Grid::lane(); }
  CUATTN_DEVICE static int row_of(int i) { return Grid::thread_row() + i * Grid::kThreadRows; }
  CUATTN_DEVICE static int col_of(int j) {
    return kColumns == Columns::kSingle ? Grid::lane() + j * Grid::kLanes
                                        : (j / 4 * Grid::kLanes + Grid::lane()) * 4 + j % 4;
  }
  CUATTN_DEVICE T& at(int i, int j) { return data[i][j]; }
  CUATTN_DEVICE T at(int i, int j) const { return data[i][j]; }

  // Applies f(i, j) to every element that this thread holds.
  template <class F>
  CUATTN_DEVICE static void each(F f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) f(i, j);
    }
  }

  CUATTN_DEVICE void clear() {
    each([&](int i, int j) { data[i][j] = T(0); });
  }

  // Combines one value per lane over the lanes that share a row.
  CUATTN_DEVICE static T row_max(T x) {
#pragma unroll
    for (int mask = Grid::kLanes / 2; mask > 0; mask /= 2) {
      x = ptx::max(x, ptx::shuffle_xor(x, mask));
    }
    return x;
  }
  CUATTN_DEVICE static T row_sum(T x) {
#pragma unroll
    for (int mask = Grid::kLanes / 2; mask > 0; mask /= 2) x += ptx::shuffle_xor(x, mask);
    return x;
  }
};

template <class T, class Grid, int kTileRows, int kTileCols>
using Scores = Fragment<T, Grid, kTileRows, kTileCols, Columns::kSingle>;
template <class T, class Grid, int kTileRows, int kTileCols>
using Results = Fragment<T, Grid, kTileRows, kTileCols, Columns::kQuads>;

}  // namespace cuattn::tile
