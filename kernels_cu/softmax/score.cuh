// The stages between the product q k^T and the softmax, in their fixed order: scale, then mask.
// Layer: softmax; architecture-free.
//
// A fragment knows its place only as (row, column) of the tile; which columns a row sees, the
// caller's `span_of` says, because the backward over keys holds the transpose.
#pragma once
#include "base/prelude.cuh"
#include "ptx/math.cuh"
#include "softmax/schedule.cuh"

namespace cuattn::softmax {

// The element rule: outside of a PARTIAL tile everything is seen.
template <class Scores, class SpanOf>
CUATTN_DEVICE void mask_scores(Scores& s, TileKind kind, SpanOf span_of) {
  using T = typename Scores::Value;
  if (kind == TileKind::kFull) return;
#pragma unroll
  for (int i = 0; i < Scores::kRows; ++i) {
    const Range span = span_of(Scores::row_of(i));
#pragma unroll
    for (int j = 0; j < Scores::kCols; ++j) {
      const int col = Scores::col_of(j);
      if (col < span.begin || col >= span.end) s.at(i, j) = -infinity<T>();
    }
  }
}

template <class Scores>
CUATTN_DEVICE void scale_scores(Scores& s, typename Scores::Value scale) {
  Scores::each([&](int i, int j) { s.at(i, j) = ptx::mul(s.at(i, j), scale); });
}

template <class Scores, class SpanOf>
CUATTN_DEVICE void finish_scores(Scores& s, typename Scores::Value scale, TileKind kind,
                                 SpanOf span_of) {
  scale_scores(s, scale);
  mask_scores(s, kind, span_of);
}

}  // namespace cuattn::softmax
