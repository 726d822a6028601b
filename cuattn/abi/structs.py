"""Every enum, configuration and parameter struct that Python and CUDA share, declared once.

Adding a field is one line here, then ``python -m cuattn.abi --write``. Sizes count elements unless
a doc line says bytes.
"""

from __future__ import annotations

import enum

from cuattn.abi.types import F64, I32, I64, PTR, Enum, Field, Struct


class DType(enum.IntEnum):
    """Element type of an array."""

    Float16 = 0
    BFloat16 = 1
    Float32 = 2
    Float64 = 3

    @classmethod
    def of(cls, name: str) -> DType:
        """Look up the member of a NumPy dtype name, as ``DType.of("bfloat16")``."""
        return next(member for member in cls if member.name.lower() == name)


class Product(enum.IntEnum):
    """What multiplies tiles: ordinary arithmetic units, or tensor cores."""

    Fma = 0
    Mma = 1


class Wrt(enum.IntFlag, boundary=enum.STRICT):
    """Gradients that a backward kernel writes."""

    Dq = 1
    Dk = 2
    Dv = 4


DTYPE = Enum(DType)
PRODUCT = Enum(Product)
WRT = Enum(Wrt)

Tensor = Struct(
    "Tensor",
    "A 4-D array in the canonical axes (batch, seqlen, head, dim), any strides.",
    Field("data", PTR, "element (0, 0, 0, 0)"),
    Field("stride_batch", I64, ""),
    Field("stride_seqlen", I64, ""),
    Field("stride_head", I64, ""),
    Field("stride_dim", I64, ""),
)

Rows = Struct(
    "Rows",
    "One number per query row, axes (batch, head, seqlen), any strides.",
    Field("data", PTR, "element (0, 0, 0), or null where the array is absent"),
    Field("stride_batch", I64, ""),
    Field("stride_head", I64, ""),
    Field("stride_seqlen", I64, ""),
)

Shape = Struct(
    "Shape",
    "Sizes of one attention call, and its band: row i sees key j iff lower <= j - i <= upper.",
    Field("batch", I32, ""),
    Field("seqlen_q", I32, ""),
    Field("seqlen_k", I32, ""),
    Field("num_heads_q", I32, "a multiple of num_heads_kv"),
    Field("num_heads_kv", I32, ""),
    Field("head_dim", I32, "of q and k"),
    Field("head_dim_v", I32, "of v and out"),
    Field("band_lower", I32, "-seqlen_q where the band is open below"),
    Field("band_upper", I32, "seqlen_k where the band is open above"),
)

FwdParams = Struct(
    "FwdParams",
    "What a forward kernel receives, by value.",
    Field("q", Tensor, ""),
    Field("k", Tensor, ""),
    Field("v", Tensor, ""),
    Field("out", Tensor, ""),
    Field("lse", PTR, "contiguous (batch, num_heads_q, seqlen_q), natural log; null: not wanted"),
    Field("part_out", PTR, "contiguous float32 (split, batch, num_heads_q, seqlen_q, head_dim_v)"),
    Field("part_lse", PTR, "contiguous float32 (split, batch, num_heads_q, seqlen_q)"),
    Field("shape", Shape, ""),
    Field("num_splits", I32, "of the keys; 1: out and lse are written at once"),
    Field("softmax_scale", F64, ""),
)

BwdParams = Struct(
    "BwdParams",
    "What a backward kernel receives, by value; a gradient that is not asked for has no data.",
    Field("q", Tensor, ""),
    Field("k", Tensor, ""),
    Field("v", Tensor, ""),
    Field("out", Tensor, ""),
    Field("dout", Tensor, ""),
    Field("dq", Tensor, ""),
    Field("dk", Tensor, ""),
    Field("dv", Tensor, ""),
    Field("dlse", Rows, "no data: zero"),
    Field("lse", PTR, "contiguous (batch, num_heads_q, seqlen_q), natural log"),
    Field("delta", PTR, "contiguous like lse: rowsum(dout * out) - dlse; null: not used"),
    Field("dq_sum_size", I64, "numbers of dq_sum"),
    Field("dq_sum", PTR, "float32 sums of dq in tiles (tile/sum_in_memory.cuh); null: not used"),
    Field("dout_cast", PTR, "contiguous (batch, num_heads_q, seqlen_q, head_dim_v) in q's dtype"),
    Field("shape", Shape, ""),
    Field("softmax_scale", F64, ""),
)

SimtConfig = Struct(
    "SimtConfig",
    "One specialisation of the portable kernels: a C++20 template argument.",
    Field("dtype", DTYPE, "of q, k, v and the gradients"),
    Field("out_dtype", DTYPE, "of out and dout"),
    Field("product", PRODUCT, ""),
    Field("block_m", I32, "query rows of a tile"),
    Field("block_n", I32, "keys of a tile"),
    Field("block_d", I32, "head dims of a tile: a chunk of the sums, a slice of the results"),
    Field("rows_per_thread", I32, "of the tile that the thread block owns"),
    Field("num_lanes", I32, "threads that share a row"),
    Field("num_threads", I32, "of the thread block"),
    Field("smem_bytes", I32, "dynamic shared memory"),
    Field("wrt", WRT, "gradients the kernel writes"),
)

Sm80Config = Struct(
    "Sm80Config",
    "One specialisation of the 16-bit kernels for tensor cores: a C++20 template argument.",
    Field("dtype", DTYPE, "of q, k, v and the gradients"),
    Field("out_dtype", DTYPE, "of out"),
    Field("block_m", I32, "query rows of a tile"),
    Field("block_n", I32, "keys of a tile"),
    Field("block_d", I32, "head dims of a tile: at least head_dim and head_dim_v"),
    Field("warp_rows", I32, "of the tile that the thread block owns, for each warp"),
    Field("num_stages", I32, "tiles of K and V in shared memory, in a forward"),
    Field("held_steps", I32, "16 dims each of q that stay in registers, in a forward"),
    Field("rolled_copies", I32, "1: those of what the thread block owns, and of out"),
    Field("num_threads", I32, "of the thread block"),
    Field("smem_bytes", I32, "dynamic shared memory"),
    Field("wrt", WRT, "gradients the kernel writes"),
)

MergeConfig = Struct(
    "MergeConfig",
    "One specialisation of the kernel that merges splits of the keys.",
    Field("dtype", DTYPE, "of q, k and v"),
    Field("out_dtype", DTYPE, "of out"),
    Field("block_d", I32, "at least head_dim_v"),
    Field("num_threads", I32, "of the thread block"),
)

PrepareConfig = Struct(
    "PrepareConfig",
    "One specialisation of the kernel that comes first in a backward.",
    Field("dtype", DTYPE, "of q, k and v"),
    Field("out_dtype", DTYPE, "of out and dout"),
    Field("casts_dout", I32, "1: writes dout_cast"),
    Field("rows_per_thread", I32, "query rows that a thread works for, one after another"),
    Field("num_threads", I32, "of the thread block"),
)

ENUMS = (DTYPE, PRODUCT, WRT)
#: What a kernel receives, behind what that is made of.
PARAMS = (Tensor, Rows, Shape, FwdParams, BwdParams)
STRUCTS = (
    *PARAMS,
    *(SimtConfig, Sm80Config, MergeConfig, PrepareConfig),
)
