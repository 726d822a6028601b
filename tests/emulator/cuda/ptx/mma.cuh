// Emulates kernels_cu/ptx/mma.cuh: one warp together, on machine/tensor_core.h.
#pragma once
#include "base/dtype.cuh"
#include "machine/tensor_core.h"

namespace cuattn::ptx {

using emulator::Where;

inline void mma_tf32(f32& d0, f32& d1, f32& d2, f32& d3, const u32 (&a)[4], const u32 (&b)[2],
                     Where where = Where::current()) {
  const auto lane = emulator::together(
      emulator::MmaTf32{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d0, d1, d2, d3}}, where);
  d0 = lane.d[0], d1 = lane.d[1], d2 = lane.d[2], d3 = lane.d[3];
}

inline void mma_f64(f64& d0, f64& d1, f64& d2, f64& d3, const f64 (&a)[4], const f64 (&b)[2],
                    Where where = Where::current()) {
  const auto lane = emulator::together(
      emulator::MmaF64{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, {d0, d1, d2, d3}}, where);
  d0 = lane.d[0], d1 = lane.d[1], d2 = lane.d[2], d3 = lane.d[3];
}

template <class Element>
inline constexpr emulator::Widen kWiden;
template <>
inline constexpr emulator::Widen kWiden<Float16> = emulator::from_float16;
template <>
inline constexpr emulator::Widen kWiden<BFloat16> = emulator::from_bfloat16;

template <class Element>
inline void mma_16bit(f32& d0, f32& d1, f32& d2, f32& d3, const u32 (&a)[4], u32 b0, u32 b1,
                      Where where = Where::current()) {
  const auto lane = emulator::together(
      emulator::Mma16Bit<kWiden<Element>>{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d0, d1, d2, d3}},
      where);
  d0 = lane.d[0], d1 = lane.d[1], d2 = lane.d[2], d3 = lane.d[3];
}

}  // namespace cuattn::ptx
