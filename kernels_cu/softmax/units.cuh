// What scores are measured in when they are pushed, and how one becomes a weight.
// Layer: softmax; architecture-free.
//
//   NaturalUnits   finished scores: exp(s - m). Costs two multiplications a score.
//   Log2Units      products as they come: exp2(s * scale - m * scale), one fused multiply-add. The
//                  second product is rounded, by 2^-24 of itself; where that is much, the
//                  differences are taken first.
//
// lse is that of finished scores in both: where one key outweighs all others it is that key's score
// to the last bit, and the backward finds exp(s - lse) = 1 exactly, however large the scores.
#pragma once
#include "base/prelude.cuh"
#include "ptx/math.cuh"

namespace cuattn::softmax {

template <class T>
struct NaturalUnits {
  using Value = T;
  static constexpr bool kLazy = false;

  // What to subtract: a row that has seen nothing must not form inf - inf.
  CUATTN_DEVICE T shift_of(T m) const { return m == -infinity<T>() ? T(0) : m; }
  CUATTN_DEVICE T weight(T score, T shift) const { return ptx::exp(score - shift); }
  // What l and o are multiplied with when the maximum rises.
  CUATTN_DEVICE T rescale(T m, T m_new) const { return weight(m, shift_of(m_new)); }
  CUATTN_DEVICE T lse(T m, T l) const { return m + ptx::log(l); }
};

struct Log2Units {
  using Value = f32;
  static constexpr bool kLazy = true;
  static constexpr f32 kSlack = 8.0f;  // weights of up to 2^8 lose nothing: all is relative
  // Where a rounded shift may be off by 1, and where a rounded lse is off by a quarter of what
  // float16 resolves.
  static constexpr f32 kLargeShift = 16777216.0f, kLargeLse = 512.0f;

  f32 scale;  // of a product, or of what `bring` makes of it; above 0

  // A softmax_scale of 0 is for finished scores.
  CUATTN_DEVICE explicit Log2Units(f64 softmax_scale)
      : scale(softmax_scale > 0 ? f32(softmax_scale) * f32(kLog2E) : f32(kLog2E)) {}

  // Multiplies products by a softmax_scale that is not above 0: under such a one a maximum is none.
  template <class Scores>
  CUATTN_DEVICE static void bring(Scores& s, f64 softmax_scale) {
    if (softmax_scale > 0) return;
    Scores::each([&](int i, int j) { s.at(i, j) = ptx::mul(s.at(i, j), f32(softmax_scale)); });
  }

  // why mul: two shifts of one maximum differ by nothing, and `rescale` then is 1.
  CUATTN_DEVICE static f32 base_of(f32 m) { return m == -infinity<f32>() ? 0.0f : m; }
  CUATTN_DEVICE f32 shift_of(f32 m) const { return ptx::mul(base_of(m), scale); }
  CUATTN_DEVICE f32 weight(f32 score, f32 shift) const {
    return ptx::exp2(ptx::fma(score, scale, -shift));
  }
  CUATTN_DEVICE bool is_large(f32 m) const { return ::fabsf(shift_of(m)) >= kLargeShift; }
  CUATTN_DEVICE f32 rescale(f32 m, f32 m_new) const {
    return m == -infinity<f32>() ? 0.0f : ptx::exp2(shift_of(m) - shift_of(m_new));
  }
  // Whether scores are so little above m, if at all, that it serves on. A NaN is for nobody to
  // judge.
  CUATTN_DEVICE bool serves(f32 m, f32 scores) const { return (scores - m) * scale <= kSlack; }
  // Weights, and so l, that were taken with a shift are off by what that was rounded by; weights of
  // differences are not. why the scale again: kept with the other, it would take a register.
  CUATTN_DEVICE f32 lse(f32 m, f32 l, bool of_differences, f64 softmax_scale) const {
    const f32 base = base_of(m);
    const f32 score = softmax_scale > 0 ? ptx::mul(base, f32(softmax_scale)) : base;
    const f32 off = of_differences ? 0.0f : ptx::fma(base, scale, -shift_of(m));
    return ptx::fma(ptx::log2(l) - off, f32(1 / kLog2E), score);
  }
};

}  // namespace cuattn::softmax
