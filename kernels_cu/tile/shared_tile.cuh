// A padded matrix in shared memory, and how it is filled from global memory. Layer: tile.
//
// Rows are positions (queries or keys), columns are features or the other positions. The padding
// puts what the lanes of one read ask for into different banks: 16 bytes where they read four
// columns each down eight rows (tile/gemm_simt.cuh); 32 bytes where they read eight bytes each,
// four to a row, or one element each of four rows; four elements where the four lanes of a row read
// one element each (tile/gemm_mma.cuh); eight elements where they write one or two each.
#pragma once
#include "base/dtype.cuh"
#include "ptx/convert.cuh"

namespace cuattn::tile {

// Consecutive elements of a row that are moved together, at most 16 bytes at a time.
template <class T, int kSize>
struct alignas(kSize * sizeof(T) < 16 ? kSize * sizeof(T) : 16) Vector {
  T at[kSize];
};
template <class T>
using Pair = Vector<T, 2>;
template <class T>
using Quad = Vector<T, 4>;

template <class T, int kRowCount, int kColCount, int kPadding>
struct SharedTile {
  static constexpr int kRows = kRowCount;
  static constexpr int kCols = kColCount;
  static constexpr int kStride = kCols + kPadding;
  static constexpr int kSize = kRows * kStride;  // elements
  static_assert(kStride * sizeof(T) % 16 == 0, "rows must start on a 16-byte boundary");

  T* data;

  CUATTN_DEVICE T& at(int row, int col) const { return data[row * kStride + col]; }
  template <int kSize>
  CUATTN_DEVICE Vector<T, kSize>& vector(int row, int col) const {
    return *reinterpret_cast<Vector<T, kSize>*>(data + row * kStride + col);
  }
  CUATTN_DEVICE const Pair<T>& pair(int row, int col) const { return vector<2>(row, col); }
  CUATTN_DEVICE const Quad<T>& quad(int row, int col) const { return vector<4>(row, col); }
};

// One head of a tensor: rows are positions, columns are features, 64-bit strides in elements.
template <class T>
struct GlobalRows {
  static constexpr int kVector = 16 / sizeof(T);

  T* data;
  i64 stride_row, stride_col;

  CUATTN_DEVICE GlobalRows(const Tensor& tensor, int batch_idx, int head_idx)
      : data(static_cast<T*>(tensor.data) + batch_idx * tensor.stride_batch +
             head_idx * tensor.stride_head),
        stride_row(tensor.stride_seqlen),
        stride_col(tensor.stride_dim) {}
  CUATTN_DEVICE GlobalRows(T* first, i64 row, i64 col = 1)
      : data(first), stride_row(row), stride_col(col) {}

  CUATTN_DEVICE T& at(int row, int col) const { return data[row * stride_row + col * stride_col]; }

  // Whether rows of this many columns can be read, or written, 16 bytes at a time.
  CUATTN_DEVICE bool in_vectors(int cols) const {
    return stride_col == 1 && cols % kVector == 0 && stride_row % kVector == 0 &&
           reinterpret_cast<u64>(data) % 16 == 0;
  }
};

// `load` below, kVector elements at a time.
template <int kVector, int kThreads, class T, int kRows, int kCols, int kPadding, class Stored,
          class Keep>
CUATTN_DEVICE void load_vectors(SharedTile<T, kRows, kCols, kPadding> tile,
                                const GlobalRows<const Stored>& rows, int row_begin, int row_end,
                                int col_begin, int col_end, Keep keep) {
  constexpr int kPerRow = kCols / kVector, kRowStep = kThreads / kPerRow;
  static_assert(kThreads % kPerRow == 0 && kRows % kRowStep == 0, "a thread keeps its column");
  constexpr int kPasses = kRows / kRowStep;
  constexpr int kTogether = min<int>(kVector, 16 / sizeof(T));
  // So many bytes under way before the first is used; single elements are the rare case, and code.
  constexpr int kMost = (kVector == 1 ? 32 : 64) / int(kVector * sizeof(T));
  constexpr int kInFlight = min(kPasses, kMost);
  static_assert(kPasses % kInFlight == 0);

  const int first_row = threadIdx.x / kPerRow, col = threadIdx.x % kPerRow * kVector;
  const bool col_inside = col_begin + col < col_end;
  const Stored* next = &rows.at(row_begin + first_row, col_begin + col);
  const i64 step = kRowStep * rows.stride_row;
#pragma unroll 1
  for (int row = first_row; row < kRows; row += kInFlight * kRowStep) {
    Vector<Stored, kVector> read[kInFlight];
#pragma unroll
    for (int pass = 0; pass < kInFlight; ++pass, next += step) {
      const int at = row + pass * kRowStep;
      read[pass] = {};
      if (col_inside && row_begin + at < row_end && keep(at)) {
        read[pass] = *reinterpret_cast<const Vector<Stored, kVector>*>(next);
      }
    }
#pragma unroll
    for (int pass = 0; pass < kInFlight; ++pass) {
#pragma unroll
      for (int e = 0; e < kVector; e += kTogether) {
        Vector<T, kTogether> wide;
#pragma unroll
        for (int s = 0; s < kTogether; ++s) wide.at[s] = ptx::widen(read[pass].at[e + s]);
        tile.template vector<kTogether>(row + pass * kRowStep, col + e) = wide;
      }
    }
  }
}

struct KeepAll {
  CUATTN_DEVICE bool operator()(int) const { return true; }
};

// Fills a tile from rows row_begin... and columns col_begin... of one head; what lies at or past
// row_end or col_end, and every row (counted inside the tile) that `keep` refuses, reads as zero.
// All threads of the CTA take part; consecutive threads read consecutive features.
template <int kThreads, class Tile, class Stored, class Keep = KeepAll>
CUATTN_DEVICE void load(Tile tile, const GlobalRows<const Stored>& rows, int row_begin, int row_end,
                        int col_begin, int col_end, Keep keep = {}) {
  if (rows.in_vectors(col_end)) {
    load_vectors<GlobalRows<Stored>::kVector, kThreads>(tile, rows, row_begin, row_end, col_begin,
                                                        col_end, keep);
  } else {
    load_vectors<1, kThreads>(tile, rows, row_begin, row_end, col_begin, col_end, keep);
  }
}

}  // namespace cuattn::tile
