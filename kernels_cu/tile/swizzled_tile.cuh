// A matrix of 16-bit elements in shared memory as tensor cores read it, and the ways in and out.
// Layer: tile.
//
// Rows are positions, columns features or the other positions, without padding. Rows are cut into
// chunks of 16 bytes, and chunk c of row r stands in the place of chunk c ^ swizzle(r): the eight
// rows of a block that are read or written together then lie in different banks.
#pragma once
#include "base/dtype.cuh"
#include "ptx/async_copy.cuh"
#include "ptx/convert.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"
#include "tile/shared_tile.cuh"

namespace cuattn::tile {

inline constexpr int kChunk = 8;  // elements of 16 bytes

template <int kRowCount, int kColCount>
struct SwizzledTile {
  static constexpr int kRows = kRowCount;
  static constexpr int kCols = kColCount;
  static constexpr int kPitch = kCols * 2;  // bytes from row to row
  static constexpr int kBytes = kRows * kPitch;
  static constexpr int kChunks = kCols / kChunk;  // of a row
  // The chunks that change places: the largest power of two that divides a row, up to 128 bytes,
  // where the banks begin again.
  static constexpr int kLine = kPitch % 128 == 0 ? 128 : kPitch % 64 == 0 ? 64 : 32;
  static_assert(kPitch % 32 == 0 && kRows % 16 == 0);

  u32 address;

  CUATTN_DEVICE static int swizzle(int row) { return row / (128 / kLine) % (kLine / 16); }
  CUATTN_DEVICE u32 at(int row, int chunk) const {
    return address + row * kPitch + (chunk ^ swizzle(row)) * 16;
  }
};

// In which order a lane's four registers hold the quarters of a block, so that those of an operand
// are neighbours: a left operand, and a right one that is read transposed, go down first; a right
// operand, and a left one that is read transposed, go across first.
enum class Quarters { kDownFirst, kAcrossFirst };

// Blocks of 16 x 16 elements of a tile, as operands of a warp: four registers, each of an 8 x 8.
template <class Tile, Quarters kOrder>
struct Blocks {
  u32 row_address;
  u32 place;  // of this lane's chunk, in bytes
  int first_col;

  // `row` and `col`, multiples of 16, are the first that this warp reads.
  CUATTN_DEVICE explicit Blocks(Tile tile, int row = 0, int col = 0) : first_col(col) {
    const int quarter = threadIdx.x % kWarpSize / 8;
    const int down = kOrder == Quarters::kDownFirst ? quarter % 2 : quarter / 2;
    const int across = kOrder == Quarters::kDownFirst ? quarter / 2 : quarter % 2;
    const int its_row = threadIdx.x % 8 + down * 8;
    row_address = tile.address + (row + its_row) * Tile::kPitch;
    place = (across ^ Tile::swizzle(its_row)) * 16;
  }
  // Multiples of 16 that are known when compiling.
  CUATTN_DEVICE u32 at(int row, int col) const {
    const int byte = (first_col + col) * 2, in_line = byte % Tile::kLine;
    return row_address + row * Tile::kPitch + (byte - in_line) + (place ^ in_line);
  }
  CUATTN_DEVICE void read(u32 (&r)[4], int row, int col) const {
    ptx::load_matrix(r, at(row, col));
  }
  // Each 8 x 8 transposed.
  CUATTN_DEVICE void read_transposed(u32 (&r)[4], int row, int col) const {
    ptx::load_matrix_transposed(r, at(row, col));
  }
};
template <class Tile>
using DownBlocks = Blocks<Tile, Quarters::kDownFirst>;
template <class Tile>
using AcrossBlocks = Blocks<Tile, Quarters::kAcrossFirst>;

// The passes of a copy: unrolled where every CTA waits for it, rolled where it is rare or the loop
// around it or after it has no registers to spare.
enum class Passes { kUnrolled, kRolled };

// Fills tiles with rows and all columns of heads, all threads together; copies are under way when
// the functions return. Each thread has the same chunk and every kRowStep-th row of each tile.
template <int kThreads, class Tile>
struct TileCopy {
  // A power of two keeps the swizzle of a thread's rows simple; a few threads may be idle.
  static constexpr int kRowStep = min(Tile::kRows, floor_to_power_of_two(kThreads / Tile::kChunks));
  static constexpr int kPasses = Tile::kRows / kRowStep;
  static_assert(kRowStep >= 2 && Tile::kRows % kRowStep == 0);

  CUATTN_DEVICE static int row() { return threadIdx.x / Tile::kChunks; }
  CUATTN_DEVICE static int chunk() { return threadIdx.x % Tile::kChunks; }
  CUATTN_DEVICE static bool is_idle() {
    return kThreads != kRowStep * Tile::kChunks && row() >= kRowStep;
  }

  // The usual case: whole tiles of rows in vectors. `first` is where this thread's chunk of the
  // tile's first row would be. Chunks past the last column are left as they are.
  template <class Element>
  CUATTN_DEVICE static void start(Tile tile, const Element* first, i64 stride_row, int cols) {
    if (is_idle() || chunk() * kChunk >= cols) return;
    const Element* next = first + row() * stride_row;
    const i64 step = kRowStep * stride_row;
    const u32 place = tile.at(row(), chunk());
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass, next += step) {
      const u32 at = kRowStep % 8 == 0 ? place + pass * kRowStep * Tile::kPitch
                                       : tile.at(row() + pass * kRowStep, chunk());
      ptx::async_copy_16(at, next);
    }
  }
  // Zeros in the chunks that `start` leaves.
  CUATTN_DEVICE static void clear_past(Tile tile, int cols) {
    if (is_idle() || chunk() * kChunk < cols) return;
#pragma unroll 1
    for (int r = row(); r < Tile::kRows; r += kRowStep) {
      ptx::store_shared(tile.at(r, chunk()), {0, 0, 0, 0});
    }
  }

