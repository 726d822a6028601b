// Execution contexts of one operating-system thread: what a CUDA thread is here.
//
// A fiber is a stack and the place where it stopped. Switching saves the registers that a C++ call
// keeps, and nothing else, so it takes a few nanoseconds; the standard's ucontext enters the
// kernel.
#pragma once
#include <cstddef>

namespace emulator {

// Stacks of equal size, each above a page that may not be touched: a fiber that needs more dies
// there instead of writing into its neighbour.
class Stacks {
 public:
  static constexpr std::size_t kBytes = 256 * 1024;  // most of it is never touched

  Stacks() = default;
  Stacks(const Stacks&) = delete;
  ~Stacks();
  void reserve(int count);
  char* bottom(int index) const;  // the lowest byte that may be used
  char* top(int index) const { return bottom(index) + kBytes; }

 private:
  char* memory_ = nullptr;
  std::size_t mapped_ = 0;
  int count_ = 0;
};

struct Fiber {
  void* stack_pointer = nullptr;  // where it stopped
  const void* bottom = nullptr;   // of its stack
  std::size_t bytes = 0;
  void* fake_stack = nullptr;  // of the address sanitizer

  // Lets the next switch to this fiber call `body` on an empty stack; it must never return.
  void prepare(char* its_bottom, void (*body)());
};

// Stops `from` here and goes on where `to` has stopped.
void switch_fiber(Fiber& from, Fiber& to);
// The first thing that a new fiber does; `from` is where the switch to it came from.
void fiber_begins(Fiber& from);

}  // namespace emulator
