// Who holds which element where tensor cores multiply (mma.m16n8). Layer: tile.
//
//   Warp w owns kTileRows / kWarps rows and all columns of a tile, in blocks of 16 x 8 (where there
//   are more than kWarps warps, warps w, w + kWarps, ... hold the same place in different tiles).
//   In each block lane 4 g + t holds rows g and g + 8 at columns 2 t and 2 t + 1, so the four lanes
//   of a row sit side by side. Same interface as tile/fragment_simt.cuh.
#pragma once
#include "base/prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace cuattn::tile {

template <class T, int kWarpCount, int kTileRows, int kTileCols>
struct MmaFragment {
  using Value = T;
  static constexpr int kWarpRows = kTileRows / kWarpCount;
  static constexpr int kRows = kWarpRows / 8, kCols = kTileCols / 4;
  static constexpr int kLanes = 4;
  static_assert(kTileRows % (16 * kWarpCount) == 0 && kTileCols % 16 == 0);

  T data[kRows][kCols];

  CUATTN_DEVICE static int lane() { return threadIdx.x % kLanes; }
  CUATTN_DEVICE static int group() { return threadIdx.x % kWarpSize / kLanes; }
  // The first row of this warp.
  CUATTN_DEVICE static int warp_row() { return threadIdx.x / kWarpSize % kWarpCount * kWarpRows; }
  CUATTN_DEVICE static int row_of(int i) { return warp_row() + group() + i * 8; }
  CUATTN_DEVICE static int col_of(int j) { return lane() * 2 + j / 2 * 8 + j % 2; }
  CUATTN_DEVICE T& at(int i, int j) { return data[i][j]; }
  CUATTN_DEVICE T at(int i, int j) const { return data[i][j]; }

  template <class F>
  CUATTN_DEVICE static void each(F f) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kCols; ++j) f(i, j);
    }
  }
  CUATTN_DEVICE void clear() {
    each([&](int i, int j) { data[i][j] = 0; });
  }
  CUATTN_DEVICE static T row_max(T x) {
    x = ptx::max(x, ptx::shuffle_xor(x, 2));
    return ptx::max(x, ptx::shuffle_xor(x, 1));
  }
  CUATTN_DEVICE static T row_sum(T x) {
    x += ptx::shuffle_xor(x, 2);
    return x + ptx::shuffle_xor(x, 1);
  }
};

}  // namespace cuattn::tile
