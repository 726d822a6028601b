#include "machine/async_copies.h"
#include <cstring>
#include "machine/cta.h"
#include "machine/memory.h"

namespace emulator {

void AsyncCopies::start(std::uint32_t shared, const void* global, bool lands_now) {
  SharedMemory& memory_of_cta = memory.shared();
  if (global != nullptr) memory.check_global(global, kBytes, kBytes, Access::kRead);
  memory_of_cta.begin_copy(cta.thread(), shared - SharedMemory::kFirstAddress, kBytes);
  copies_.push_back({shared, global, groups_, false});
  if (lands_now) land(copies_.back());
}

void AsyncCopies::wait(int pending) {
  std::size_t done = 0;
  while (done < copies_.size() && copies_[done].group < groups_ - pending) {
    Copy& its = copies_[done++];
    if (!its.has_landed) land(its);
    memory.shared().end_copy(cta.thread(), its.shared - SharedMemory::kFirstAddress, kBytes);
  }
  copies_.erase(copies_.begin(), copies_.begin() + static_cast<std::ptrdiff_t>(done));
}

void AsyncCopies::land(Copy& copy) {
  void* place = SharedMemory::at(copy.shared);
  if (copy.global != nullptr) {
    std::memcpy(place, copy.global, kBytes);
  } else {
    std::memset(place, 0, kBytes);
  }
  copy.has_landed = true;
}

}  // namespace emulator
