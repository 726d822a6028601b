// What a lane gives to the tensor cores, and one step of a product with it. Layer: tile.
//
// float64 is multiplied as it is. A float32 is the sum of two tf32 numbers, hi + lo, up to 2^-22 of
// it; of the four products lo lo is below that, so three remain: lo hi + hi lo + hi hi. An
// infinity, and what rounds to one in tf32, makes NaN of every sum it enters: inf - inf is its lo.
// source: Ootomo and Yokota 2022 (error correction of tensor-core products).
#pragma once
#include "ptx/mma.cuh"

namespace cuattn::tile {

enum class Terms { kSmall, kLarge, kAll };  // lo hi and hi lo; hi hi; all three

inline constexpr int kBlocks = 4;  // blocks of 8 columns that are multiplied in turn

// The elements of one operand that a lane holds: 4 of 16 rows by 8, or 2 of 8 by 8 columns.
template <class T, int kCount, Terms kTerms>
struct MmaOperand;

template <int kCount>
struct MmaOperand<f64, kCount, Terms::kAll> {
  f64 data[kCount];

  CUATTN_DEVICE void set(int i, f64 x) { data[i] = x; }
};

// The unit ignores the lower 13 bits of what it is given, so adding half of the last bit that
// counts rounds to nearest.
template <int kCount, Terms kTerms>
struct MmaOperand<f32, kCount, kTerms> {
  u32 hi[kCount], lo[kCount];

  CUATTN_DEVICE void set(int i, f32 x) {
    hi[i] = __builtin_bit_cast(u32, x) + 0x1000u;
    if constexpr (kTerms != Terms::kLarge) {
      // A NaN stays one here, also where the rounding above has wrapped its bits round to a zero.
      lo[i] = __builtin_bit_cast(u32, x - __builtin_bit_cast(f32, hi[i] & 0xffffe000u));
    }
  }
};

// Adds a b to kBlocks neighbouring blocks, the first at column j. Products of one block depend on
// each other, so those of other blocks come between them.
template <Terms kTerms, class Acc>
CUATTN_DEVICE void mma_blocks(Acc& acc, int j,
                              const MmaOperand<f32, 4, kTerms> (&a)[Acc::kRows / 2],
                              const MmaOperand<f32, 2, kTerms> (&b)[kBlocks]) {
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

template <Terms kTerms, class Acc>
CUATTN_DEVICE void mma_blocks(Acc& acc, int j,
                              const MmaOperand<f64, 4, kTerms> (&a)[Acc::kRows / 2],
                              const MmaOperand<f64, 2, kTerms> (&b)[kBlocks]) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int i = 0; i < Acc::kRows; i += 2) {
      const int col = j + 2 * block;
      ptx::mma_f64(acc.at(i, col), acc.at(i, col + 1), acc.at(i + 1, col), acc.at(i + 1, col + 1),
                   a[i / 2].data, b[block].data);
    }
  }
}

}  // namespace cuattn::tile
