// What Python and CUDA share. Layer: base.
//
// GENERATED from cuattn/abi/structs.py by `python -m cuattn.abi --write`; edit that file instead.
// The asserts at the end compare every offset and size with the NumPy dtype that Python fills, so
// the two sides cannot drift: a difference does not compile.
#pragma once

#include "base/prelude.cuh"

namespace cuattn {

// Element type of an array.
enum class DType : i32 { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2, kFloat64 = 3 };

// What multiplies tiles: ordinary arithmetic units, or tensor cores.
enum class Product : i32 { kFma = 0, kMma = 1 };

// Gradients that a backward kernel writes.
enum Wrt : i32 { kWrtDq = 1, kWrtDk = 2, kWrtDv = 4 };

// A 4-D array in the canonical axes (batch, seqlen, head, dim), any strides.
struct Tensor {
  void* data;         // element (0, 0, 0, 0)
  i64 stride_batch;
  i64 stride_seqlen;
  i64 stride_head;
  i64 stride_dim;
};

// One number per query row, axes (batch, head, seqlen), any strides.
struct Rows {
  void* data;         // element (0, 0, 0), or null where the array is absent
  i64 stride_batch;
  i64 stride_head;
  i64 stride_seqlen;
};

// Sizes of one attention call, and its band: row i sees key j iff lower <= j - i <= upper.
struct Shape {
  i32 batch;
  i32 seqlen_q;
  i32 seqlen_k;
  i32 num_heads_q;   // a multiple of num_heads_kv
  i32 num_heads_kv;
  i32 head_dim;      // of q and k
  i32 head_dim_v;    // of v and out
  i32 band_lower;    // -seqlen_q where the band is open below
  i32 band_upper;    // seqlen_k where the band is open above
};

// What a forward kernel receives, by value.
struct FwdParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  void* lse;          // contiguous (batch, num_heads_q, seqlen_q), natural log; null: not wanted
  void* part_out;     // contiguous float32 (split, batch, num_heads_q, seqlen_q, head_dim_v)
  void* part_lse;     // contiguous float32 (split, batch, num_heads_q, seqlen_q)
  Shape shape;
  i32 num_splits;     // of the keys; 1: out and lse are written at once
  f64 softmax_scale;
};

// What a backward kernel receives, by value; a gradient that is not asked for has no data.
struct BwdParams {
  Tensor q;
  Tensor k;
  Tensor v;
  Tensor out;
  Tensor dout;
  Tensor dq;
  Tensor dk;
  Tensor dv;
  Rows dlse;          // no data: zero
  void* lse;          // contiguous (batch, num_heads_q, seqlen_q), natural log
  void* delta;        // contiguous like lse: rowsum(dout * out) - dlse; null: not used
  i64 dq_sum_size;    // numbers of dq_sum
  void* dq_sum;       // float32 sums of dq in tiles (tile/sum_in_memory.cuh); null: not used
  void* dout_cast;    // contiguous (batch, num_heads_q, seqlen_q, head_dim_v) in q's dtype
  Shape shape;
  f64 softmax_scale;
};

// One specialisation of the portable kernels: a C++20 template argument.
struct SimtConfig {
  DType dtype;          // of q, k, v and the gradients
  DType out_dtype;      // of out and dout
  Product product;
  i32 block_m;          // query rows of a tile
  i32 block_n;          // keys of a tile
  i32 block_d;          // head dims of a tile: a chunk of the sums, a slice of the results
  i32 rows_per_thread;  // of the tile that the thread block owns
  i32 num_lanes;        // threads that share a row
  i32 num_threads;      // of the thread block
  i32 smem_bytes;       // dynamic shared memory
  i32 wrt;              // gradients the kernel writes
};

// One specialisation of the 16-bit kernels for tensor cores: a C++20 template argument.
struct Sm80Config {
  DType dtype;        // of q, k, v and the gradients
  DType out_dtype;    // of out
  i32 block_m;        // query rows of a tile
  i32 block_n;        // keys of a tile
  i32 block_d;        // head dims of a tile: at least head_dim and head_dim_v
  i32 warp_rows;      // of the tile that the thread block owns, for each warp
  i32 num_stages;     // tiles of K and V in shared memory, in a forward
  i32 held_steps;     // 16 dims each of q that stay in registers, in a forward
  i32 rolled_copies;  // 1: those of what the thread block owns, and of out
  i32 num_threads;    // of the thread block
  i32 smem_bytes;     // dynamic shared memory
  i32 wrt;            // gradients the kernel writes
};

