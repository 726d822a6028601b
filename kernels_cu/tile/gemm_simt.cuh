// Products of shared tiles into register fragments, on the ordinary arithmetic units. Layer: tile.
//
// Named as in BLAS (N: as stored, T: transposed). Four steps of the summation are taken at once:
// the left operand's four columns stay in registers while the right operand streams past. With
// 8 x 8 elements a thread, 16 vector reads feed 256 multiply-adds, the most that the register file
// allows and about what the shared memory delivers.
#pragma once
#include "ptx/math.cuh"
#include "tile/fragment_simt.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::tile {

// acc[i][j] += sum over k < depth of a[row i][k] * b[col j][k]; columns past `depth`, up to the
// next multiple of four, must hold zeros. kScores makes no difference: every sum rounds to nearest.
template <bool kScores, class T, class Grid, int kTileRows, int kTileCols, Columns kColumns,
          class TileA, class TileB>
CUATTN_DEVICE void gemm_nt(Fragment<T, Grid, kTileRows, kTileCols, kColumns>& acc, TileA a, TileB b,
                           int depth) {
  using Acc = Fragment<T, Grid, kTileRows, kTileCols, kColumns>;
#pragma unroll 1
  for (int k = 0; k < depth; k += 4) {
    Quad<T> left[Acc::kRows];
#pragma unroll
    for (int i = 0; i < Acc::kRows; ++i) left[i] = a.quad(Acc::row_of(i), k);
#pragma unroll
    for (int j = 0; j < Acc::kCols; ++j) {
      const Quad<T> right = b.quad(Acc::col_of(j), k);
#pragma unroll
      for (int i = 0; i < Acc::kRows; ++i) {
#pragma unroll
        for (int s = 0; s < 4; ++s) {
          acc.at(i, j) = ptx::fma(left[i].at[s], right.at[s], acc.at(i, j));
        }
      }
    }
  }
}

// acc[i][j] += sum over k < TileA::kCols of a[row i][k] * b[k][col j].
template <class T, class Grid, int kTileRows, int kTileCols, Columns kColumns, class TileA,
          class TileB>
CUATTN_DEVICE void gemm_nn(Fragment<T, Grid, kTileRows, kTileCols, kColumns>& acc, TileA a,
                           TileB b) {
  using Acc = Fragment<T, Grid, kTileRows, kTileCols, kColumns>;
  static_assert(kColumns == Columns::kQuads);
#pragma unroll 1
  for (int k = 0; k < TileA::kCols; k += 4) {
    Quad<T> left[Acc::kRows];
#pragma unroll
    for (int i = 0; i < Acc::kRows; ++i) left[i] = a.quad(Acc::row_of(i), k);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int j = 0; j < Acc::kCols; j += 4) {
        const Quad<T> right = b.quad(k + s, Acc::col_of(j));
#pragma unroll
        for (int i = 0; i < Acc::kRows; ++i) {
#pragma unroll
          for (int jj = 0; jj < 4; ++jj) {
            acc.at(i, j + jj) = ptx::fma(left[i].at[s], right.at[jj], acc.at(i, j + jj));
          }
        }
      }
    }
  }
}

}  // namespace cuattn::tile
