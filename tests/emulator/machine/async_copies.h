// Copies from global to shared memory under way: cp.async. source: PTX ISA, "Data Movement and
// Conversion Instructions: cp.async", "cp.async.commit_group", "cp.async.wait_group".
#pragma once
#include <cstdint>
#include <vector>

namespace emulator {

class Random;

// Those of one thread. A copy may land at any moment until its wait, and is there after that: here
// it lands at once where chance says so, and else at the wait.
class AsyncCopies {
 public:
  static constexpr int kBytes = 16;

  void clear() { copies_.clear(), groups_ = 0; }
  // Without `global` zeros are written.
  void start(std::uint32_t shared, const void* global, bool lands_now);
  void commit() { ++groups_; }
  // All groups but the last `pending` ones are done; what belongs to none yet is not.
  void wait(int pending);

 private:
  struct Copy {
    std::uint32_t shared;
    const void* global;
    int group;
    bool has_landed;
  };
  void land(Copy& copy);

  std::vector<Copy> copies_;
  int groups_ = 0;
};

}  // namespace emulator
