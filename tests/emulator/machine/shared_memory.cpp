#include "machine/shared_memory.h"

#include <algorithm>
#include <cstring>

#include "machine/cta.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cuattn::kernel {
alignas(1024) unsigned char shared[emulator::SharedMemory::kReserved];
}

namespace emulator {

static unsigned char* const window = cuattn::kernel::shared;

void SharedMemory::begin_launch(int bytes, int num_threads, bool finds_races) {
  bytes_ = bytes, num_threads_ = num_threads, finds_races_ = finds_races;
  if (finds_races) {
    const std::size_t words = (bytes + kWord - 1) / kWord;
    if (words_.size() < words) words_.resize(words);
    if (readers_.size() < words * num_threads) readers_.resize(words * num_threads);
    clocks_.resize(std::size_t(num_threads) * num_threads);
  }
#if defined(__SANITIZE_ADDRESS__)
  ASAN_UNPOISON_MEMORY_REGION(window, kReserved);
  ASAN_POISON_MEMORY_REGION(window + bytes, kReserved - bytes);
#endif
}

void SharedMemory::begin_cta() {
  std::memset(window, 0xff, bytes_);
  order_all();
  first_epoch_ = epoch_;
}

void* SharedMemory::at(std::uint32_t address) { return window + (address - kFirstAddress); }
std::uint32_t SharedMemory::address_of(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) - window) +
         kFirstAddress;
}

void SharedMemory::check_place(std::uint32_t offset, std::uint64_t bytes, std::uint64_t align,
                               const char* does) const {
  const bool is_inside = offset <= kReserved && offset + bytes <= static_cast<std::uint64_t>(bytes_);
  if (is_inside && offset % align == 0) return;
  const std::string what = std::string(does) + " " + std::to_string(bytes) +
                           " bytes of shared memory at " +
                           std::to_string(static_cast<std::int32_t>(offset));
  cta.fail(is_inside ? what + ": the address is no multiple of " + std::to_string(align)
                     : what + ": the CTA has " + std::to_string(bytes_));
}

template <class F>
void SharedMemory::each_word(std::uint32_t offset, std::uint64_t bytes, F f) {
  if (!finds_races_) return;
  const int end = static_cast<int>((offset + bytes + kWord - 1) / kWord);
  for (int index = static_cast<int>(offset / kWord); index < end; ++index) f(index);
}

void SharedMemory::check_after_write(int thread, int index, const char* what) {
  const Word& its = words_[index];
  if (its.is_copied && is_written(its)) {
    fail(index, std::string(what) + ", while a copy is under way to it: it ends with the wait of thread " +
                    std::to_string(its.writer) + ", which started it");
  }
  if (its.write_epoch == epoch_ && its.writer != thread && its.write_time > clock(thread)[its.writer]) {
    fail(index, std::string(what) + ", and no barrier comes between that and the write of thread " +
                    std::to_string(its.writer) + ": a race");
  }
}

void SharedMemory::check_read(int thread, std::uint32_t offset, std::uint64_t bytes,
                               std::uint64_t align) {
  check_place(offset, bytes, align, "reads");
  each_word(offset, bytes, [&](int index) {
    Word& its = words_[index];
    if (!is_written(its)) fail(index, "read, and nobody has written it");
    check_after_write(thread, index, "read");
    if (its.read_epoch != epoch_) {
      std::fill_n(readers(index), num_threads_, Time(0));
      its.read_epoch = epoch_;
    }
    readers(index)[thread] = clock(thread)[thread];
  });
}

void SharedMemory::check_write(int thread, std::uint32_t offset, std::uint64_t bytes,
                               std::uint64_t align) {
  check_place(offset, bytes, align, "writes");
  each_word(offset, bytes, [&](int index) {
    Word& its = words_[index];
    check_after_write(thread, index, "written");
    if (its.read_epoch == epoch_) {
      const Time *read = readers(index), *known = clock(thread);
      int racing = -1;
      for (int i = 0; i < num_threads_; ++i) racing = i != thread && read[i] > known[i] ? i : racing;
      if (racing >= 0) {
        fail(index, "written, and no barrier comes between that and the read of thread " +
                        std::to_string(racing) + ": a race");
      }
    }
    its.write_epoch = epoch_, its.writer = static_cast<std::uint16_t>(thread);
    its.write_time = clock(thread)[thread];
    its.is_copied = false;
  });
}

void SharedMemory::begin_copy(int thread, std::uint32_t offset, std::uint64_t bytes) {
  check_write(thread, offset, bytes, bytes);
  each_word(offset, bytes, [&](int index) { words_[index].is_copied = true; });
}

void SharedMemory::end_copy(int thread, std::uint32_t offset, std::uint64_t bytes) {
  each_word(offset, bytes, [&](int index) { words_[index].is_copied = false; });
  check_write(thread, offset, bytes, bytes);
}

void SharedMemory::order(const int* threads, int count) {
  if (!finds_races_) return;
  std::vector<Time> known(num_threads_);
  for (int i = 0; i < count; ++i) {
    const Time* its = clock(threads[i]);
    for (int j = 0; j < num_threads_; ++j) known[j] = std::max(known[j], its[j]);
  }
  for (int i = 0; i < count; ++i) {
    Time* its = clock(threads[i]);
    std::copy(known.begin(), known.end(), its);
    if (++its[threads[i]] == 0) cta.fail("waits at 65536 barriers of parts of the CTA between two of the whole");
  }
}

void SharedMemory::order(int first_thread, int count) {
  int threads[kLanes];
  for (int i = 0; i < count; ++i) threads[i] = first_thread + i;
  order(threads, count);
}

void SharedMemory::order_all() {
  if (!finds_races_) return;
  ++epoch_;
  std::fill(clocks_.begin(), clocks_.end(), Time(0));
  for (int i = 0; i < num_threads_; ++i) clock(i)[i] = 1;
}

void SharedMemory::fail(int index, const std::string& what) {
  cta.fail("shared memory at " + std::to_string(index * kWord) + " is " + what);
}

}  // namespace emulator
