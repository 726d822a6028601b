// The one state: what a row has seen of the keys, (m, l, o). Layer: softmax; architecture-free.
//
//   m  running maximum of the scores                     identity  -inf
//   l  sum of exp(s - m)                                  identity  0
//   o  sum of exp(s - m) * v, kept in a fragment          identity  0
//
// merge is associative and commutative; a lane, a tile, a split of the keys, another device's keys
// are all pushed by the same rule: bring both sides to the larger maximum and add. cuattn/states.py
// is the same algebra on finished rows (out, lse). source: Milakov and Gimelshein 2018.
//
// why natural units: where one key outweighs all others, lse = m + log(l) is that key's score to
// the last bit, and the backward finds exp(s - lse) = 1 exactly, however large the scores. In log2
// units two roundings of lse would stand between them; that costs one multiplication a score.
#pragma once
#include "base/prelude.cuh"
#include "ptx/math.cuh"

namespace cuattn::softmax {

// The maximum to subtract: a row that has seen nothing must not form inf - inf.
template <class T>
CUATTN_DEVICE T shift_of(T m) {
  return m == -infinity<T>() ? T(0) : m;
}

template <class T, int kRows>
struct OnlineSoftmax {
  T m[kRows];
  T l[kRows];  // this lane's share; the lanes of a row merge when the row is finished

  CUATTN_DEVICE OnlineSoftmax() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) m[i] = -infinity<T>(), l[i] = T(0);
  }

  // Merges a tile of scores: leaves the weights exp(s - m) in their place and rescales o.
  template <class Scores, class Results>
  CUATTN_DEVICE void push(Scores& s, Results& o) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T tile_max = s.at(i, 0);
#pragma unroll
      for (int j = 1; j < Scores::kCols; ++j) tile_max = ptx::max(tile_max, s.at(i, j));
      const T m_new = ptx::max(m[i], Scores::row_max(tile_max));
      const T shift = shift_of(m_new);
      const T weight = ptx::exp(m[i] - shift);
      m[i] = m_new;
      T sum = T(0);
#pragma unroll
      for (int j = 0; j < Scores::kCols; ++j) {
        s.at(i, j) = ptx::exp(s.at(i, j) - shift);
        sum += s.at(i, j);
      }
      l[i] = ptx::fma(l[i], weight, sum);
#pragma unroll
      for (int j = 0; j < Results::kCols; ++j) o.at(i, j) *= weight;
    }
  }

  // out = o / l, in place. l = 0, and only that, is a row that saw no key: its out is 0 whatever
  // stands in o. A NaN score has made l NaN and stays visible.
  template <class Scores, class Results>
  CUATTN_DEVICE void finish(Results& o) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      l[i] = Scores::row_sum(l[i]);
      const T inverse = T(1) / l[i];
#pragma unroll
      for (int j = 0; j < Results::kCols; ++j) {
        o.at(i, j) = l[i] == T(0) ? T(0) : o.at(i, j) * inverse;
      }
    }
  }

  // Natural logarithm of the sum of exp(score); -inf for a row that saw no key.
  CUATTN_DEVICE T lse(int i) const { return m[i] + ptx::log(l[i]); }
};

}  // namespace cuattn::softmax
