// The product of two rows in global memory, by some lanes of a warp. Layer: tile.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::tile {

// A lane's share, kSize elements at a time and kTogether of these under way.
template <int kLanes, int kTogether, int kSize, class Value, class Element, class Round>
CUATTN_DEVICE Value row_dot_share(const GlobalRows<const Element>& a,
                                  const GlobalRows<const Element>& b, int row, int cols,
                                  Round round) {
  using Elements = Vector<Element, kSize>;
  Value sum = Value(0);
#pragma unroll kTogether
  for (int col = threadIdx.x % kLanes * kSize; col < cols; col += kLanes * kSize) {
    const Elements its_a = *reinterpret_cast<const Elements*>(&a.at(row, col));
    const Elements its_b = *reinterpret_cast<const Elements*>(&b.at(row, col));
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      const Value x = round(Value(ptx::widen(its_b.at[e])), col + e);
      sum = ptx::fma(Value(ptx::widen(its_a.at[e])), x, sum);
    }
  }
  return sum;
}

// The sum of a[row] * round(b[row]) over the columns, in every one of kLanes neighbouring lanes;
// 0 where the row is not inside. All lanes of a warp come, for they meet in shuffles.
template <int kLanes, int kTogether, class Value, class Element, class Round>
CUATTN_DEVICE Value row_dot(const GlobalRows<const Element>& a, const GlobalRows<const Element>& b,
                            int row, int cols, bool inside, Round round) {
  using Rows = GlobalRows<const Element>;
  Value sum = Value(0);
  if (inside) {
    sum = a.in_vectors(cols) && b.in_vectors(cols)
              ? row_dot_share<kLanes, kTogether, Rows::kVector, Value>(a, b, row, cols, round)
              : row_dot_share<kLanes, 1, 1, Value>(a, b, row, cols, round);
  }
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask /= 2) sum += ptx::shuffle_xor(sum, mask);
  return sum;
}

}  // namespace cuattn::tile
