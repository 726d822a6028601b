// Element types: how a dtype is stored in memory and what it accumulates in. Layer: base.
//
// 16-bit floats are opaque bit patterns here; ptx/convert.cuh widens and narrows them. Scores, the
// running state, gradients and every shared tile of the plain loops hold the accumulator type.
#pragma once
#include "base/abi.cuh"
#include "base/prelude.cuh"

namespace cuattn {

struct Float16 {
  u16 bits;
};
struct BFloat16 {
  u16 bits;
};

template <DType kDType>
struct Element;
template <>
struct Element<DType::kFloat16> {
  using Storage = Float16;
  using Accumulator = f32;
};
template <>
struct Element<DType::kBFloat16> {
  using Storage = BFloat16;
  using Accumulator = f32;
};
template <>
struct Element<DType::kFloat32> {
  using Storage = f32;
  using Accumulator = f32;
};
template <>
struct Element<DType::kFloat64> {
  using Storage = f64;
  using Accumulator = f64;
};

template <DType kDType>
using Storage = typename Element<kDType>::Storage;
template <DType kDType>
using Accumulator = typename Element<kDType>::Accumulator;

}  // namespace cuattn
