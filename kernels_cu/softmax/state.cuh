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
// m need not be the maximum itself, any number near it gives the same result: in lazy units it
// follows only when weights would grow beyond 2^8, and o is seldom rescaled.
#pragma once
#include "base/prelude.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "softmax/units.cuh"

namespace cuattn::softmax {

template <class Units, int kRows>
struct OnlineSoftmax {
  using T = typename Units::Value;
  Units units;
  T m[kRows];
  T l[kRows];             // this lane's share; the lanes of a row merge when the row is finished
  bool is_large = false;  // of lazy units: whether a shift of this warp is

  CUATTN_DEVICE explicit OnlineSoftmax(Units u) : units(u) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) m[i] = -infinity<T>(), l[i] = T(0);
  }

  // Raises m to what a tile of scores asks for, and brings l and o to it.
  template <class Scores, class Results>
  CUATTN_DEVICE void raise(const Scores& s, Results& o) {
    T tile_max[kRows];  // of this lane
    bool serves = Units::kLazy;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      tile_max[i] = s.at(i, 0);
#pragma unroll
      for (int j = 1; j < Scores::kCols; ++j) tile_max[i] = ptx::max(tile_max[i], s.at(i, j));
      if constexpr (Units::kLazy) serves &= units.serves(m[i], tile_max[i]);
    }
    // Where m serves every lane, none needs to know of the others.
    if constexpr (Units::kLazy) {
      if (!ptx::any_of_warp(!serves)) return;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const T m_new = ptx::max(m[i], Scores::row_max(tile_max[i]));
      if constexpr (Units::kLazy) is_large |= units.is_large(m_new);
      const T weight = units.rescale(m[i], m_new);
      m[i] = m_new;
      l[i] *= weight;
#pragma unroll
      for (int j = 0; j < Results::kCols; ++j) o.at(i, j) *= weight;
    }
    if constexpr (Units::kLazy) is_large = ptx::any_of_warp(is_large);
  }

  // What weights of a tile are taken with: shifts, or nothing where the tile holds differences.
  struct Shifts {
    Units units;
    T of[kRows];
  };
  template <class Scores>
  CUATTN_DEVICE Shifts shifts(Scores& s) const {
    Shifts its{units, {}};
#pragma unroll
    for (int i = 0; i < kRows; ++i) its.of[i] = units.shift_of(m[i]);
    if constexpr (Units::kLazy) {
      if (is_large) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const T base = units.base_of(m[i]);
#pragma unroll
          for (int j = 0; j < Scores::kCols; ++j) s.at(i, j) = (s.at(i, j) - base) * units.scale;
          its.of[i] = T(0);
        }
        its.units.scale = T(1);
      }
    }
    return its;
  }

  // Leaves the weights exp(s - m) in the place of the scores of columns kBegin to kEnd.
  template <int kBegin, int kEnd, class Scores>
  CUATTN_DEVICE void weigh(Scores& s, const Shifts& its) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      T sum = T(0);
#pragma unroll
      for (int j = kBegin; j < kEnd; ++j) {
        s.at(i, j) = its.units.weight(s.at(i, j), its.of[i]);
        sum += s.at(i, j);
      }
      l[i] += sum;
    }
  }

  // Merges a tile of scores: weights in their place, o ready to take what they weigh.
  template <class Scores, class Results>
  CUATTN_DEVICE void push(Scores& s, Results& o) {
    raise(s, o);
    weigh<0, Scores::kCols>(s, shifts(s));
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
  CUATTN_DEVICE T lse(int i) const { return units.lse(m[i], l[i]); }
  // The same of scores that were pushed as products.
  CUATTN_DEVICE T lse(int i, f64 softmax_scale) const {
    return units.lse(m[i], l[i], is_large, softmax_scale);
  }
};

}  // namespace cuattn::softmax
