// Widening to the accumulator and rounding back, one function per pair. Layer: ptx.
//
// source: PTX ISA, "Data Movement and Conversion Instructions: cvt". bfloat16 is done on the bits,
// because cvt.rn.bf16.f32 needs sm_80 and this layer serves sm_75 too; both round to nearest even.
#pragma once
#include "base/dtype.cuh"

namespace cuattn::ptx {

CUATTN_DEVICE f32 widen(f32 x) { return x; }
CUATTN_DEVICE f64 widen(f64 x) { return x; }
CUATTN_DEVICE f32 widen(BFloat16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
CUATTN_DEVICE f32 widen(Float16 x) {
  f32 y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

CUATTN_DEVICE void narrow(f32 x, f32& y) { y = x; }
CUATTN_DEVICE void narrow(f64 x, f64& y) { y = x; }
CUATTN_DEVICE void narrow(f32 x, Float16& y) {
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}
CUATTN_DEVICE void narrow(f32 x, BFloat16& y) {
  const u32 bits = __float_as_uint(x);
  // why: adding the rounding constant to a NaN could carry into infinity, so NaN is set apart.
  const u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  y.bits = static_cast<u16>(x != x ? 0x7fffu : rounded >> 16);
}

// Two numbers rounded into one register, the first one below; needs sm_80.
template <class Element>
CUATTN_DEVICE u32 pack(f32 first, f32 second);
template <>
CUATTN_DEVICE u32 pack<Float16>(f32 first, f32 second) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
template <>
CUATTN_DEVICE u32 pack<BFloat16>(f32 first, f32 second) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
template <class Element>
CUATTN_DEVICE void unpack(u32 bits, f32& first, f32& second) {
  first = widen(Element{static_cast<u16>(bits)});
  second = widen(Element{static_cast<u16>(bits >> 16)});
}

}  // namespace cuattn::ptx
