// Numbers as the instructions round them. source: PTX ISA, "cvt", "ex2", and IEEE 754.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

namespace emulator {

using Widen = float (*)(std::uint16_t);

inline float from_bfloat16(std::uint16_t bits) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

// The exponent is moved by a product, which is exact for all but infinities and NaNs.
inline float from_float16(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000u) << 16;
  const std::uint32_t rest = static_cast<std::uint32_t>(bits & 0x7fffu) << 13;
  const float moved = std::bit_cast<float>(rest) * 0x1p112f;
  const std::uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<std::uint32_t>(moved) | special | sign);
}

inline constexpr std::uint16_t kNanOf16 = 0x7fff;

inline std::uint16_t to_bfloat16(float x) {
  if (std::isnan(x)) return kNanOf16;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t below = bits & 0xffffu, kept = bits >> 16;
  const bool up = below > 0x8000u || (below == 0x8000u && kept % 2 == 1);
  return static_cast<std::uint16_t>(kept + up);
}

inline std::uint16_t to_float16(float x) {
  if (std::isnan(x)) return kNanOf16;
  const std::uint16_t sign = std::signbit(x) ? 0x8000u : 0u;
  const float size = std::fabs(x);
  if (size >= 65520.0f) return sign | 0x7c00u;  // half way from the largest to what would follow
  // What the last bit is worth: 2^-24 of a subnormal, else 2^-10 of the leading one.
  const int exponent = size < 0x1p-14f ? -24 : std::ilogb(size) - 10;
  const float units = std::nearbyint(std::scalbn(size, -exponent));  // to nearest even
  const float rounded = std::scalbn(units, exponent);
  if (rounded < 0x1p-14f) return sign | static_cast<std::uint16_t>(units);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(rounded);
  return sign | static_cast<std::uint16_t>((bits >> 13) - (112u << 10));
}

// The number beside a NaN of any kind; of two zeros the positive one. source: PTX ISA, "max".
template <class T>
T maximum(T a, T b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}

// Subnormal numbers are zeros, in and out. The instruction is off by up to 2 ulp, this by half.
inline float ex2_approx_ftz(float x) {
  const float y = static_cast<float>(std::exp2(static_cast<double>(x)));
  return y < 0x1p-126f ? 0.0f : y;
}

}  // namespace emulator
