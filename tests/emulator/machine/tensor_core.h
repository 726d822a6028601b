// Products of tensor cores: d += a b of a warp's fragments. source: PTX ISA, "Matrix Fragments for
// mma.m16n8k8" and "mma.m16n8k16 with floating point type"; kernels_cu/ptx/mma.cuh says who holds
// what.
//
// The ISA leaves open how float32 sums round. Here a product adds its terms in float64 and rounds
// that once more, towards zero, as GPUs do that were looked into: Fasi et al. 2021 (numerical
// behaviour of tensor cores).
#pragma once
#include "machine/floats.h"
#include "machine/instructions.h"

namespace emulator {

// Lane 4 g + t holds of a 16 x 8 result rows g and g + 8 at columns 2 t and 2 t + 1.
inline constexpr int kResultRow[4] = {0, 0, 8, 8}, kResultCol[4] = {0, 1, 0, 1};

struct MmaTf32 {
  static constexpr const char* kName = "mma.m16n8k8.tf32";
  std::uint32_t a[4], b[2];
  float d[4];
  static void perform(MmaTf32* const* lanes);
};

struct MmaF64 {
  static constexpr const char* kName = "mma.m16n8k8.f64";
  double a[4], b[2], d[4];
  static void perform(MmaF64* const* lanes);
};

template <Widen kWiden>
struct Mma16Bit {
  static constexpr const char* kName = "mma.m16n8k16";
  std::uint32_t a[4], b[2];
  float d[4];
  static void perform(Mma16Bit* const* lanes);
};
extern template struct Mma16Bit<from_float16>;
extern template struct Mma16Bit<from_bfloat16>;

}  // namespace emulator
