// The shared memory of a CTA: bytes, and of each word who has touched it since when.
//
// Two accesses of a word by two threads race unless both read or one comes before the other: in the
// order of a thread, through a barrier where both were, or through several. A vector clock a thread
// tells until when it knows what the others did. source: Flanagan and Freund 2009 (FastTrack); here
// every reader of a word is kept.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

// Where kernels find their dynamic shared memory: the array that kernel/*.cuh declares.
namespace cuattn::kernel {
extern unsigned char shared[];
}

namespace emulator {

class SharedMemory {
 public:
  // The most that a CTA of any device may ask for. source: CUDA C++ Programming Guide, "Technical
  // Specifications per Compute Capability": 227 KiB.
  static constexpr std::uint32_t kReserved = 227 * 1024;
  // Where the window begins, so that 0 is no address.
  static constexpr std::uint32_t kFirstAddress = 1024;
  static constexpr int kWord = 4;  // bytes; threads that touch two halves of a word count as racing

  void begin_launch(int bytes, int num_threads, bool finds_races);
  void begin_cta();  // nothing is written: every byte is 0xff, a NaN in every float

  // Less than kReserved for a place in the window.
  static std::uintptr_t offset_of(const void* pointer) {
    return reinterpret_cast<std::uintptr_t>(pointer) -
           reinterpret_cast<std::uintptr_t>(cuattn::kernel::shared);
  }
  static void* at(std::uint32_t address);
  static std::uint32_t address_of(const void* pointer);

  // Ends the launch unless the thread may do this.
  void check_read(int thread, std::uint32_t offset, std::uint64_t bytes, std::uint64_t align);
  void check_write(int thread, std::uint32_t offset, std::uint64_t bytes, std::uint64_t align);
  // A copy that has started: nobody may touch its place before it is done, by the wait of the
  // thread that started it.
  void begin_copy(int thread, std::uint32_t offset, std::uint64_t bytes);
  void end_copy(int thread, std::uint32_t offset, std::uint64_t bytes);

  // What these threads did until now comes before what they do from now on.
  void order(const int* threads, int count);
  void order(int first_thread, int count);
  void order_all();

 private:
  using Time = std::uint32_t;  // rises at every barrier, through all launches
  struct Word {
    Time written = 0;
    std::uint16_t writer = 0;
    bool is_copied = false;  // by the writer, since then
  };

  void check_place(std::uint32_t offset, std::uint64_t bytes, std::uint64_t align,
                   const char* does) const;
  template <class F>
  void each_word(std::uint32_t offset, std::uint64_t bytes, F f);
  void check_after_write(int thread, int index, const char* what);
  Time* read_times(int index) { return &read_times_[std::size_t(index) * num_threads_]; }
  Time* clock(int thread) { return &clocks_[std::size_t(thread) * num_threads_]; }
  [[noreturn]] void fail(int index, const std::string& what);

  int bytes_ = 0, num_threads_ = 0;
  bool finds_races_ = false;
  Time now_ = 0;        // the latest of any thread
  Time cta_began_ = 0;  // what was written before is another CTA's
  std::vector<Word> words_;
  std::vector<Time> read_times_;  // of each word, each thread's last
  std::vector<Time> clocks_;      // of each thread, until when it knows of each, itself too
};

}  // namespace emulator
