// Products of shared float32 tiles on tensor cores, to float32 accuracy. Layer: tile.
//
// A float32 is the sum of two tf32 numbers, hi + lo, up to 2^-22 of it; of the four products
// lo lo is below that, so three remain: lo hi + hi lo + hi hi. Tensor cores round their sums
// towards zero, so a large sum must be short. A product over positions starts from zero in every
// tile and joins the result by an ordinary addition. Scores, which are exponentiated, take all
// small terms before the first large one; families.py keeps them to one chunk of head dims. An
// infinity, and what rounds to one in tf32, makes NaN of every sum it enters: inf - inf is its lo.
// source: Ootomo and Yokota 2022 (error correction of tensor-core products).
#pragma once
#include "ptx/mma.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::tile {

enum class Terms { kSmall, kLarge, kAll };  // lo hi and hi lo; hi hi; all three

// Both halves of the kCount elements that a lane holds of one operand. The unit ignores the lower
// 13 bits of what it is given, so adding half of the last bit that counts rounds to nearest.
template <Terms kTerms, int kCount>
struct SplitTf32 {
  u32 hi[kCount], lo[kCount];

  CUATTN_DEVICE void set(int i, f32 x) {
    hi[i] = __float_as_uint(x) + 0x1000u;
    if constexpr (kTerms != Terms::kLarge) {
      // A NaN stays one here, also where the rounding above has wrapped its bits round to a zero.
      lo[i] = __float_as_uint(x - __uint_as_float(hi[i] & 0xffffe000u));
    }
  }
};

inline constexpr int kBlocks = 4;  // blocks of 8 columns whose right operands are read together

// Adds products for kBlocks neighbouring blocks, the first at column j. Those of one block depend
// on each other, so they are issued as far apart as the blocks allow.
template <Terms kTerms, class Acc>
CUATTN_DEVICE void mma_tf32x3(Acc& acc, int j, const SplitTf32<kTerms, 4> (&a)[Acc::kRows / 2],
                              const SplitTf32<kTerms, 2> (&b)[kBlocks]) {
  constexpr int kFirst = kTerms == Terms::kLarge ? 2 : 0, kEnd = kTerms == Terms::kSmall ? 2 : 3;
#pragma unroll
  for (int term = kFirst; term < kEnd; ++term) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < Acc::kRows; i += 2) {
        const int col = j + 2 * block;
        ptx::mma_tf32(acc.at(i, col), acc.at(i, col + 1), acc.at(i + 1, col),
                      acc.at(i + 1, col + 1), term == 0 ? a[i / 2].lo : a[i / 2].hi,
                      term == 1 ? b[block].lo : b[block].hi);
      }
    }
  }
}

// Columns k ... k + 7 of the rows that a lane holds. A sum may be taken in any order: step t of the
// unit stands for column 2 t, step t + 4 for column 2 t + 1, of both operands, so that a lane reads
// the two side by side.
template <class Acc, Terms kTerms, class TileA>
CUATTN_DEVICE void read_left(SplitTf32<kTerms, 4> (&left)[Acc::kRows / 2], TileA a, int k) {
#pragma unroll
  for (int i = 0; i < Acc::kRows; ++i) {
    const Pair<f32> pair = a.pair(Acc::row_of(i), k + 2 * Acc::lane());
    left[i / 2].set(i % 2, pair.at[0]);
    left[i / 2].set(i % 2 + 2, pair.at[1]);
  }
}

template <Terms kTerms, class Acc, class TileA, class TileB>
CUATTN_DEVICE void gemm_nt_terms(Acc& acc, TileA a, TileB b, int depth) {
#pragma unroll 1
  for (int k = 0; k < depth; k += 8) {
    SplitTf32<kTerms, 4> left[Acc::kRows / 2];
    read_left<Acc>(left, a, k);
#pragma unroll
    for (int j = 0; j < Acc::kCols; j += 2 * kBlocks) {
      SplitTf32<kTerms, 2> right[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int col = Acc::group() + (j / 2 + block) * 8;
        const Pair<f32> pair = b.pair(col, k + 2 * Acc::lane());
        right[block].set(0, pair.at[0]);
        right[block].set(1, pair.at[1]);
      }
      mma_tf32x3(acc, j, left, right);
    }
  }
}

// acc[i][j] += sum over k < depth of a[row i][k] * b[col j][k]; columns past `depth`, up to the
// next multiple of eight, must hold zeros. kScores: the sums will be exponentiated.
template <bool kScores, int kWarps, int kTileRows, int kTileCols, class TileA, class TileB>
CUATTN_DEVICE void gemm_nt(MmaFragment<kWarps, kTileRows, kTileCols>& acc, TileA a, TileB b,
                           int depth) {
  if constexpr (kScores) {
    // invariant: small terms of NaN are NaN, so that of the large ones alone none may get lost.
    gemm_nt_terms<Terms::kSmall>(acc, a, b, depth);
    gemm_nt_terms<Terms::kLarge>(acc, a, b, depth);
  } else {
    gemm_nt_terms<Terms::kAll>(acc, a, b, depth);
  }
}

// acc[i][j] += sum over k < TileA::kCols of a[row i][k] * b[k][col j].
template <int kWarps, int kTileRows, int kTileCols, class TileA, class TileB>
CUATTN_DEVICE void gemm_nn(MmaFragment<kWarps, kTileRows, kTileCols>& acc, TileA a, TileB b) {
  using Acc = MmaFragment<kWarps, kTileRows, kTileCols>;
  using Part = MmaFragment<kWarps, kTileRows, 8 * kBlocks>;
#pragma unroll
  for (int j = 0; j < Acc::kCols; j += Part::kCols) {
    Part part;
    part.clear();
#pragma unroll 1
    for (int k = 0; k < TileA::kCols; k += 8) {
      SplitTf32<Terms::kAll, 4> left[Part::kRows / 2];
      read_left<Part>(left, a, k);
      SplitTf32<Terms::kAll, 2> right[kBlocks];
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int col = Part::group() + (j / 2 + block) * 8;
#pragma unroll
        for (int e = 0; e < 2; ++e) right[block].set(e, b.at(k + 2 * Part::lane() + e, col));
      }
      mma_tf32x3(part, 0, left, right);
    }
    Part::each([&](int i, int jj) { acc.at(i, j + jj) += part.at(i, jj); });
  }
}

}  // namespace cuattn::tile
