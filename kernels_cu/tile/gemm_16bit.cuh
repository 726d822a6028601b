// Products of 16-bit operands on tensor cores, sums in float32. Layer: tile.
//
// A sum over head dims reads both operands from shared memory, rows by rows (nt). A sum over
// positions has its left operand in registers, where the product before has left it: the fragment
// of scores, rounded, is the operand of the next product as it lies (nn).
#pragma once
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/swizzled_tile.cuh"

namespace cuattn::tile {

// One step of 16 of a left operand: four registers for every 16 rows.
template <int kRowBlocks>
struct LeftOperand {
  u32 at[kRowBlocks][4];
};

// Adds a b for 16 columns: of b the first two registers are of eight columns, the others of the
// next.
template <class Element, class Acc>
CUATTN_DEVICE void multiply_add(Acc& acc, const LeftOperand<Acc::kRows / 2>& a, int col,
                                const u32 (&b)[4]) {
  const int j = col / 4;
#pragma unroll
  for (int i = 0; i < Acc::kRows; i += 2) {
    ptx::mma_16bit<Element>(acc.at(i, j), acc.at(i, j + 1), acc.at(i + 1, j), acc.at(i + 1, j + 1),
                            a.at[i / 2], b[0], b[1]);
    ptx::mma_16bit<Element>(acc.at(i, j + 2), acc.at(i, j + 3), acc.at(i + 1, j + 2),
                            acc.at(i + 1, j + 3), a.at[i / 2], b[2], b[3]);
  }
}

// acc[i][j] += a[row i][step] * b[col j][step], summed over the step's 16 columns of a and b.
template <class Element, class Acc, class Tile>
CUATTN_DEVICE void gemm_nt_step(Acc& acc, const LeftOperand<Acc::kRows / 2>& a,
                                AcrossBlocks<Tile> b, int step) {
#pragma unroll
  for (int col = 0; col < Acc::kCols * 4; col += 16) {
    u32 right[4];
    b.read(right, col, step);
    multiply_add<Element>(acc, a, col, right);
  }
}

// One step of rows from shared memory.
template <int kRowBlocks, class Tile>
CUATTN_DEVICE void read_left(LeftOperand<kRowBlocks>& left, DownBlocks<Tile> a, int step) {
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) a.read(left.at[i], i * 16, step);
}

// acc[i][j] += sum over k < kDepth of a[row i][k] * b[col j][k].
template <class Element, int kDepth, class Acc, class TileA, class TileB>
CUATTN_DEVICE void gemm_nt(Acc& acc, DownBlocks<TileA> a, AcrossBlocks<TileB> b) {
#pragma unroll
  for (int step = 0; step < kDepth; step += 16) {
    LeftOperand<Acc::kRows / 2> left;
    read_left(left, a, step);
    gemm_nt_step<Element>(acc, left, b, step);
  }
}

// acc[i][j] += a[row i][step] * b[step][col j], summed over the step's 16 rows of b.
template <class Element, class Acc, class Tile>
CUATTN_DEVICE void gemm_nn_step(Acc& acc, const LeftOperand<Acc::kRows / 2>& a, DownBlocks<Tile> b,
                                int step) {
#pragma unroll
  for (int col = 0; col < Acc::kCols * 4; col += 16) {
    u32 right[4];
    b.read_transposed(right, step, col);
    multiply_add<Element>(acc, a, col, right);
  }
}

// acc[i][j] += sum over k < kDepth of a[k][row i] * b[k][col j]: the left operand lies transposed.
template <class Element, int kDepth, class Acc, class TileA, class TileB>
CUATTN_DEVICE void gemm_tn(Acc& acc, AcrossBlocks<TileA> a, DownBlocks<TileB> b) {
#pragma unroll
  for (int step = 0; step < kDepth; step += 16) {
    LeftOperand<Acc::kRows / 2> left;
#pragma unroll
    for (int i = 0; i < Acc::kRows / 2; ++i) a.read_transposed(left.at[i], step, i * 16);
    gemm_nn_step<Element>(acc, left, b, step);
  }
}

// Columns step ... step + 15 of a fragment, rounded, as the left operand of a product.
template <class Element, class Scores>
CUATTN_DEVICE LeftOperand<Scores::kRows / 2> rounded(const Scores& s, int step) {
  LeftOperand<Scores::kRows / 2> left;
  const int j = step / 4;
#pragma unroll
  for (int i = 0; i < Scores::kRows; i += 2) {
    left.at[i / 2][0] = ptx::pack<Element>(s.at(i, j), s.at(i, j + 1));
    left.at[i / 2][1] = ptx::pack<Element>(s.at(i + 1, j), s.at(i + 1, j + 1));
    left.at[i / 2][2] = ptx::pack<Element>(s.at(i, j + 2), s.at(i, j + 3));
    left.at[i / 2][3] = ptx::pack<Element>(s.at(i + 1, j + 2), s.at(i + 1, j + 3));
  }
  return left;
}

}  // namespace cuattn::tile
