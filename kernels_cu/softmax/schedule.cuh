// The one schedule, in its range form: which tiles exist, and which need the element rule.
// Layer: softmax; architecture-free. cuattn/planning/schedule.py is this file in Python, with the
// same names; a test walks both.
//
// Key j and row i see each other when band_lower <= j - i <= band_upper. A tile of block_m rows by
// block_n keys is absent (not in the range), FULL, or PARTIAL.
#pragma once
#include "base/abi.cuh"
#include "base/prelude.cuh"

namespace cuattn::softmax {

enum class TileKind { kPartial, kFull };

struct Range {
  int begin, end;

  CUATTN_DEVICE Range operator-(int origin) const { return {begin - origin, end - origin}; }
  // One of several parts of about the same length, in order.
  CUATTN_DEVICE Range part(int index, int count) const {
    const int length = ceil_div(end - begin, count);
    const int first = min(end, begin + index * length);
    return {first, min(end, first + length)};
  }
};

struct RangeSchedule {
  int seqlen_q, seqlen_k, lower, upper;
  int block_m, block_n;

  CUATTN_DEVICE RangeSchedule(const Shape& shape, int m, int n)
      : seqlen_q(shape.seqlen_q),
        seqlen_k(shape.seqlen_k),
        lower(shape.band_lower),
        upper(shape.band_upper),
        block_m(m),
        block_n(n) {}

  // The element rule: the keys that a row sees, and the rows that see a key; nobody sees a key past
  // the end.
  CUATTN_DEVICE Range keys_of(int row) const {
    return {row + lower, min(seqlen_k, row + upper + 1)};
  }
  CUATTN_DEVICE Range rows_of(int key) const {
    return {key - upper, key < seqlen_k ? key - lower + 1 : key - upper};
  }

  CUATTN_DEVICE Range rows(int m_block) const {
    return {m_block * block_m, min(m_block * block_m + block_m, seqlen_q)};
  }
  CUATTN_DEVICE Range keys(int n_block) const {
    return {n_block * block_n, min(n_block * block_n + block_n, seqlen_k)};
  }

  // Keys outside of which no row of the query tile sees anything.
  CUATTN_DEVICE Range key_range(int m_block) const {
    const Range row = rows(m_block);
    const int begin = max(0, row.begin + lower);
    return {begin, max(begin, min(seqlen_k, row.end + upper))};
  }
  // Rows outside of which no key of the key tile is seen by anything.
  CUATTN_DEVICE Range row_range(int n_block) const {
    const Range key = keys(n_block);
    const int begin = max(0, key.begin - upper);
    return {begin, max(begin, min(seqlen_q, key.end - lower))};
  }

  // Tiles that a query tile visits, and the transpose.
  CUATTN_DEVICE Range key_tiles(int m_block) const { return tiles(key_range(m_block), block_n); }
  CUATTN_DEVICE Range query_tiles(int n_block) const { return tiles(row_range(n_block), block_m); }

  // FULL when no key is past the end and the tile's two outer corners are in the band.
  CUATTN_DEVICE TileKind kind(int m_block, int n_block) const {
    const Range row = rows(m_block);
    const int key_begin = n_block * block_n, key_end = key_begin + block_n;
    const bool full = key_end <= seqlen_k && key_end - 1 - row.begin <= upper &&
                      key_begin - (row.end - 1) >= lower;
    return full ? TileKind::kFull : TileKind::kPartial;
  }

  CUATTN_DEVICE static Range tiles(Range range, int block) {
    if (range.begin == range.end) return {0, 0};
    return {range.begin / block, (range.end + block - 1) / block};
  }
};

}  // namespace cuattn::softmax
