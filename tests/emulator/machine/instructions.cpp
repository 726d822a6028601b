#include "machine/instructions.h"
#include <bit>
#include <cstring>
#include "machine/memory.h"

namespace emulator {

#define FROM_HERE cta.comes_from(__builtin_return_address(0))

static std::uint32_t offset(std::uint32_t address) { return address - SharedMemory::kFirstAddress; }

Words load_shared(std::uint32_t address, int bytes) {
  FROM_HERE;
  Words value = {};
  memory.shared().check_read(cta.thread(), offset(address), bytes, bytes);
  std::memcpy(&value, SharedMemory::at(address), bytes);
  return value;
}

void store_shared(std::uint32_t address, Words value, int bytes) {
  FROM_HERE;
  memory.shared().check_write(cta.thread(), offset(address), bytes, bytes);
  std::memcpy(SharedMemory::at(address), &value, bytes);
}

void SyncWarp::perform(SyncWarp* const*) {}

void AnyOfWarp::perform(AnyOfWarp* const* lanes) {
  bool any = false;
  for (int i = 0; i < kLanes; ++i) any |= lanes[i]->said;
  for (int i = 0; i < kLanes; ++i) lanes[i]->said = any;
}

void Shuffle::perform(Shuffle* const* lanes) {
  std::uint64_t given[kLanes];
  for (int i = 0; i < kLanes; ++i) given[i] = lanes[i]->bits;
  for (int i = 0; i < kLanes; ++i) lanes[i]->bits = given[lanes[i]->from & (kLanes - 1)];
}

// Of matrix k lane 4 g + t gets elements 2 t and 2 t + 1 of row g, whose address lane 8 k + g gave;
// transposed, elements g of rows 2 t and 2 t + 1.
template <bool kTransposed>
void LoadMatrix<kTransposed>::perform(LoadMatrix* const* lanes) {
  for (int k = 0; k < 4; ++k) {
    std::uint16_t matrix[8][8];
    for (int row = 0; row < 8; ++row) {
      const std::uint32_t address = lanes[k * 8 + row]->address;
      if (address % 16 != 0)
        memory.shared().check_read(cta.lane(k * 8 + row), offset(address), 16, 16);
      // Who receives which two elements, or one of each of two rows.
      for (int i = 0; i < 8; ++i) {
        const int receiver = kTransposed ? 4 * i + row / 2 : 4 * row + i / 2;
        memory.shared().check_read(cta.lane(receiver), offset(address) + 2 * i, 2, 2);
      }
      std::memcpy(matrix[row], SharedMemory::at(address), sizeof matrix[row]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int g = lane / 4, t = lane % 4;
      const std::uint32_t low = kTransposed ? matrix[2 * t][g] : matrix[g][2 * t];
      const std::uint32_t high = kTransposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
      lanes[lane]->registers[k] = low | high << 16;
    }
  }
}
template struct LoadMatrix<false>;
template struct LoadMatrix<true>;

void start_copy(std::uint32_t shared, const void* global, bool wanted) {
  FROM_HERE;
  cta.self().copies.start(shared, wanted ? global : nullptr, cta.chance());
}
void commit_copies() { cta.self().copies.commit(); }
void wait_for_copies(int pending) {
  FROM_HERE;
  cta.self().copies.wait(pending);
}

void add_in_global(float* address, Words terms) {
  FROM_HERE;
  memory.check_global(address, sizeof terms, sizeof terms, Access::kAdd);
  for (int i = 0; i < 4; ++i) address[i] += std::bit_cast<float>(terms.at[i]);
}

}  // namespace emulator
