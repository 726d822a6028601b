// The stages between the product q k^T and the softmax, in their fixed order: scale, then mask.
// Layer: softmax; architecture-free.
//
// A fragment knows its place only as (row, column) of the tile; who is query and who is key, the
// caller's `visible` says, because the backward over keys holds the transpose.
#pragma once
#include "base/prelude.cuh"
#include "softmax/schedule.cuh"

namespace cuattn::softmax {

template <class Scores, class Visible>
CUATTN_DEVICE void finish_scores(Scores& s, typename Scores::Value scale, TileKind kind,
                                 Visible visible) {
  using T = typename Scores::Value;
  Scores::each([&](int i, int j) { s.at(i, j) *= scale; });
  if (kind == TileKind::kPartial) {
    Scores::each([&](int i, int j) {
      if (!visible(Scores::row_of(i), Scores::col_of(j))) s.at(i, j) = -infinity<T>();
    });
  }
}

}  // namespace cuattn::softmax
