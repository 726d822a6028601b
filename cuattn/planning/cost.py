"""How long a loop on tensor cores takes in a tile: what the choice among tiles and splits compares.

An estimate in microseconds, from the table's TFLOP/s and how the blocks fill the device. Only the
order of the estimates matters; that they are microseconds lets the cost of merging join in. On one
H200 the choice took 1.005 times as long as what was fastest in the 180 forwards that ``_BLOCK_US``
was found in (at most 1.17), and 1.004 times in 408 backwards (at most 1.29); the other constants
are from before those. What a kernel gained since then is not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cuattn.planning.device import Device
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import RangeSchedule, ceil_div
from cuattn.planning.tuning import OWNS_QUERIES, TABLE_SEQLEN, TABLE_SMS, Sm80Tile

#: Of a block's time, what a place of an SM costs that no block takes: the others run faster for it,
#: but not so much.
_ABSENT = 0.5
#: From a block's begin to its end, for what is not a pass: first copies, and results written.
#: Blocks of one SM wait for these side by side.
_BLOCK_US = 4.0
#: Of a split forward: the second kernel, 3.5 on the device and the rest for the host that launches
#: it; each part of a row in it; each number of a part.
_MERGE_US, _PART_US, _NUMBER_US = 5.0, 0.1, 6e-6
#: Bytes of shared memory that each block takes beside its own, and that an SM has more than a block
#: can have. source: CUDA C++ Programming Guide, "Compute Capability 8.x, Shared Memory" and later.
_RESERVED = 1024
#: Blocks of a head that are looked at: all, where it has no more.
_SAMPLES = 9
#: Matrix products for a pair of tiles. The loops that own keys are all counted as the one that
#: yields every gradient, whose table they share.
_PRODUCTS = {"fwd": 2, "bwd_q": 3, "bwd": 5, "bwd_kv": 5}


def blocks_of_sm(tile: Sm80Tile, smem_bytes: int, device: Device) -> int:
    """Blocks that an SM holds, by the registers that a row counts on and by shared memory."""
    of_memory = (device.smem_per_block + _RESERVED) // (smem_bytes + _RESERVED)
    return max(1, min(tile.min_blocks, of_memory))


def blocks(kernel: str, tile: Sm80Tile, problem: AttentionProblem) -> int:
    """Blocks of a loop: owned tiles x heads x batch."""
    if kernel in OWNS_QUERIES:
        return ceil_div(problem.seqlen_q, tile.block_m) * problem.num_heads_q * problem.batch
    return ceil_div(problem.seqlen_k, tile.block_n) * problem.num_heads_kv * problem.batch


@dataclass(frozen=True, slots=True)
class Loop:
    """What the estimate of a loop is made of.

    Attributes
    ----------
    blocks : int
        Thread blocks, before the keys are split.
    passes : tuple of int
        Tiles that pass some blocks of a head, evenly spaced from the first to the last.
    pass_us : float
        An SM's time for one tile that passes one block, where it holds as many blocks as it can.
    blocks_of_sm, num_sms : int
        Blocks that an SM holds, and SMs of the device.
    """

    blocks: int
    passes: tuple[int, ...]
    pass_us: float
    blocks_of_sm: int
    num_sms: int

    @staticmethod
    def of(
        kernel: str,
        block_d: int,
        tile: Sm80Tile,
        smem_bytes: int,
        problem: AttentionProblem,
        device: Device,
    ) -> Loop:
        """The loop of a kernel in a tile, with the shared memory of a block."""
        schedule = RangeSchedule.of(problem, tile.block_m, tile.block_n)
        size, heads = tile.block_n, 1
        count = schedule.num_m_blocks
        span: Callable[[int], tuple[int, int]] = schedule.key_range
        if kernel not in OWNS_QUERIES:
            size, heads = tile.block_m, problem.group_size
            count, span = schedule.num_n_blocks, schedule.row_range
        last, steps = max(0, count - 1), min(max(1, count - 1), _SAMPLES - 1)
        ranges = [span(last * k // steps) for k in range(steps + 1)]
        together = blocks_of_sm(tile, smem_bytes, device)
        flops = 2 * _PRODUCTS[kernel] * tile.block_m * tile.block_n * block_d
        own_us = _BLOCK_US / together / (TABLE_SEQLEN / size)  # a pass's share, in the TFLOP/s
        return Loop(
            blocks(kernel, tile, problem),
            tuple(heads * ceil_div(end - begin, size) for begin, end in ranges),
            flops * TABLE_SMS / (tile.tflops * 1e6) - own_us,
            together,
            device.num_sms,
        )

    def microseconds(self, num_splits: int = 1) -> float:
        """The estimate, but for what is the same in every tile; a part of the keys is a block."""
        passes = [ceil_div(count, num_splits) for count in self.passes]
        busiest = ceil_div(self.blocks * num_splits, self.num_sms)
        longest = max(passes) * self._turns(min(busiest, self.blocks_of_sm))
        mean = sum(passes) / len(passes) * self._turns(busiest)
        waves = max(1.0, busiest / self.blocks_of_sm)
        return max(self.pass_us * longest + _BLOCK_US, self.pass_us * mean + _BLOCK_US * waves)

    def _turns(self, count: int) -> float:
        """Blocks for whose time an SM is busy that has so many of them."""
        full, rest = divmod(count, self.blocks_of_sm)
        absent = self.blocks_of_sm - rest if rest else 0
        return full * self.blocks_of_sm + rest + _ABSENT * absent


def merge_microseconds(problem: AttentionProblem, num_splits: int) -> float:
    """The estimate of what merging the parts adds to a forward; 0 where the keys are not split."""
    if num_splits == 1:
        return 0.0
    parts = num_splits * problem.batch * problem.num_heads_q * problem.seqlen_q
    return _MERGE_US + num_splits * _PART_US + parts * problem.head_dim_v * _NUMBER_US
