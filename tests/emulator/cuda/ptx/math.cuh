// Emulates kernels_cu/ptx/math.cuh.
#pragma once
#include "base/prelude.cuh"
#include "machine/floats.h"

namespace cuattn::ptx {

inline f32 exp2(f32 x) { return emulator::ex2_approx_ftz(x); }
inline f32 exp(f32 x) { return exp2(x * f32(kLog2E)); }
inline f64 exp(f64 x) { return ::exp(x); }

inline f32 log2(f32 x) { return ::log2f(x); }

inline f32 log(f32 x) { return ::logf(x); }
inline f64 log(f64 x) { return ::log(x); }

inline f32 max(f32 a, f32 b) { return emulator::maximum(a, b); }
inline f64 max(f64 a, f64 b) { return emulator::maximum(a, b); }

// Out of line, where no compiler can fuse it.
[[gnu::noinline]] inline f32 mul(f32 a, f32 b) { return a * b; }
[[gnu::noinline]] inline f64 mul(f64 a, f64 b) { return a * b; }

inline f32 fma(f32 a, f32 b, f32 c) { return ::fmaf(a, b, c); }
inline f64 fma(f64 a, f64 b, f64 c) { return ::fma(a, b, c); }

}  // namespace cuattn::ptx
