// What a launch may touch: the CTA's shared memory and the arrays of global memory.
//
// Every access of a kernel comes here before it happens: plain ones through the calls that the
// compiler's -fsanitize=thread puts before them (machine/accesses.cpp), those of instructions from
// cuda/ptx. So what a GPU does in silence ends the launch with a message.
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#include "machine/shared_memory.h"

namespace emulator {

enum class Access { kRead, kWrite, kAdd };  // kAdd: atomic, in global memory

// An array that a launch was given, as its parameters describe it.
struct Array {
  const char* name;
  std::uintptr_t address;
  std::uint64_t bytes;
  std::int32_t is_writable;
};

class Memory {
 public:
  void begin_launch(const Array* arrays, int count, int smem_bytes, int num_threads,
                    bool finds_races);
  void begin_cta(int index);

  SharedMemory& shared() { return shared_; }
  // Ends the launch unless the CTA may do this. `align`: of the address, in bytes.
  void check_global(const void* pointer, std::uint64_t bytes, std::uint64_t align, Access access);

 private:
  // Who has touched two bytes of an array in this launch: 1 + the index of a CTA.
  struct Touched {
    std::uint32_t writer = 0, reader = 0, adder = 0;
  };
  static constexpr std::uint32_t kSeveral = 0xffffffff;
  static constexpr int kGranule = 2;
  struct Tracked : Array {
    std::vector<Touched> touched;  // of a writable one
  };
  void find_race(Tracked& array, std::uint64_t begin, std::uint64_t end, Access access);

  SharedMemory shared_;
  std::vector<Tracked> arrays_;
  std::uint32_t cta_ = 0;
};

extern Memory memory;  // of the launch that runs

}  // namespace emulator
