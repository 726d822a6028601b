// A CTA and its threads: who runs, who waits for whom. The instructions of cuda/ptx speak to this.
//
// Threads are fibers, and run one at a time until they wait or end. Two things make one wait: an
// instruction that the lanes of a warp execute together, and a barrier. Both are complete when the
// last of those awaited arrives; where nobody can run and somebody waits, the launch is dead.
// source: CUDA C++ Programming Guide, "Independent Thread Scheduling": no thread may rely on the
// order in which others run. Here a seed chooses it.
#pragma once
#include <cstdint>
#include <source_location>
#include <string>
#include <vector>
#include "machine/async_copies.h"
#include "machine/fiber.h"
#include "machine/memory.h"
#include "machine/random.h"

namespace emulator {

inline constexpr int kLanes = 32, kMaxThreads = 1024, kBarriers = 16;

// The place in a kernel from which an instruction was called.
using Where = std::source_location;
std::string to_string(const Where& where);

// What the lanes of a warp do together: `perform` gets every lane's operands, in the order of the
// lanes, when all of them have come.
struct WarpInstruction {
  const char* name;
  void (*perform)(void* const* operands);
  bool orders_memory = false;  // what a lane did before, others may see after
};

struct Thread {
  enum State { kReady, kAtInstruction, kAtBarrier, kDone };
  Fiber fiber;
  State state;
  Where where;                         // waiting since
  const WarpInstruction* instruction;  // that it waits in,
  void* operands;                      // with these,
  int barrier, expected;               // or the barrier, and for how many threads; 0: for all
  bool said;                           // there, by any of them
  AsyncCopies copies;
};

class Cta {
 public:
  // Runs `body` in every thread of a CTA. Throws Failure.
  void run(int num_threads, void (*body)(), Random& random);

  // Of the thread that runs:
  int thread() const { return current_; }
  int lane(int index) const { return current_ / kLanes * kLanes + index; }  // of its warp
  Thread& self() { return threads_[current_]; }
  void together(const WarpInstruction& instruction, void* operands, const Where& where);
  // Waits for `expected` threads, or with 0 for all of the CTA that have not ended; whether one of
  // them said so.
  bool barrier(int id, int expected, bool said, const Where& where);
  // Ends the launch with a message about this thread and the code that it executes.
  [[noreturn]] void fail(const std::string& what);
  // Whether a place is the thread's own: its stack, or a special register.
  bool owns(const void* pointer) const {
    const std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(pointer) - stack_;
    return offset < Stacks::kBytes || is_special(pointer);
  }
  // Where an access comes from that is no instruction of a warp and no barrier.
  void comes_from(const void* code) { code_ = code; }
  bool chance() { return random_->one_in(4); }

 private:
  struct Barrier {
    std::vector<int> waiting;
    bool said = false;
  };

  static bool is_special(const void* pointer);
  static void begin_thread();
  void select(int thread);
  void end_thread();
  void wait();
  void make_ready(int thread);
  int next_ready();
  void release_if_complete(int id);
  void check_warps_agree(const Barrier& barrier);
  std::string who_waits_where() const;
  std::string place() const;

  int num_threads_ = 0, num_live_ = 0, current_ = 0;
  std::uintptr_t stack_ = 0;    // of the thread that runs
  const void* code_ = nullptr;  // that it executes, or null: what its `where` says
  void (*body_)() = nullptr;
  Random* random_ = nullptr;
  std::vector<Thread> threads_;
  std::uint32_t ready_[kMaxThreads / kLanes];    // lanes of each warp that can run
  std::uint32_t arrived_[kMaxThreads / kLanes];  // lanes that wait in an instruction
  int warps_[kMaxThreads / kLanes];              // the first that is ready runs
  Barrier barriers_[kBarriers];
  Fiber launcher_;
  Stacks stacks_;
  std::string failure_;
};

// A launch that cannot go on, and why.
struct Failure {
  std::string what;
};

extern Cta cta;  // the one that runs

}  // namespace emulator
