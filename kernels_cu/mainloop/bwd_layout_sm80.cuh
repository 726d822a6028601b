// What lies where in shared memory in the loop of mainloop/bwd_sm80.cuh. Layer: mainloop.
#pragma once
#include "base/abi.cuh"
#include "tile/fragment_mma.cuh"
#include "tile/swizzled_tile.cuh"

namespace cuattn::mainloop {

// K and V of the CTA's keys; two stages of Q and dO, and of their rows' numbers; P; so many tiles
// of dS; and from end() on what delta (mainloop/delta_sm80.cuh) needs beside.
template <Sm80Config C, int kGradientTiles>
struct BackwardLayout {
  static constexpr int kDims = C.block_d, kStages = 2, kBuffers = kGradientTiles;
  static constexpr int kGroups = C.block_n / C.warp_rows;  // of keys, each with a warp a role

  using OwnTile = tile::SwizzledTile<C.block_n, kDims>;
  using StreamTile = tile::SwizzledTile<C.block_m, kDims>;
  using GradientTile = tile::SwizzledTile<C.block_n, C.block_m>;
  using Scores = tile::MmaFragment<f32, kGroups, C.block_n, C.block_m>;
  static constexpr int kSteps = C.block_m / 16;
  static constexpr int kWeightBytes = C.block_n * C.block_m * 2;
  static constexpr int kRowBytes = C.block_m * 4;  // lse or delta of a query tile
  static constexpr int kBytes = 2 * OwnTile::kBytes + kStages * 2 * StreamTile::kBytes +
                                kStages * 2 * kRowBytes + kWeightBytes +
                                kBuffers * GradientTile::kBytes;

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
  CUATTN_DEVICE u32 end() const { return sdS(kBuffers).address; }
};

}  // namespace cuattn::mainloop
