"""Tile shapes, each with the measurement that chose it; the one place where sizes are numbers.

A family's ``choose_tile`` says how a row is chosen. In ``TILES``, TFLOP/s count the
products that a kernel does (2 forward, 3 for dq, 4 for dk and dv). Measured on one H200, NVRTC
13.0, batch 1, 8 heads, seqlen 4096, head_dim 64, full, 2026-11-29, all before masks came to know
the span of a row. On tensor cores the first number of a table is of the kernel as it was then, the
others are from before its products did two steps at a time, which gained 0 to 17 %; simt's are all
from before the longest tiles came first. A row without a number serves devices with less shared
memory, and problems with too few tiles for the device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """One shape of a kernel. ``num_lanes`` threads share a row of the tile that a block owns."""

    block_m: int
    block_n: int
    block_d: int
    rows_per_thread: int
    num_lanes: int
    min_blocks: int  # blocks that an SM must be able to hold: bounds the registers of a thread


#: By family, kernel and accumulator, the largest tile first; the last one fits every device.
TILES: dict[tuple[str, str, str], tuple[Tile, ...]] = {
    ("simt", "fwd", "float32"): (
        Tile(128, 64, 64, 8, 8, 2),  # 37.2; 128 x 128 on 256 threads 32.1, 64 x 64 29.1
        Tile(64, 32, 64, 4, 8, 2),
        Tile(32, 32, 64, 4, 8, 2),
    ),
    ("simt", "fwd", "float64"): (
        Tile(64, 32, 64, 4, 8, 2),  # 12.6; 64 x 64 on 256 threads 10.8, block_d 32 7.5
        Tile(32, 32, 32, 4, 8, 2),
    ),
    ("simt", "bwd_q", "float32"): (
        Tile(128, 32, 64, 8, 8, 2),  # 36.1; 128 x 64 on 256 threads 31.2, 64 x 64 30.6
        Tile(64, 32, 64, 4, 8, 2),
        Tile(32, 32, 64, 4, 8, 2),
    ),
    ("simt", "bwd_q", "float64"): (
        Tile(64, 64, 64, 4, 16, 1),  # the whole backward 9.6 ms, with 64 x 32 on 128 threads 10.7
        Tile(64, 32, 64, 4, 16, 1),  # on 128 threads 10.5, with a spill; block_d 32 6.2
        Tile(32, 32, 32, 4, 8, 2),
    ),
    ("simt", "bwd_kv", "float32"): (
        Tile(32, 128, 64, 8, 8, 2),  # 36.7; 64 x 128 on 256 threads 29.9, 64 x 64 27.4
        Tile(32, 64, 64, 4, 8, 2),
        Tile(32, 32, 64, 4, 8, 2),
    ),
    ("simt", "bwd_kv", "float64"): (
        Tile(64, 64, 64, 4, 16, 1),  # 12.4
        Tile(32, 64, 64, 4, 16, 1),  # 11.0; block_d 32 on 128 threads 7.4
        Tile(32, 32, 32, 4, 8, 2),
    ),
    ("tf32x3", "fwd", "float32"): (
        Tile(128, 64, 64, 4, 4, 2),  # 50.8; 64 x 64 on 128 threads 37.6, on 64 threads 32.3
        Tile(64, 32, 64, 2, 4, 3),
        Tile(32, 32, 64, 2, 4, 3),
    ),
    ("tf32x3", "bwd_q", "float32"): (
        Tile(128, 32, 64, 4, 4, 2),  # 52.3; 64 x 64 on 64 threads 21.9, with spills
        Tile(64, 64, 64, 2, 4, 2),
        Tile(32, 32, 64, 2, 4, 2),
    ),
    ("tf32x3", "bwd_kv", "float32"): (
        Tile(32, 128, 64, 4, 4, 2),  # 50.1; 64 x 64 on 64 threads 25.7, with spills
        Tile(64, 64, 64, 2, 4, 2),
        Tile(32, 32, 64, 2, 4, 2),
    ),
    ("dmma", "fwd", "float64"): (
        Tile(128, 64, 64, 2, 4, 1),  # 26.6; 128 x 32 23.9, 64 x 64 14.0
        Tile(64, 32, 64, 2, 4, 2),  # 23.4
        Tile(32, 32, 64, 2, 4, 2),
    ),
    ("dmma", "bwd_q", "float64"): (
        Tile(128, 32, 64, 2, 4, 1),  # 31.8; 64 x 64 9.3, with spills
        Tile(64, 32, 64, 2, 4, 1),  # 17.0
        Tile(32, 32, 64, 2, 4, 1),
    ),
    ("dmma", "bwd_kv", "float64"): (
        Tile(32, 128, 64, 2, 4, 1),  # 31.4; 64 x 64 15.3, with spills
        Tile(32, 64, 64, 2, 4, 1),  # 16.3
        Tile(32, 32, 64, 2, 4, 1),
    ),
}


#: SMs of the device that SM80_TILES was measured on, and keys and queries of a head.
TABLE_SMS, TABLE_SEQLEN = 132, 4096

#: Head dims that the sm80 kernels compute; a problem takes the first that holds its own.
BUCKETS = (32, 64, 96, 128, 192, 256)

#: Kernels whose blocks own queries, while keys pass; with the others it is the other way round.
OWNS_QUERIES = ("fwd", "bwd_q")


@dataclass(frozen=True, slots=True)
class Sm80Tile:
    """One shape of an sm80 kernel; ``warp_rows`` of the tile that a block owns are a warp's."""

    block_m: int
    block_n: int
    warp_rows: int
    min_blocks: int  # blocks that an SM must be able to hold: bounds the registers of a thread
    tflops: int = 0  # as measured, for the choice among the rows; 0: another rule chooses
    held_steps: int = 0  # 16 dims each of q that stay in registers, in a forward
    num_stages: int = 2  # tiles of K and V in shared memory, in a forward
    max_spill_bytes: int = 0  # what may go to local memory where all registers are taken
    rolled_copies: bool = False  # of what a block owns, and of out: unrolled they slow the loop

    def own(self, kernel: str) -> int:
        """Positions that a block owns: keys in the backward over keys, queries elsewhere."""
        return self.block_m if kernel in OWNS_QUERIES else self.block_n


