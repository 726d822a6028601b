// What every kernel file may assume of the language. Layer: base; includes nothing.
//
// The kernels use no header of the CUDA toolkit, so a user's machine needs NVRTC and nothing else:
// fixed-width names, limits, the few constants of the machine and the two function markers.
#pragma once

// Device functions are inlined always: a call would spill the fragments that its caller holds.
#define CUATTN_DEVICE __device__ __forceinline__
// The same for functions of values known when compiling (also usable in template arguments).
#define CUATTN_CONSTEXPR __host__ __device__ __forceinline__ constexpr

// Where a member lies, as a constant expression. why two: NVRTC up to 13.0 lacks __builtin_offsetof
// and has its front end's own spelling; a host compiler (tests/test_abi.py) knows only the builtin.
#ifdef __CUDACC_RTC__
#define CUATTN_OFFSETOF(type, member) __INTADDR__(&(static_cast<type*>(nullptr)->member))
#else
#define CUATTN_OFFSETOF(type, member) __builtin_offsetof(type, member)
#endif

namespace cuattn {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;

static_assert(sizeof(i16) == 2 && sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(void*) == 8);

constexpr i32 kWarpSize = 32;
constexpr u32 kFullWarp = 0xffffffffu;  // the lane mask of a whole warp

constexpr f64 kLog2E = 1.4426950408889634;  // exp(x) = exp2(x * kLog2E)

// Infinity as a constant expression, which the bit pattern is and 1 / 0 is not.
template <class T>
CUATTN_CONSTEXPR T infinity();
template <>
CUATTN_CONSTEXPR f32 infinity<f32>() {
  return __builtin_bit_cast(f32, 0x7f800000u);
}
template <>
CUATTN_CONSTEXPR f64 infinity<f64>() {
  return __builtin_bit_cast(f64, 0x7ff0000000000000ull);
}

template <class T>
CUATTN_CONSTEXPR T min(T a, T b) {
  return b < a ? b : a;
}

template <class T>
CUATTN_CONSTEXPR T max(T a, T b) {
  return a < b ? b : a;
}

// The smallest integer not below a / b; a >= 0, b > 0.
template <class T>
CUATTN_CONSTEXPR T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

// For x of at least 1.
CUATTN_CONSTEXPR int floor_to_power_of_two(int x) {
  return x < 2 ? 1 : 2 * floor_to_power_of_two(x / 2);
}

// A or B: the one trait that the kernels need.
template <bool, class A, class B>
struct Select {
  using type = A;
};
template <class A, class B>
struct Select<false, A, B> {
  using type = B;
};
template <bool kCondition, class A, class B>
using select = typename Select<kCondition, A, B>::type;

}  // namespace cuattn
