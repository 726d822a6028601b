// What instructions ask of the machine; cuda/ptx/*.cuh gives them their names.
//
// An instruction of a warp is a struct of one lane's operands with a static `perform`, which gets
// those of all lanes, and a name for messages; it stands in a .cpp file, for the code of a unit may
// look at no stack but its own thread's. To add one - say of Hopper: a barrier in shared
// memory, a bulk copy, a product of warp groups - write its struct here or in a file beside, and
// its function in cuda/ptx.
#pragma once
#include "machine/cta.h"

// Code of the machine that is compiled into a unit: no access of the kernel's.
#define UNCHECKED __attribute__((no_sanitize("thread")))

namespace emulator {

// Executes an instruction together with the other lanes of the warp: operands in, results out.
// Values go by value, so that a kernel's fragments can stay in registers.
template <class Lane>
[[gnu::noinline]] UNCHECKED Lane together(Lane lane, Where where) {
  static constexpr WarpInstruction kInstruction = {Lane::kName,
                                                   [](void* const* operands) UNCHECKED {
                                                     Lane * lanes[kLanes];
                                                     for (int i = 0; i < kLanes; ++i)
                                                       lanes[i] = static_cast<Lane*>(operands[i]);
                                                     Lane::perform(lanes);
                                                   },
                                                   requires { Lane::kOrdersMemory; }};
  cta.together(kInstruction, &lane, where);
  return lane;
}

inline bool barrier(int id, int expected, bool said, const Where& where) {
  return cta.barrier(id, expected, said, where);
}

// source: PTX ISA, "bar.warp.sync".
struct SyncWarp {
  static constexpr const char* kName = "bar.warp.sync";
  static constexpr bool kOrdersMemory = true;
  static void perform(SyncWarp* const* lanes);
};

// source: PTX ISA, "vote.sync", mode any.
struct AnyOfWarp {
  static constexpr const char* kName = "vote.sync.any";
  bool said;
  static void perform(AnyOfWarp* const* lanes);
};

// source: PTX ISA, "shfl.sync", modes bfly and idx of a whole warp: each lane gets the value of the
// lane it names.
struct Shuffle {
  static constexpr const char* kName = "shfl.sync";
  std::uint64_t bits;
  int from;
  static void perform(Shuffle* const* lanes);
};

// source: PTX ISA, "ldmatrix", .x4 of .m8n8.b16.
template <bool kTransposed>
struct LoadMatrix {
  static constexpr const char* kName = kTransposed ? "ldmatrix.trans" : "ldmatrix";
  std::uint32_t address;  // of row lane % 8 of matrix lane / 8
  std::uint32_t registers[4] = {};
  static void perform(LoadMatrix* const* lanes);
};

// ld.shared and st.shared of 4, 8 or 16 bytes.
struct Words {
  std::uint32_t at[4];
};
Words load_shared(std::uint32_t address, int bytes);
void store_shared(std::uint32_t address, Words value, int bytes);

void start_copy(std::uint32_t shared, const void* global, bool wanted);
void commit_copies();
void wait_for_copies(int pending);

// Each of four sums by itself, to which other threads may add at any moment.
void add_in_global(float* address, Words terms);

}  // namespace emulator
