// Exponential and logarithm, by accumulator type, and how a product is rounded. Layer: ptx.
//
// source: PTX ISA, "Floating Point Instructions: ex2", accurate to 2 ulp in float32; float64 has no
// such instruction, there the compiler's own functions serve.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

// why ftz: a weight below 2^-126 beside one of 1 is nothing; keeping it costs three instructions.
CUATTN_DEVICE f32 exp2(f32 x) {
  f32 y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
CUATTN_DEVICE f32 exp(f32 x) { return exp2(x * f32(kLog2E)); }
CUATTN_DEVICE f64 exp(f64 x) { return ::exp(x); }

CUATTN_DEVICE f32 log2(f32 x) { return ::log2f(x); }

CUATTN_DEVICE f32 log(f32 x) { return ::logf(x); }
CUATTN_DEVICE f64 log(f64 x) { return ::log(x); }

// The number when the other operand is NaN: a NaN score must not hide in the maximum's place.
CUATTN_DEVICE f32 max(f32 a, f32 b) { return ::fmaxf(a, b); }
CUATTN_DEVICE f64 max(f64 a, f64 b) { return ::fmax(a, b); }

// Rounded by itself, never within a fused multiply-add: the same number wherever it is formed.
CUATTN_DEVICE f32 mul(f32 a, f32 b) { return ::__fmul_rn(a, b); }
CUATTN_DEVICE f64 mul(f64 a, f64 b) { return ::__dmul_rn(a, b); }

CUATTN_DEVICE f32 fma(f32 a, f32 b, f32 c) { return ::fmaf(a, b, c); }
CUATTN_DEVICE f64 fma(f64 a, f64 b, f64 c) { return ::fma(a, b, c); }

}  // namespace cuattn::ptx
