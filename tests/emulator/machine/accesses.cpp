// Plain accesses of a kernel. Its unit is compiled with -fsanitize=thread, which puts a call before
// every access of memory that others may see; instead of the sanitizer's library these answer. So
// `tile.at(row, col) = x` is checked like st.shared, in sources that know nothing of it.
#include "machine/cta.h"
#include "machine/memory.h"

namespace emulator {

static void check(const void* pointer, std::uint64_t bytes, std::uint64_t align, Access access) {
  if (cta.owns(pointer)) return;
  const std::uintptr_t offset = SharedMemory::offset_of(pointer);
  if (offset >= SharedMemory::kReserved) {
    memory.check_global(pointer, bytes, align, access);
  } else if (access == Access::kRead) {
    memory.shared().check_read(cta.thread(), static_cast<std::uint32_t>(offset), bytes, align);
  } else {
    memory.shared().check_write(cta.thread(), static_cast<std::uint32_t>(offset), bytes, align);
  }
}

}  // namespace emulator

// Names and signatures: source: LLVM, "compiler-rt/lib/tsan/rtl/tsan_interface.h".
using emulator::Access, emulator::check;
extern "C" {
#define ACCESSES(bytes)                                                                     \
  void __tsan_read##bytes(void* at) { check(at, bytes, bytes, Access::kRead); }             \
  void __tsan_write##bytes(void* at) { check(at, bytes, bytes, Access::kWrite); }           \
  void __tsan_unaligned_read##bytes(void* at) { check(at, bytes, 1, Access::kRead); }       \
  void __tsan_unaligned_write##bytes(void* at) { check(at, bytes, 1, Access::kWrite); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
#undef ACCESSES
void __tsan_read_range(void* at, unsigned long bytes) { check(at, bytes, 1, Access::kRead); }
void __tsan_write_range(void* at, unsigned long bytes) { check(at, bytes, 1, Access::kWrite); }
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
