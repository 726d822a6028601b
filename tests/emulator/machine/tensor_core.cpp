#include "machine/tensor_core.h"

namespace emulator {

// A float32 between 0 and what the number is.
static float towards_zero(double x) {
  // What float32 has no bits for; a number too small for all of them is rounded as it comes.
  const std::uint64_t bits = std::bit_cast<std::uint64_t>(x) & ~((std::uint64_t(1) << 29) - 1);
  return std::isfinite(x) ? static_cast<float>(std::bit_cast<double>(bits)) : static_cast<float>(x);
}

// A warp's d += a b, with whole matrices: a of 16 x kDepth, b of kDepth x 8.
template <int kDepth>
struct Product {
  double a[16][kDepth], b[kDepth][8], d[16][8];

  void multiply() {
    for (int i = 0; i < 16; ++i) {
      for (int k = 0; k < kDepth; ++k) {
        for (int j = 0; j < 8; ++j) d[i][j] += a[i][k] * b[k][j];
      }
    }
  }
};

template <class Lane, class Matrices>
static void get_results(Lane* const* lanes, Matrices& its) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      its.d[lane / 4 + kResultRow[i]][lane % 4 * 2 + kResultCol[i]] = lanes[lane]->d[i];
    }
  }
}
template <class Lane, class Matrices>
static void put_float32_results(Lane* const* lanes, const Matrices& its) {
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      lanes[lane]->d[i] =
          towards_zero(its.d[lane / 4 + kResultRow[i]][lane % 4 * 2 + kResultCol[i]]);
    }
  }
}

// The unit takes the upper 19 bits of each operand.
static double from_tf32(std::uint32_t bits) { return std::bit_cast<float>(bits & 0xffffe000u); }

void MmaTf32::perform(MmaTf32* const* lanes) {
  Product<8> its;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) its.a[g + i % 2 * 8][t + i / 2 * 4] = from_tf32(lanes[lane]->a[i]);
    for (int i = 0; i < 2; ++i) its.b[t + i * 4][g] = from_tf32(lanes[lane]->b[i]);
  }
  get_results(lanes, its);
  its.multiply();
  put_float32_results(lanes, its);
}

void MmaF64::perform(MmaF64* const* lanes) {
  Product<8> its;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) its.a[g + i % 2 * 8][t + i / 2 * 4] = lanes[lane]->a[i];
    for (int i = 0; i < 2; ++i) its.b[t + i * 4][g] = lanes[lane]->b[i];
  }
  get_results(lanes, its);
  for (int k = 0; k < 8; ++k) {
    for (int i = 0; i < 16; ++i) {
      for (int j = 0; j < 8; ++j) its.d[i][j] = std::fma(its.a[i][k], its.b[k][j], its.d[i][j]);
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int i = 0; i < 4; ++i) {
      lanes[lane]->d[i] = its.d[lane / 4 + kResultRow[i]][lane % 4 * 2 + kResultCol[i]];
    }
  }
}

// A register holds two neighbours, the first one below.
template <Widen kWiden>
void Mma16Bit<kWiden>::perform(Mma16Bit* const* lanes) {
  Product<16> its;
  const auto half = [](std::uint32_t bits, int i) {
    return kWiden(static_cast<std::uint16_t>(bits >> (16 * i)));
  };
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 2; ++j) {
        its.a[g + i % 2 * 8][t * 2 + i / 2 * 8 + j] = half(lanes[lane]->a[i], j);
      }
    }
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) its.b[t * 2 + i * 8 + j][g] = half(lanes[lane]->b[i], j);
    }
  }
  get_results(lanes, its);
  its.multiply();
  put_float32_results(lanes, its);
}
template struct Mma16Bit<from_float16>;
template struct Mma16Bit<from_bfloat16>;

}  // namespace emulator
