// Shared memory by its 32-bit addresses: blocks for tensor cores, and plain accesses. Layer: ptx.
#pragma once
#include "base/prelude.cuh"

namespace cuattn::ptx {

CUATTN_DEVICE u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Four matrices of 8 x 8 elements of 16 bits. Lane l gives the address of row l % 8 of matrix
// l / 8; lane 4 g + t receives of each matrix elements 2 t and 2 t + 1 of row g, as one register.
// source: PTX ISA, "Warp-level matrix load instruction: ldmatrix"; needs sm_75.
CUATTN_DEVICE void load_matrix(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// The same of the transposes: elements g of rows 2 t and 2 t + 1.
CUATTN_DEVICE void load_matrix_transposed(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// source: PTX ISA, "Data Movement and Conversion Instructions: ld, st".
CUATTN_DEVICE void store_shared(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
CUATTN_DEVICE void store_shared(u32 address, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x[0]), "r"(x[1]),
               "r"(x[2]), "r"(x[3])
               : "memory");
}
CUATTN_DEVICE void store_shared(u32 address, f32 x) { store_shared(address, __float_as_uint(x)); }
CUATTN_DEVICE f32 load_shared(u32 address) {
  f32 x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
CUATTN_DEVICE void load_shared(f32& x, f32& y, u32 address) {
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(address) : "memory");
}
CUATTN_DEVICE void load_shared(u32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address)
               : "memory");
}

}  // namespace cuattn::ptx
