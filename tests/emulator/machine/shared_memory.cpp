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
    words_.assign(words, Word());
    if (read_times_.size() < words * num_threads) read_times_.resize(words * num_threads);
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
  cta_began_ = now_;
}

void* SharedMemory::at(std::uint32_t address) { return window + (address - kFirstAddress); }
std::uint32_t SharedMemory::address_of(const void* pointer) {
  return static_cast<std::uint32_t>(static_cast<const unsigned char*>(pointer) - window) +
         kFirstAddress;
}

void SharedMemory::check_place(std::uint32_t offset, std::uint64_t bytes, std::uint64_t align,
                               const char* does) const {
  const bool is_inside =
      offset <= kReserved && offset + bytes <= static_cast<std::uint64_t>(bytes_);
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
  if (its.is_copied && its.written >= cta_began_) {
    fail(index, std::string(what) +
                    " while a copy to it is under way, which ends with a wait of thread " +
                    std::to_string(its.writer));
  }
  if (its.writer != thread && its.written > clock(thread)[its.writer]) {
    fail(index, std::string(what) + ", and no barrier is between that and the write of thread " +
                    std::to_string(its.writer) + ": a race");
  }
}

void SharedMemory::check_read(int thread, std::uint32_t offset, std::uint64_t bytes,
                              std::uint64_t align) {
  check_place(offset, bytes, align, "reads");
  each_word(offset, bytes, [&](int index) {
    if (words_[index].written < cta_began_) fail(index, "read, and nobody has written it");
    check_after_write(thread, index, "read");
    read_times(index)[thread] = clock(thread)[thread];
  });
}

void SharedMemory::check_write(int thread, std::uint32_t offset, std::uint64_t bytes,
                               std::uint64_t align) {
  check_place(offset, bytes, align, "writes");
  each_word(offset, bytes, [&](int index) {
    check_after_write(thread, index, "written");
    const Time *read = read_times(index), *known = clock(thread);
    bool races = false;
    for (int i = 0; i < num_threads_; ++i) races |= read[i] > known[i];
    for (int i = 0; races && i < num_threads_; ++i) {
      if (read[i] > known[i]) {
        fail(index, "written, and no barrier is between that and the read of thread " +
                        std::to_string(i) + ": a race");
      }
    }
    words_[index] = {clock(thread)[thread], static_cast<std::uint16_t>(thread), false};
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
    now_ = std::max(now_, ++its[threads[i]]);
  }
}

void SharedMemory::order(int first_thread, int count) {
  int threads[kLanes];
  for (int i = 0; i < count; ++i) threads[i] = first_thread + i;
  order(threads, count);
}

void SharedMemory::order_all() {
  if (!finds_races_) return;
  std::fill(clocks_.begin(), clocks_.end(), now_);
  ++now_;
  for (int i = 0; i < num_threads_; ++i) clock(i)[i] = now_;
}

void SharedMemory::fail(int index, const std::string& what) {
  cta.fail("shared memory at " + std::to_string(index * kWord) + " is " + what);
}

}  // namespace emulator
