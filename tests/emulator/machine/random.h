// A small generator of pseudo-random numbers, the same on every machine. source: Steele, Lea and
// Flood 2014 (SplitMix64).
#pragma once
#include <cstdint>

namespace emulator {

// Seed 0 is no chance at all: everything in its order, and nothing earlier than it must be.
class Random {
 public:
  explicit Random(std::uint64_t seed) : seed_(seed), state_(seed) {}

  bool is_off() const { return seed_ == 0; }
  std::uint64_t next() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // 0 to n - 1; 0 where chance is off.
  int below(int n) { return is_off() ? 0 : static_cast<int>(next() % static_cast<unsigned>(n)); }
  bool one_in(int n) { return !is_off() && below(n) == 0; }

  template <class T>
  void shuffle(T* values, int count) {
    for (int i = count - 1; i > 0 && !is_off(); --i) {
      const int j = below(i + 1);
      const T x = values[i];
      values[i] = values[j];
      values[j] = x;
    }
  }

 private:
  std::uint64_t seed_, state_;
};

}  // namespace emulator
