// The gradient of the softmax, from what the forward left. Layer: softmax; architecture-free.
//
//   P     = exp(s - lse)                    recomputed, never stored
//   delta = rowsum(dout * out) - dlse       one number a row
//   dS    = P * (dP - delta)                with dP = dout v^T
//
// source: Dao et al. 2022, Algorithm 4; dlse enters because d lse / d s = P.
#pragma once
#include "base/abi.cuh"
#include "base/prelude.cuh"
#include "ptx/math.cuh"
#include "softmax/units.cuh"

namespace cuattn::softmax {

// What a row needs of the forward. A row that saw no key, or lies past the end, gets lse = +inf:
// then P is 0 for every score.
template <class T>
struct RowStatistics {
  T lse;
  T delta;
};

// A row with lse = -inf saw no key: none of its inputs may reach a gradient.
template <class T>
CUATTN_DEVICE bool is_seen(T lse) {
  return lse != -infinity<T>();
}

// delta_of(index) is asked only for a row that is seen.
template <class T, class DeltaOf>
CUATTN_DEVICE RowStatistics<T> row_statistics(const T* lse, DeltaOf delta_of, i64 offset, int row,
                                              int row_end) {
  if (row < row_end && is_seen(lse[offset + row])) {
    return {lse[offset + row], delta_of(offset + row)};
  }
  return {infinity<T>(), T(0)};
}

// The cotangent of lse, of one row.
template <class T>
CUATTN_DEVICE T lse_gradient(const Rows& dlse, int batch_idx, int head_idx, int row) {
  if (dlse.data == nullptr) return T(0);
  const i64 offset =
      batch_idx * dlse.stride_batch + head_idx * dlse.stride_head + row * dlse.stride_seqlen;
  return static_cast<const T*>(dlse.data)[offset];
}

template <class T>
CUATTN_DEVICE T probability(T score, T lse) {
  return ptx::exp(score - lse);
}

// The same of a product that is no finished score yet; lse in log2 units.
CUATTN_DEVICE f32 probability(const Log2Units& units, f32 score, f32 lse) {
  return units.weight(score, lse);
}

// Its natural logarithm, where lse is so large that its rounded product would be far off.
CUATTN_DEVICE f32 log_probability(f32 product, f32 softmax_scale, f32 lse) {
  return ptx::mul(product, softmax_scale) - lse;
}

template <class T>
CUATTN_DEVICE T score_gradient(T p, T dp, T delta) {
  return p * (dp - delta);
}

// dq of one row from its sum dS K. Where the row saw no key, dS is 0, but the sum may be 0 times
// what another row's key holds.
template <class T>
CUATTN_DEVICE T query_gradient(T sum, T softmax_scale, bool is_seen) {
  return is_seen ? sum * softmax_scale : T(0);
}

}  // namespace cuattn::softmax
