// CUDA C++ as a host compiler reads it: included before a kernel's generated unit.
//
// With cuda/ptx, which stands before kernels_cu/ptx on the include path, this is all that differs
// between a kernel on a GPU and here; kernels_cu is compiled as it is.
#pragma once
#include <cmath>
#include <cstdio>

#define __host__
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Always after `extern` (tests/test_layers.py): machine/shared_memory.cpp defines the array.
#define __shared__
// As on a GPU of compute capability 9.0.
#define __CUDA_ARCH__ 900

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
