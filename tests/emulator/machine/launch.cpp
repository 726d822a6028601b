// Runs a grid: what tests/emulator/launch.py calls.
#include <cstring>
#include "cuda/language.h"
#include "machine/cta.h"
#include "machine/memory.h"
#include "machine/random.h"

namespace emulator {

// The fields of launch.py's Launch.
struct Launch {
  void (*kernel)(const void* params);
  const void* params;
  std::int32_t grid, block, smem_bytes, finds_races;
  std::uint64_t seed;
  const Array* arrays;
  std::int32_t num_arrays, message_bytes;
  char* message;
};

static const Launch* running;

static void run_grid(const Launch& launch) {
  running = &launch;
  Random random(launch.seed);
  memory.begin_launch(launch.arrays, launch.num_arrays, launch.smem_bytes, launch.block,
                      launch.finds_races != 0);
  gridDim.x = static_cast<unsigned>(launch.grid);
  blockDim.x = static_cast<unsigned>(launch.block);
  std::vector<int> order(launch.grid);
  for (int i = 0; i < launch.grid; ++i) order[i] = i;
  random.shuffle(order.data(), launch.grid);
  for (const int index : order) {
    blockIdx.x = static_cast<unsigned>(index);
    memory.begin_cta(index);
    cta.run(launch.block, [] { running->kernel(running->params); }, random);
  }
}

}  // namespace emulator

// 0, or 1 with a message where the launch could not go on.
extern "C" int emulate(const emulator::Launch* launch) {
  try {
    emulator::run_grid(*launch);
  } catch (const emulator::Failure& failure) {
    std::strncpy(launch->message, failure.what.c_str(), launch->message_bytes - 1);
    return 1;
  }
  return 0;
}
