#include "machine/memory.h"
#include "machine/cta.h"

namespace emulator {

Memory memory;

void Memory::begin_launch(const Array* arrays, int count, int smem_bytes, int num_threads,
                          bool finds_races) {
  shared_.begin_launch(smem_bytes, num_threads, finds_races);
  arrays_.clear();
  for (int i = 0; i < count; ++i) {
    arrays_.push_back({arrays[i], {}});
    if (finds_races && arrays[i].is_writable) {
      arrays_.back().touched.resize((arrays[i].bytes + kGranule - 1) / kGranule);
    }
  }
}

void Memory::begin_cta(int index) {
  cta_ = index + 1;
  shared_.begin_cta();
}

static std::string does(Access access, std::uint64_t bytes) {
  return (access == Access::kRead ? "reads " : "writes ") + std::to_string(bytes) + " bytes ";
}

void Memory::check_global(const void* pointer, std::uint64_t bytes, std::uint64_t align,
                          Access access) {
  const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(pointer);
  for (Tracked& its : arrays_) {
    if (address < its.address || address + bytes > its.address + its.bytes) continue;
    const std::uint64_t offset = address - its.address;
    const bool may_write = access == Access::kRead || its.is_writable;
    if (address % align != 0 || !may_write) {
      cta.fail(
          does(access, bytes) + "of " + its.name + " at byte " + std::to_string(offset) +
          (may_write ? ": the address is no multiple of " + std::to_string(align) : ": an input"));
    }
    if (!its.touched.empty()) find_race(its, offset, offset + bytes, access);
    return;
  }
  const Tracked* nearest = nullptr;
  std::uint64_t distance = ~0ull;
  for (Tracked& its : arrays_) {
    const std::uint64_t away =
        address < its.address ? its.address - address : address - its.address;
    if (away < distance) distance = away, nearest = &its;
  }
  std::string place = "outside of every array";
  if (nearest != nullptr) {
    place += "; the nearest is " + std::string(nearest->name) + ", of " +
             std::to_string(nearest->bytes) + " bytes: this is " +
             (address < nearest->address ? std::to_string(distance) + " before it"
                                         : "at byte " + std::to_string(distance) + " of it");
  }
  cta.fail(does(access, bytes) + place);
}

// CTAs run in any order and at the same time: what one writes no other may read or write, unless
// both add.
void Memory::find_race(Tracked& array, std::uint64_t begin, std::uint64_t end, Access access) {
  for (std::uint64_t at = begin / kGranule; at < (end + kGranule - 1) / kGranule; ++at) {
    Touched& its = array.touched[at];
    const auto is_other = [&](std::uint32_t who) { return who != 0 && who != cta_; };
    const bool is_added = access != Access::kAdd && is_other(its.adder);
    const bool is_written = is_added || is_other(its.writer);
    const bool is_read = access != Access::kRead && is_other(its.reader);
    if (is_written || is_read) {
      const std::uint32_t other = is_added ? its.adder : is_written ? its.writer : its.reader;
      cta.fail(
          std::string(access == Access::kRead ? "reads" : "writes") + " byte " +
          std::to_string(at * kGranule) + " of " + array.name + ", which " +
          (other == kSeveral ? "several CTAs have" : "CTA " + std::to_string(other - 1) + " has") +
          (is_written ? " written" : " read") + " in this launch: a race");
    }
    if (access == Access::kWrite) {
      its.writer = cta_;
    } else {
      std::uint32_t& who = access == Access::kRead ? its.reader : its.adder;
      who = is_other(who) ? kSeveral : cta_;
    }
  }
}

}  // namespace emulator