  // Any case: rows row_begin... of one head. Rows (of the head) that `wanted` refuses are zeros,
  // and so is what lies past the last column.
  template <Passes kHow = Passes::kRolled, class Element, class Wanted>
  CUATTN_DEVICE static void start_any(Tile tile, const GlobalRows<const Element>& rows,
                                      int row_begin, int cols, Wanted wanted) {
    if (!rows.in_vectors(cols)) {
      gather(tile, rows, row_begin, cols, wanted);
      return;
    }
    if (is_idle()) return;
    const auto start_row = [&](int r, const Element* place) {
      const bool copied = chunk() * kChunk < cols && wanted(row_begin + r);
      ptx::async_copy_16(tile.at(r, chunk()), copied ? place : rows.data, copied);
    };
    if constexpr (kHow == Passes::kRolled) {
#pragma unroll 1
      for (int r = row(); r < Tile::kRows; r += kRowStep) {
        start_row(r, &rows.at(row_begin + r, chunk() * kChunk));
      }
    } else {
      const Element* place = &rows.at(row_begin + row(), chunk() * kChunk);
      const i64 step = kRowStep * rows.stride_row;
#pragma unroll
      for (int r = 0; r < Tile::kRows; r += kRowStep, place += step) start_row(row() + r, place);
    }
  }

 private:
  // Element by element, for rows of any stride and alignment.
  template <class Element, class Wanted>
  CUATTN_DEVICE static void gather(Tile tile, const GlobalRows<const Element>& rows, int row_begin,
                                   int cols, Wanted wanted) {
#pragma unroll 1
    for (int index = threadIdx.x; index < Tile::kRows * Tile::kChunks; index += kThreads) {
      const int r = index / Tile::kChunks, first_col = index % Tile::kChunks * kChunk;
      const bool is_wanted = wanted(row_begin + r);
      u32 pairs[4];
#pragma unroll
      for (int e = 0; e < kChunk; e += 2) {
        const int col = first_col + e;
        u32 low = 0, high = 0;
        if (is_wanted && col < cols) low = rows.at(row_begin + r, col).bits;
        if (is_wanted && col + 1 < cols) high = rows.at(row_begin + r, col + 1).bits;
        pairs[e / 2] = low | high << 16;
      }
      ptx::store_shared(tile.at(r, index % Tile::kChunks), pairs);
    }
  }
};

// Writes a warp's rows of results to rows row_begin... of one head, rounded once. They pass through
// the same rows of `stage`, which nobody else may be using, so that a row is written in vectors.
template <class Results, class Tile, class Element>
CUATTN_DEVICE void store_rows(const Results& results, Tile stage, const GlobalRows<Element>& rows,
                              int row_begin, int row_end, int cols) {
  static_assert(Results::kCols * 4 == Tile::kCols);
  ptx::sync_warp();
#pragma unroll
  for (int i = 0; i < Results::kRows; ++i) {
#pragma unroll
    for (int j = 0; j < Results::kCols; j += 2) {
      const u32 pair = ptx::pack<Element>(results.at(i, j), results.at(i, j + 1));
      ptx::store_shared(stage.at(Results::row_of(i), j / 2) + Results::lane() * 4, pair);
    }
  }
  ptx::sync_warp();
  const bool in_vectors = rows.in_vectors(cols);
  const int first_row = Results::warp_row();
#pragma unroll 1
  for (int index = threadIdx.x % kWarpSize; index < Results::kWarpRows * Tile::kChunks;
       index += kWarpSize) {
    const int row = first_row + index / Tile::kChunks, chunk = index % Tile::kChunks;
    if (row_begin + row >= row_end) continue;
    u32 pairs[4];
    ptx::load_shared(pairs, stage.at(row, chunk));
    if (in_vectors) {
      if (chunk * kChunk < cols) {
        auto& place = rows.at(row_begin + row, chunk * kChunk);
        *reinterpret_cast<uint4*>(&place) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    } else {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        const int col = chunk * kChunk + e;
        if (col < cols) {
          rows.at(row_begin + row, col).bits = static_cast<u16>(pairs[e / 2] >> (e % 2 * 16));
        }
      }
    }
  }
}

// The same for float32 results: straight from the registers, four lanes of a row write 32 bytes.
template <class Results, class Tile>
CUATTN_DEVICE void store_rows(const Results& results, Tile, const GlobalRows<f32>& rows,
                              int row_begin, int row_end, int cols) {
#pragma unroll
  for (int i = 0; i < Results::kRows; ++i) {
    const int row = row_begin + Results::row_of(i);
    if (row >= row_end) continue;
#pragma unroll
    for (int j = 0; j < Results::kCols; ++j) {
      const int col = Results::col_of(j);
      if (col < cols) rows.at(row, col) = results.at(i, j);
    }
  }
}

}  // namespace cuattn::tile