// One specialisation of the kernel that merges splits of the keys.
struct MergeConfig {
  DType dtype;      // of q, k and v
  DType out_dtype;  // of out
  i32 block_d;      // at least head_dim_v
  i32 num_threads;  // of the thread block
};

// One specialisation of the kernel that comes first in a backward.
struct PrepareConfig {
  DType dtype;          // of q, k and v
  DType out_dtype;      // of out and dout
  i32 casts_dout;       // 1: writes dout_cast
  i32 rows_per_thread;  // query rows that a thread works for, one after another
  i32 num_threads;      // of the thread block
};

// The layout as NumPy sees it.
static_assert(sizeof(Tensor) == 40);
static_assert(alignof(Tensor) == 8);
static_assert(CUATTN_OFFSETOF(Tensor, data) == 0);
static_assert(CUATTN_OFFSETOF(Tensor, stride_batch) == 8);
static_assert(CUATTN_OFFSETOF(Tensor, stride_seqlen) == 16);
static_assert(CUATTN_OFFSETOF(Tensor, stride_head) == 24);
static_assert(CUATTN_OFFSETOF(Tensor, stride_dim) == 32);
static_assert(sizeof(Rows) == 32);
static_assert(alignof(Rows) == 8);
static_assert(CUATTN_OFFSETOF(Rows, data) == 0);
static_assert(CUATTN_OFFSETOF(Rows, stride_batch) == 8);
static_assert(CUATTN_OFFSETOF(Rows, stride_head) == 16);
static_assert(CUATTN_OFFSETOF(Rows, stride_seqlen) == 24);
static_assert(sizeof(Shape) == 36);
static_assert(alignof(Shape) == 4);
static_assert(CUATTN_OFFSETOF(Shape, batch) == 0);
static_assert(CUATTN_OFFSETOF(Shape, seqlen_q) == 4);
static_assert(CUATTN_OFFSETOF(Shape, seqlen_k) == 8);
static_assert(CUATTN_OFFSETOF(Shape, num_heads_q) == 12);
static_assert(CUATTN_OFFSETOF(Shape, num_heads_kv) == 16);
static_assert(CUATTN_OFFSETOF(Shape, head_dim) == 20);
static_assert(CUATTN_OFFSETOF(Shape, head_dim_v) == 24);
static_assert(CUATTN_OFFSETOF(Shape, band_lower) == 28);
static_assert(CUATTN_OFFSETOF(Shape, band_upper) == 32);
static_assert(sizeof(FwdParams) == 232);
static_assert(alignof(FwdParams) == 8);
static_assert(CUATTN_OFFSETOF(FwdParams, q) == 0);
static_assert(CUATTN_OFFSETOF(FwdParams, k) == 40);
static_assert(CUATTN_OFFSETOF(FwdParams, v) == 80);
static_assert(CUATTN_OFFSETOF(FwdParams, out) == 120);
static_assert(CUATTN_OFFSETOF(FwdParams, lse) == 160);
static_assert(CUATTN_OFFSETOF(FwdParams, part_out) == 168);
static_assert(CUATTN_OFFSETOF(FwdParams, part_lse) == 176);
static_assert(CUATTN_OFFSETOF(FwdParams, shape) == 184);
static_assert(CUATTN_OFFSETOF(FwdParams, num_splits) == 220);
static_assert(CUATTN_OFFSETOF(FwdParams, softmax_scale) == 224);
static_assert(sizeof(BwdParams) == 440);
static_assert(alignof(BwdParams) == 8);
static_assert(CUATTN_OFFSETOF(BwdParams, q) == 0);
static_assert(CUATTN_OFFSETOF(BwdParams, k) == 40);
static_assert(CUATTN_OFFSETOF(BwdParams, v) == 80);
static_assert(CUATTN_OFFSETOF(BwdParams, out) == 120);
static_assert(CUATTN_OFFSETOF(BwdParams, dout) == 160);
static_assert(CUATTN_OFFSETOF(BwdParams, dq) == 200);
static_assert(CUATTN_OFFSETOF(BwdParams, dk) == 240);
static_assert(CUATTN_OFFSETOF(BwdParams, dv) == 280);
static_assert(CUATTN_OFFSETOF(BwdParams, dlse) == 320);
static_assert(CUATTN_OFFSETOF(BwdParams, lse) == 352);
static_assert(CUATTN_OFFSETOF(BwdParams, delta) == 360);
static_assert(CUATTN_OFFSETOF(BwdParams, dq_sum_size) == 368);
static_assert(CUATTN_OFFSETOF(BwdParams, dq_sum) == 376);
static_assert(CUATTN_OFFSETOF(BwdParams, dout_cast) == 384);
static_assert(CUATTN_OFFSETOF(BwdParams, shape) == 392);
static_assert(CUATTN_OFFSETOF(BwdParams, softmax_scale) == 432);
static_assert(sizeof(SimtConfig) == 44);
static_assert(alignof(SimtConfig) == 4);
static_assert(CUATTN_OFFSETOF(SimtConfig, dtype) == 0);
static_assert(CUATTN_OFFSETOF(SimtConfig, out_dtype) == 4);
static_assert(CUATTN_OFFSETOF(SimtConfig, product) == 8);
static_assert(CUATTN_OFFSETOF(SimtConfig, block_m) == 12);
static_assert(CUATTN_OFFSETOF(SimtConfig, block_n) == 16);
static_assert(CUATTN_OFFSETOF(SimtConfig, block_d) == 20);
static_assert(CUATTN_OFFSETOF(SimtConfig, rows_per_thread) == 24);
static_assert(CUATTN_OFFSETOF(SimtConfig, num_lanes) == 28);
static_assert(CUATTN_OFFSETOF(SimtConfig, num_threads) == 32);
static_assert(CUATTN_OFFSETOF(SimtConfig, smem_bytes) == 36);
static_assert(CUATTN_OFFSETOF(SimtConfig, wrt) == 40);
static_assert(sizeof(Sm80Config) == 48);
static_assert(alignof(Sm80Config) == 4);
static_assert(CUATTN_OFFSETOF(Sm80Config, dtype) == 0);
static_assert(CUATTN_OFFSETOF(Sm80Config, out_dtype) == 4);
static_assert(CUATTN_OFFSETOF(Sm80Config, block_m) == 8);
static_assert(CUATTN_OFFSETOF(Sm80Config, block_n) == 12);
static_assert(CUATTN_OFFSETOF(Sm80Config, block_d) == 16);
static_assert(CUATTN_OFFSETOF(Sm80Config, warp_rows) == 20);
static_assert(CUATTN_OFFSETOF(Sm80Config, num_stages) == 24);
static_assert(CUATTN_OFFSETOF(Sm80Config, held_steps) == 28);
static_assert(CUATTN_OFFSETOF(Sm80Config, rolled_copies) == 32);
static_assert(CUATTN_OFFSETOF(Sm80Config, num_threads) == 36);
static_assert(CUATTN_OFFSETOF(Sm80Config, smem_bytes) == 40);
static_assert(CUATTN_OFFSETOF(Sm80Config, wrt) == 44);
static_assert(sizeof(MergeConfig) == 16);
static_assert(alignof(MergeConfig) == 4);
static_assert(CUATTN_OFFSETOF(MergeConfig, dtype) == 0);
static_assert(CUATTN_OFFSETOF(MergeConfig, out_dtype) == 4);
static_assert(CUATTN_OFFSETOF(MergeConfig, block_d) == 8);
static_assert(CUATTN_OFFSETOF(MergeConfig, num_threads) == 12);
static_assert(sizeof(PrepareConfig) == 20);
static_assert(alignof(PrepareConfig) == 4);
static_assert(CUATTN_OFFSETOF(PrepareConfig, dtype) == 0);
static_assert(CUATTN_OFFSETOF(PrepareConfig, out_dtype) == 4);
static_assert(CUATTN_OFFSETOF(PrepareConfig, casts_dout) == 8);
static_assert(CUATTN_OFFSETOF(PrepareConfig, rows_per_thread) == 12);
static_assert(CUATTN_OFFSETOF(PrepareConfig, num_threads) == 16);

}  // namespace cuattn
