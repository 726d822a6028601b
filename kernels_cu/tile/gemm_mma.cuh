// Products of shared tiles on tensor cores, in float64 or to float32 accuracy. Layer: tile.
//
// Tensor cores round float32 sums towards zero, so a large sum must be short. A float32 product
// over positions starts from zero in every tile and joins the result by an ordinary addition.
// float32 scores, which are exponentiated, take all small terms before the first large one;
// families.py keeps them to one chunk of head dims. float64 sums are rounded to nearest.
//
// Step t of the unit and step t + 4 stand for two columns of the left operand and the same two rows
// of the right one. Any two serve, a sum may be taken in any order: the choice is free to avoid
// bank conflicts (tile/shared_tile.cuh).
#pragma once
#include "tile/fragment_mma.cuh"
#include "tile/operand_mma.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::tile {

// The two columns of a row that a lane gives, out of k ... k + 7, into elements i and j of its
// operand: float32 two side by side in one read.
template <class T, class Operand, class Tile>
CUATTN_DEVICE void read_row(Operand& operand, int i, int j, Tile tile, int row, int k, int lane) {
  if constexpr (sizeof(T) == 4) {
    const Pair<T> pair = tile.pair(row, k + 2 * lane);
    operand.set(i, pair.at[0]);
    operand.set(j, pair.at[1]);
  } else {
    operand.set(i, tile.at(row, k + lane));
    operand.set(j, tile.at(row, k + lane + 4));
  }
}

template <Terms kTerms, class Acc, class TileA, class TileB>
CUATTN_DEVICE void gemm_nt_terms(Acc& acc, TileA a, TileB b, int depth) {
  using T = typename Acc::Value;
  const int lane = Acc::lane();
#pragma unroll 2
  for (int k = 0; k < depth; k += 8) {
    MmaOperand<T, 4, kTerms> left[Acc::kRows / 2];
#pragma unroll
    for (int i = 0; i < Acc::kRows; ++i) {
      read_row<T>(left[i / 2], i % 2, i % 2 + 2, a, Acc::row_of(i), k, lane);
    }
#pragma unroll
    for (int j = 0; j < Acc::kCols; j += 2 * kBlocks) {
      MmaOperand<T, 2, kTerms> right[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        read_row<T>(right[block], 0, 1, b, Acc::group() + (j / 2 + block) * 8, k, lane);
      }
      mma_blocks(acc, j, left, right);
    }
  }
}

// acc[i][j] += sum over k < depth of a[row i][k] * b[col j][k]; columns past `depth`, up to the
// next multiple of eight, must hold zeros. kScores: the sums will be exponentiated.
template <bool kScores, class T, int kWarps, int kTileRows, int kTileCols, class TileA, class TileB>
CUATTN_DEVICE void gemm_nt(MmaFragment<T, kWarps, kTileRows, kTileCols>& acc, TileA a, TileB b,
                           int depth) {
  if constexpr (kScores && sizeof(T) == 4) {
    // invariant: small terms of NaN are NaN, so that of the large ones alone none may get lost.
    gemm_nt_terms<Terms::kSmall>(acc, a, b, depth);
    gemm_nt_terms<Terms::kLarge>(acc, a, b, depth);
  } else {
    gemm_nt_terms<Terms::kAll>(acc, a, b, depth);
  }
}

// acc[i][j] += sum over k < TileA::kCols of a[row i][k] * b[k][col j].
template <class T, int kWarps, int kTileRows, int kTileCols, class TileA, class TileB>
CUATTN_DEVICE void gemm_nn(MmaFragment<T, kWarps, kTileRows, kTileCols>& acc, TileA a, TileB b) {
  using Acc = MmaFragment<T, kWarps, kTileRows, kTileCols>;
  using Part = MmaFragment<T, kWarps, kTileRows, 8 * kBlocks>;
  constexpr bool kFromZero = sizeof(T) == 4;
  const int lane = Acc::lane();
#pragma unroll
  for (int j = 0; j < Acc::kCols; j += Part::kCols) {
    Part part;
    part.clear();
#pragma unroll 2
    for (int k = 0; k < TileA::kCols; k += 8) {
      MmaOperand<T, 4, Terms::kAll> left[Part::kRows / 2];
#pragma unroll
      for (int i = 0; i < Part::kRows; ++i) {
        left[i / 2].set(i % 2, a.at(Part::row_of(i), k + lane));
        left[i / 2].set(i % 2 + 2, a.at(Part::row_of(i), k + lane + 4));
      }
      MmaOperand<T, 2, Terms::kAll> right[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int col = Part::group() + (j / 2 + block) * 8;
        right[block].set(0, b.at(k + lane, col));
        right[block].set(1, b.at(k + lane + 4, col));
      }
      if constexpr (kFromZero) {
        mma_blocks(part, 0, left, right);
      } else {
        mma_blocks(acc, j, left, right);
      }
    }
    if constexpr (kFromZero) {
      Part::each([&](int i, int jj) { acc.at(i, j + jj) += part.at(i, jj); });
    }
  }
}

}  // namespace cuattn::tile
