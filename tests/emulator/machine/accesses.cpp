// Plain accesses of a kernel. Its unit is compiled with -fsanitize=thread, which puts a call before
// every access of memory that others may see, and with -fsanitize=bounds-strict,alignment, which
// calls where an index is out of the bounds of an array, such as of registers, or a pointer is none
// of its type. Instead of the sanitizers' libraries these answer. So `tile.at(row, col) = x` is
// checked like st.shared, in sources that know nothing of it.
#include "machine/cta.h"
#include "machine/memory.h"

namespace emulator {

static void check(const void* pointer, std::uint64_t bytes, std::uint64_t align, Access access,
                  const void* code) {
  if (cta.owns(pointer)) return;
  cta.comes_from(code);
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

// Names and signatures: source: LLVM, "compiler-rt/lib/tsan/rtl/tsan_interface.h" and
// "compiler-rt/lib/ubsan/ubsan_handlers.h".
using emulator::Access, emulator::check, emulator::cta;
#define CODE __builtin_return_address(0)
extern "C" {
#define ACCESSES(bytes)                                                                     \
  void __tsan_read##bytes(void* at) { check(at, bytes, bytes, Access::kRead, CODE); }       \
  void __tsan_write##bytes(void* at) { check(at, bytes, bytes, Access::kWrite, CODE); }     \
  void __tsan_unaligned_read##bytes(void* at) { check(at, bytes, 1, Access::kRead, CODE); } \
  void __tsan_unaligned_write##bytes(void* at) { check(at, bytes, 1, Access::kWrite, CODE); }
ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
#undef ACCESSES
void __tsan_read_range(void* at, unsigned long bytes) { check(at, bytes, 1, Access::kRead, CODE); }
void __tsan_write_range(void* at, unsigned long bytes) {
  check(at, bytes, 1, Access::kWrite, CODE);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// Only the compiler knows that four elements are moved together; it may move them one by one here.
struct Pointer {
  const char* file;
  std::uint32_t line, column;
  const void* type;
  std::uint8_t log2_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1_abort(const Pointer* its, std::uintptr_t address) {
  cta.comes_from(CODE);
  cta.fail("an address is no multiple of " + std::to_string(1 << its->log2_alignment) + ": " +
           std::to_string(address));
}
void __ubsan_handle_out_of_bounds_abort(const void*, std::uintptr_t index) {
  cta.comes_from(CODE);
  cta.fail("index " + std::to_string(static_cast<std::int64_t>(index)) +
           " is out of the bounds of an array");
}
}
