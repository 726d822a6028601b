// Emulates kernels_cu/ptx/convert.cuh: cvt and cvt.rn, to nearest even, and NaN to one NaN.
#pragma once
#include "base/dtype.cuh"
#include "machine/floats.h"

namespace cuattn::ptx {

inline f32 widen(f32 x) { return x; }
inline f64 widen(f64 x) { return x; }
inline f32 widen(BFloat16 x) { return emulator::from_bfloat16(x.bits); }
inline f32 widen(Float16 x) { return emulator::from_float16(x.bits); }

inline void narrow(f32 x, f32& y) { y = x; }
inline void narrow(f64 x, f64& y) { y = x; }
inline void narrow(f32 x, Float16& y) { y.bits = emulator::to_float16(x); }
inline void narrow(f32 x, BFloat16& y) { y.bits = emulator::to_bfloat16(x); }

template <class Element>
inline u32 pack(f32 first, f32 second) {
  Element low, high;
  narrow(first, low);
  narrow(second, high);
  return low.bits | static_cast<u32>(high.bits) << 16;
}
template <class Element>
inline void unpack(u32 bits, f32& first, f32& second) {
  first = widen(Element{static_cast<u16>(bits)});
  second = widen(Element{static_cast<u16>(bits >> 16)});
}

}  // namespace cuattn::ptx
