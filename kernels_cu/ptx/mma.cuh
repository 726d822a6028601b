// Products on tensor cores, one warp together. Layer: ptx.
#pragma once
#include "base/dtype.cuh"
#include "base/prelude.cuh"

namespace cuattn::ptx {

// d += a b for a of 16 x 8, b of 8 x 8, in tf32 (the upper 19 bits of each operand count), float32
// sums. With g = lane / 4 and t = lane % 4, a lane holds a[g][t], a[g + 8][t], a[g][t + 4],
// a[g + 8][t + 4]; b[t][g], b[t + 4][g]; d[g][2t], d[g][2t + 1], d[g + 8][2t], d[g + 8][2t + 1].
// source: PTX ISA, "Matrix Fragments for mma.m16n8k8"; needs sm_80.
CUATTN_DEVICE void mma_tf32(f32& d0, f32& d1, f32& d2, f32& d3, const u32 (&a)[4],
                            const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a b of the same shapes in float64, each product and sum rounded as by fma. Who holds what is
// as above. Before sm_90 only tiles of 8 x 4 and 4 x 8 exist: four make one.
// source: PTX ISA, "Matrix Fragments for mma.m16n8k8" and "mma.m8n8k4" with .f64; needs sm_80.
CUATTN_DEVICE void mma_f64(f64& d0, f64& d1, f64& d2, f64& d3, const f64 (&a)[4],
                           const f64 (&b)[2]) {
#if __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+d"(d0), "+d"(d1), "+d"(d2), "+d"(d3)
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#else
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(d0), "+d"(d1)
        : "d"(a[2 * k]), "d"(b[k]));
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1}, {%2}, {%3}, {%0,%1};"
        : "+d"(d2), "+d"(d3)
        : "d"(a[2 * k + 1]), "d"(b[k]));
  }
#endif
}

// d += a b for a of 16 x 16, b of 16 x 8, of 16-bit elements, in float32. A register holds two
// elements, the one of the lower index below. With g = lane / 4 and t = lane % 4, a lane holds
// a[g][2t..], a[g + 8][2t..], a[g][2t + 8..], a[g + 8][2t + 8..]; b[2t..][g], b[2t + 8..][g]; d as
// above. source: PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"; needs
// sm_80.
template <class Element>
CUATTN_DEVICE void mma_16bit(f32& d0, f32& d1, f32& d2, f32& d3, const u32 (&a)[4], u32 b0, u32 b1);
template <>
CUATTN_DEVICE void mma_16bit<Float16>(f32& d0, f32& d1, f32& d2, f32& d3, const u32 (&a)[4], u32 b0,
                                      u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
CUATTN_DEVICE void mma_16bit<BFloat16>(f32& d0, f32& d1, f32& d2, f32& d3, const u32 (&a)[4],
                                       u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace cuattn::ptx
