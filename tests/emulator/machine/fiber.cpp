#include "machine/fiber.h"
#include <sys/mman.h>
#include <unistd.h>
#include <cstdint>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define EMULATOR_ASAN 1
#endif
#endif

#ifdef EMULATOR_ASAN
#include <sanitizer/asan_interface.h>
#endif

// Saves the registers that calls keep on the stack and its pointer at the first argument, and takes
// the stack of the second. source: System V ABI for x86-64, 3.2.1; AAPCS64, 6.1.
extern "C" void emulator_switch(void** save, void* to) asm("emulator_switch");
#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
static constexpr int kSavedWords = 7;  // registers, and the address to return to
static constexpr int kReturnWord = 6;
static constexpr int kWordsAboveEntry = 1;  // a function begins 8 bytes off a multiple of 16
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
emulator_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
static constexpr int kSavedWords = 20;
static constexpr int kReturnWord = 11;
static constexpr int kWordsAboveEntry = 0;
#else
#error "fiber.cpp has the switch for x86-64 and aarch64: add this processor's"
#endif

namespace emulator {

Stacks::~Stacks() {
  if (memory_ != nullptr) munmap(memory_, mapped_);
}

void Stacks::reserve(int count) {
  if (count <= count_) return;
  if (memory_ != nullptr) munmap(memory_, mapped_);
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  mapped_ = count * (kBytes + page);
  void* memory = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  memory_ = static_cast<char*>(memory);
  count_ = count;
  for (int i = 0; i < count; ++i) mprotect(bottom(i) - page, page, PROT_NONE);
}

char* Stacks::bottom(int index) const {
  const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return memory_ + index * (kBytes + page) + page;
}

void Fiber::prepare(char* its_bottom, void (*body)()) {
  bottom = its_bottom;
  bytes = Stacks::kBytes;
#ifdef EMULATOR_ASAN
  ASAN_UNPOISON_MEMORY_REGION(its_bottom, bytes);  // frames of one that never came to its end
#endif
  // The topmost frame returns to 0, where a debugger's list of frames ends.
  std::uintptr_t* words = reinterpret_cast<std::uintptr_t*>(its_bottom + bytes) - 16;
  words -= kWordsAboveEntry + kSavedWords;
  for (int i = 0; i < kSavedWords + kWordsAboveEntry; ++i) words[i] = 0;
  words[kReturnWord] = reinterpret_cast<std::uintptr_t>(body);
  stack_pointer = words;
}

void switch_fiber(Fiber& from, Fiber& to) {
#ifdef EMULATOR_ASAN
  __sanitizer_start_switch_fiber(&from.fake_stack, to.bottom, to.bytes);
#endif
  emulator_switch(&from.stack_pointer, to.stack_pointer);
#ifdef EMULATOR_ASAN
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

void fiber_begins([[maybe_unused]] Fiber& from) {
#ifdef EMULATOR_ASAN
  const void* bottom;
  std::size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (from.bottom == nullptr) from.bottom = bottom, from.bytes = bytes;  // the process' own stack
#endif
}

}  // namespace emulator