#: By kernel and bucket, the largest tile first, and the last one fits every device; bwd_both has
#: another order, and it and bwd_one may have none that fits. A row's number and those beside it are
#: TFLOP/s on one H200, NVRTC 13.0, bfloat16, 16,384 tokens, hidden size about 2048, seqlen 4096,
#: full, 2026-11-29 and 30, the alternatives of a line in turn; a backward counts 2.5 times its
#: forward, bwd_q 1.5 times (with the kernel that computes delta). Between lines the clock may have
#: changed; the rows of fwd have theirs from one run, those beside them are older. What else was
#: tried is in kernels_cu/TUNING.md.
SM80_TILES: dict[tuple[str, int], tuple[Sm80Tile, ...]] = {
    ("fwd", 32): (
        # beside 234: two blocks an SM 205, 128 x 128 231
        Sm80Tile(128, 64, 32, 3, 236, held_steps=2),
        Sm80Tile(64, 64, 16, 2, 206, held_steps=2),
        Sm80Tile(32, 32, 32, 16, 193),
    ),
    ("fwd", 64): (
        Sm80Tile(128, 128, 32, 2, 326, num_stages=1, max_spill_bytes=128),  # two stages 325
        Sm80Tile(64, 64, 16, 2, 271, held_steps=4),
        Sm80Tile(32, 32, 32, 12, 232, num_stages=1),
    ),
    ("fwd", 96): (
        Sm80Tile(128, 64, 32, 2, 346),  # beside 352: 128 x 96 347, two steps held 346
        Sm80Tile(64, 64, 16, 3, 301, held_steps=6),
        Sm80Tile(32, 32, 16, 8, 231, num_stages=1, max_spill_bytes=128),
    ),
    ("fwd", 128): (
        Sm80Tile(128, 64, 32, 2, 365, max_spill_bytes=128),  # beside 377: one stage 364
        Sm80Tile(64, 64, 16, 2, 303, held_steps=8),
        Sm80Tile(32, 32, 16, 8, 240, num_stages=1, max_spill_bytes=128),
    ),
    # Beside 128 x 64 in one block an SM: better at most lengths, and much so at short ones.
    ("fwd", 192): (
        # beside 334: 8 steps 327, 128 x 64 320
        Sm80Tile(64, 64, 16, 2, 324, held_steps=12, num_stages=1),
        Sm80Tile(32, 32, 16, 6, 240, num_stages=1, max_spill_bytes=128),
    ),
    ("fwd", 256): (
        # beside 328: 128 x 64 331; 128 x 128 332, but slower to seqlen 1024
        Sm80Tile(64, 64, 16, 2, 305, held_steps=8, num_stages=1, max_spill_bytes=128),
        Sm80Tile(32, 32, 16, 4, 253, num_stages=1),
    ),
    ("bwd", 32): (
        # 128 queries in one block an SM 209
        Sm80Tile(64, 128, 32, 2, 223, max_spill_bytes=128, rolled_copies=True),
        Sm80Tile(64, 64, 16, 2, 180, rolled_copies=True),  # one block an SM 121
    ),
    ("bwd", 64): (
        Sm80Tile(128, 128, 32, 1, 277, max_spill_bytes=128),  # 64 queries 239
        Sm80Tile(64, 64, 16, 2, 234),  # one block an SM 176
    ),
    ("bwd", 96): (
        Sm80Tile(64, 128, 32, 1, 280),
        Sm80Tile(64, 64, 16, 2, 246, max_spill_bytes=128),  # one block an SM 208
    ),
    ("bwd", 128): (
        Sm80Tile(64, 128, 32, 1, 314, max_spill_bytes=128),
        Sm80Tile(32, 128, 32, 1, 266),
        Sm80Tile(32, 64, 16, 1, 180),
    ),
    ("bwd", 192): (
        Sm80Tile(64, 64, 16, 1, 262),
        Sm80Tile(32, 64, 16, 1, 221),
        Sm80Tile(16, 32, 16, 2, 172),
    ),
    ("bwd", 256): (
        Sm80Tile(64, 64, 16, 1, 271, max_spill_bytes=128, rolled_copies=True),
        Sm80Tile(32, 64, 16, 1, 235),
        Sm80Tile(16, 32, 16, 2, 181),
    ),
    # Where one tile holds all keys: microseconds of a backward of as many keys as queries (128, 64
    # and 32 of them), and last those of the three kernels of "bwd".
    ("bwd_one", 32): (
        Sm80Tile(64, 128, 32, 2, max_spill_bytes=128),  # 391; 477
        Sm80Tile(64, 64, 32, 4, max_spill_bytes=128),  # 256, 32 queries 274; 498; since then 266
        Sm80Tile(32, 32, 32, 8),  # 216, of 64 x 64 528; 888
    ),
    ("bwd_one", 64): (
        Sm80Tile(32, 128, 32, 2, max_spill_bytes=128),  # 324, 128 queries 352; 469
        # 215, three blocks an SM 236, 64 queries 256; 384
        Sm80Tile(32, 64, 32, 4, max_spill_bytes=128),
        Sm80Tile(32, 32, 32, 6),  # 187, with 16 rows a warp 217; 684
    ),
    ("bwd_one", 96): (
        Sm80Tile(64, 128, 32, 1),  # 325; 426
        Sm80Tile(64, 64, 16, 2, max_spill_bytes=128),  # 225, with 32 rows a warp 233; 372
        Sm80Tile(32, 32, 16, 3),  # 204, with 32 rows a warp 203; 639
    ),
    ("bwd_one", 128): (
        Sm80Tile(64, 128, 32, 1, max_spill_bytes=128),  # 288; 390
        Sm80Tile(32, 64, 32, 2),  # 228; 413
        Sm80Tile(32, 32, 16, 3),  # 187, with 32 rows a warp 227; 526
    ),
    ("bwd_one", 192): (
        Sm80Tile(64, 64, 16, 1),  # 236; 357
        Sm80Tile(32, 32, 16, 2),  # 203; 338
    ),
    ("bwd_one", 256): (
        Sm80Tile(32, 64, 16, 1),  # 264; 360
        Sm80Tile(32, 32, 16, 1),  # 309, of 32 x 64 335; 347
    ),
    # Where the blocks of both loops fit the device at once: microseconds of a backward of as many
    # keys as queries, and last those of three kernels; 4 heads of 256, then 32 of 256 (16 at
    # head_dim 192), then 64 of 192. The first row that fits is taken.
    ("bwd_both", 32): (
        Sm80Tile(64, 64, 16, 1, rolled_copies=True),  # 10.7, 32 x 32 12.4; 15.4
        Sm80Tile(64, 128, 32, 1, rolled_copies=True),  # 12.4; 16.1
        Sm80Tile(32, 64, 32, 4, rolled_copies=True),  # 15.1; 16.8
    ),
    ("bwd_both", 64): (
        Sm80Tile(64, 64, 16, 1),  # 14.1, 32 x 64 16.6, 32 x 32 15.4; 17.9
        Sm80Tile(64, 128, 32, 1),  # 16.0; 19.0
        Sm80Tile(32, 64, 32, 3),  # 18.9; 21.3
    ),
    ("bwd_both", 96): (
        Sm80Tile(64, 64, 16, 1),  # 17.5, 32 x 64 20.2, 32 x 32 16.9; 21.7
        Sm80Tile(64, 128, 32, 1),  # 19.4; 23.7
    ),
    ("bwd_both", 128): (
        Sm80Tile(64, 64, 16, 1),  # 19.6, 32 x 64 22.2, 32 x 32 19.2; 26.3
        Sm80Tile(64, 128, 32, 1, max_spill_bytes=128),  # 23.2; 28.3
    ),
    ("bwd_both", 192): (
        Sm80Tile(32, 32, 16, 1),  # 23.1, 64 x 64 27.3, 32 x 64 30.0; 29.0
        Sm80Tile(64, 64, 16, 1),  # 27.7; 31.0
    ),
    ("bwd_both", 256): (Sm80Tile(32, 32, 16, 1),),  # 26.7, 32 x 64 36.1; 36.9
    ("bwd_q", 32): (
        Sm80Tile(128, 32, 32, 3, 246),  # 128 x 64 in two blocks an SM 243
        Sm80Tile(64, 64, 16, 2, 220),  # beside 231 of 128 x 64
    ),
    ("bwd_q", 64): (
        Sm80Tile(128, 64, 32, 2, 329, max_spill_bytes=128),  # 128 x 32 305
        Sm80Tile(64, 64, 16, 2, 271),
    ),
    ("bwd_q", 96): (
        Sm80Tile(128, 48, 32, 2, 345, max_spill_bytes=128),  # 128 x 32 309
        Sm80Tile(64, 64, 16, 2, 287),  # beside 314 of 128 x 32
    ),
    ("bwd_q", 128): (
        Sm80Tile(128, 32, 32, 2, 358, max_spill_bytes=128),  # 64 x 64 306
        Sm80Tile(64, 32, 16, 2, 257),  # beside 354
    ),
    ("bwd_q", 192): (Sm80Tile(64, 32, 16, 2, 294),),  # 64 x 64 266
    ("bwd_q", 256): (
        Sm80Tile(128, 32, 16, 1, 266),  # 64 x 64 252, with spills
        Sm80Tile(32, 32, 16, 1, 226),  # 64 x 32 223
    ),
}
