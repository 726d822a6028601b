// How the loops for sm_80 and later fetch what passes: two tensors' rows together, K with V or Q
// with dO. Layer: mainloop.
#pragma once
#include "mainloop/work.cuh"
#include "tile/swizzled_tile.cuh"

namespace cuattn::mainloop {

// The usual case - rows in vectors, a whole tile wanted - takes few instructions and two pointers
// through a loop; any other works everything out anew and takes its time.
template <int kThreads, class Tile, class Element>
struct PairCopy {
  using Rows = tile::GlobalRows<const Element>;
  using Copy = tile::TileCopy<kThreads, Tile>;
  enum Part { kFirst = 1, kSecond = 2, kBoth = 3 };

  Rows first, second;  // this thread's chunk of the first row of the tile that is next
  int first_cols, second_cols;

  CUATTN_DEVICE PairCopy(const Rows& a, int a_cols, const Rows& b, int b_cols, int row_begin)
      : first(a), second(b), first_cols(a_cols), second_cols(b_cols) {
    first.data += Copy::chunk() * tile::kChunk + row_begin * first.stride_row;
    second.data += Copy::chunk() * tile::kChunk + row_begin * second.stride_row;
  }

  CUATTN_DEVICE static bool is_usual(const Rows& a, int a_cols, const Rows& b, int b_cols) {
    return a.in_vectors(a_cols) && b.in_vectors(b_cols);
  }

  template <Part kPart>
  CUATTN_DEVICE void start(Tile a, Tile b) const {
    if (kPart & kFirst) Copy::start(a, first.data, first.stride_row, first_cols);
    if (kPart & kSecond) Copy::start(b, second.data, second.stride_row, second_cols);
  }
  // Goes to the tile that lies so many rows after.
  template <Part kPart>
  CUATTN_DEVICE void advance(int num_rows) {
    if (kPart & kFirst) first.data += num_rows * first.stride_row;
    if (kPart & kSecond) second.data += num_rows * second.stride_row;
  }
  CUATTN_DEVICE void clear_past(Tile a, Tile b) const {
    Copy::clear_past(a, first_cols);
    Copy::clear_past(b, second_cols);
  }
  template <Part kPart, tile::Passes kHow = tile::Passes::kRolled, class Wanted>
  CUATTN_DEVICE static void start_any(Tile a, Rows first, int first_cols, Tile b, Rows second,
                                      int second_cols, int row_begin, Wanted wanted) {
    if constexpr (kHow == tile::Passes::kUnrolled) {
      static_assert(kPart == kBoth);
      Copy::template start_any<kHow>(a, first, row_begin, first_cols, wanted);
      Copy::template start_any<kHow>(b, second, row_begin, second_cols, wanted);
      return;
    }
#pragma unroll 1
    for (int i = kPart == kSecond; i < (kPart == kFirst ? 1 : 2); ++i) {
      Copy::start_any(
          Tile{i == 0 ? a.address : b.address},
          Rows(i == 0 ? first.data : second.data, i == 0 ? first.stride_row : second.stride_row,
               i == 0 ? first.stride_col : second.stride_col),
          row_begin, i == 0 ? first_cols : second_cols, wanted);
    }
  }
};

// K and V of one head as they pass a CTA that owns queries, from the last tile to the first,
// through stages of shared memory. work_of() says anew which head that is.
template <int kThreads, class Tile, class Element, class WorkOf>
struct KeyStream {
  using Copy = PairCopy<kThreads, Tile, Element>;
  using Rows = typename Copy::Rows;
  using Part = typename Copy::Part;

  u32 shared;
  const Tensor &k, &v;
  const Shape& shape;
  WorkOf work_of;
  int key_end;
  bool is_usual;
  Copy copy;

  CUATTN_DEVICE KeyStream(u32 first_stage, const Tensor& its_k, const Tensor& its_v,
                          const Shape& its_shape, int last_tile, int end, WorkOf its_work)
      : shared(first_stage),
        k(its_k),
        v(its_v),
        shape(its_shape),
        work_of(its_work),
        key_end(end),
        is_usual(Copy::is_usual(rows(k), shape.head_dim, rows(v), shape.head_dim_v)),
        copy(rows(k), shape.head_dim, rows(v), shape.head_dim_v, last_tile * Tile::kRows) {}

  CUATTN_DEVICE Rows rows(const Tensor& tensor) const {
    const Work work = work_of();
    return {tensor, work.batch_idx, work.head_idx / (shape.num_heads_q / shape.num_heads_kv)};
  }
  CUATTN_DEVICE Tile sK(int stage) const { return {shared + stage * 2 * Tile::kBytes}; }
  CUATTN_DEVICE Tile sV(int stage) const { return {sK(stage).address + Tile::kBytes}; }

  CUATTN_DEVICE void clear_past(int stage) const {
    if (is_usual) copy.clear_past(sK(stage), sV(stage));
  }
  // Starts the copies of K, of V or of both of a tile, the one before the last that was asked for.
  template <Part kPart>
  CUATTN_DEVICE void start(int n_block, int stage) {
    const int key_begin = n_block * Tile::kRows;
    if (is_usual && key_begin + Tile::kRows <= key_end) {
      copy.template start<kPart>(sK(stage), sV(stage));
    } else {
      Copy::template start_any<kPart>(sK(stage), rows(k), shape.head_dim, sV(stage), rows(v),
                                      shape.head_dim_v, key_begin,
                                      [&](int key) { return key < key_end; });
    }
    copy.template advance<kPart>(-Tile::kRows);
    ptx::async_commit();
  }
};

}  // namespace cuattn::mainloop
