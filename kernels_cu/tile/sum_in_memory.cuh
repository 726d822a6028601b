// A matrix of float32 sums in global memory to which many CTAs add, in the order in which the lanes
// hold its elements. Layer: tile.
//
// The warps of a CTA share the product of kRows x kDepth by kDepth x kCols: by columns first, then
// by rows, and where both are used up by parts of the sum. A lane's four numbers of a block of
// 16 x 8 lie together and a warp's side by side, so that it adds 512 bytes at a time.
#pragma once
#include "ptx/reduce.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::tile {

// Two neighbours of a row, those before the last column, rounded into one register.
template <class Element>
CUATTN_DEVICE void store_pair(Element* row, i64 stride_col, bool in_vectors, int col, int cols,
                              u32 pair) {
  if (col >= cols) return;
  if (in_vectors) {
    *reinterpret_cast<u32*>(row + col) = pair;
  } else {
    row[col * stride_col].bits = static_cast<u16>(pair);
    if (col + 1 < cols) row[(col + 1) * stride_col].bits = static_cast<u16>(pair >> 16);
  }
}

template <int kRowCount, int kColCount, int kSumDepth, int kWarps>
struct SumInMemory {
  static constexpr int kRows = kRowCount, kCols = kColCount;
  static constexpr int kColWarps = min(kWarps, kCols % 64 == 0 ? 4 : kCols % 32 == 0 ? 2 : 1);
  static constexpr int kRowWarps = min(kRows / 16, kWarps / kColWarps);
  static constexpr int kDepthWarps = kWarps / (kColWarps * kRowWarps);
  static constexpr int kDepth = kSumDepth / kDepthWarps;
  static constexpr int kSize = kRows * kCols;
  static_assert(kColWarps * kRowWarps * kDepthWarps == kWarps && kDepth % 16 == 0);

  // What a warp computes, at most 32 columns at a time.
  static constexpr int kWarpCols = kCols / kColWarps, kParts = kWarpCols == 64 ? 2 : 1;
  static constexpr int kPartRows = kRows / kRowWarps, kPartCols = kWarpCols / kParts;
  using Part = MmaFragment<f32, 1, kPartRows, kPartCols>;
  static constexpr int kBlocksAcross = kPartCols / 8;
  static constexpr int kBlockCount = kPartRows / 16 * kBlocksAcross;  // of 16 x 8

  CUATTN_DEVICE static int warp() { return threadIdx.x / kWarpSize; }
  CUATTN_DEVICE static int row_begin() { return warp() / kColWarps % kRowWarps * kPartRows; }
  CUATTN_DEVICE static int col_begin(int part) {
    return warp() % kColWarps * kWarpCols + part * kPartCols;
  }
  CUATTN_DEVICE static int depth_begin() { return warp() / (kColWarps * kRowWarps) * kDepth; }

  CUATTN_DEVICE static void add(const Part& part, int index, f32* sums) {
    const int place = warp() % (kColWarps * kRowWarps) * kParts + index;
    f32* its = sums + (place * kBlockCount * kWarpSize + threadIdx.x % kWarpSize) * 4;
#pragma unroll
    for (int i = 0; i < Part::kRows; i += 2) {
#pragma unroll
      for (int j = 0; j < Part::kCols; j += 2) {
        const int block = i / 2 * kBlocksAcross + j / 2;
        ptx::add_global(its + block * kWarpSize * 4, part.at(i, j), part.at(i, j + 1),
                        part.at(i + 1, j), part.at(i + 1, j + 1));
      }
    }
  }

  // Where all terms of the sums are in one CTA: rounds them, each finished by finish_of(row), into
  // rows first_row... of one head.
  template <class Element, class FinishOf>
  CUATTN_DEVICE static void store(const Part& part, int index, const GlobalRows<Element>& rows,
                                  int first_row, int row_end, int cols, FinishOf finish_of) {
    static_assert(kDepthWarps == 1, "a warp has a part of each sum");
    const bool in_vectors = rows.in_vectors(cols);
#pragma unroll
    for (int i = 0; i < Part::kRows; ++i) {
      const int row = first_row + row_begin() + Part::row_of(i);
      if (row >= row_end) continue;
      const auto finish = finish_of(row);
      Element* its = &rows.at(row, 0);
#pragma unroll
      for (int j = 0; j < Part::kCols; j += 2) {
        const int col = col_begin(index) + Part::col_of(j);
        store_pair(its, rows.stride_col, in_vectors, col, cols,
                   ptx::pack<Element>(finish(part.at(i, j)), finish(part.at(i, j + 1))));
      }
    }
  }

  // Where the four numbers at 4 * index belong: (row, col), (row, col + 1), and eight rows below.
  CUATTN_DEVICE static void place_of(int index, int& row, int& col) {
    const int lane = index % kWarpSize, block = index / kWarpSize % kBlockCount;
    const int place = index / kWarpSize / kBlockCount;
    const int warp = place / kParts;
    row = warp / kColWarps * kPartRows + block / kBlocksAcross * 16 + lane / 4;
    col = warp % kColWarps * kWarpCols + place % kParts * kPartCols + block % kBlocksAcross * 8 +
          lane % 4 * 2;
  }
};

}  // namespace cuattn::tile
