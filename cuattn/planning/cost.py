"""How long a loop on tensor cores takes in a tile: what the choice among tiles and splits compares.

An estimate in microseconds, from the table's TFLOP/s and how the blocks fill the device. Only the
order of the estimates matters; that they are microseconds lets the cost of merging join in. Held
against measurements of one H200, what has the least estimate takes 1.01 times as long as what is
fastest in a forward (171 problems, at most 1.18) and 1.00 in a backward (409, at most 1.13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cuattn.planning.device import Device
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import RangeSchedule, ceil_div
from cuattn.planning.tuning import TABLE_SMS, Sm80Tile

#: Where blocks share an SM, those that are there take so much of the time of one that is not.
_ABSENT = 0.5
#: Of a split forward: the second kernel, on the device and what the host waits for it, each part of
#: a row in it, each number of a part.
_MERGE_US, _PART_US, _NUMBER_US = 5.0, 0.1, 6e-6
#: Matrix products for a pair of tiles. The loops that own keys are all counted as the one that
#: yields every gradient, whose table they share.
_PRODUCTS = {"fwd": 2, "bwd_q": 3, "bwd": 5, "bwd_kv": 5}


def owns_queries(kernel: str) -> bool:
    """Whether the blocks of a loop own queries, and keys pass; else it is the other way round."""
    return kernel in ("fwd", "bwd_q")


def blocks(kernel: str, tile: Sm80Tile, problem: AttentionProblem) -> int:
    """Blocks of a loop: owned tiles x heads x batch."""
    if owns_queries(kernel):
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
        Tiles that pass the first block of a head, the last one and three between.
    pass_us : float
        Of a tile that passes a block, where the SM holds as many blocks as it can.
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
        kernel: str, block_d: int, tile: Sm80Tile, problem: AttentionProblem, device: Device
    ) -> Loop:
        """The loop of a kernel in a tile."""
        schedule = RangeSchedule.of(problem, tile.block_m, tile.block_n)
        size, heads = tile.block_n, 1
        count = schedule.num_m_blocks
        span: Callable[[int], tuple[int, int]] = schedule.key_range
        if not owns_queries(kernel):
            size, heads = tile.block_m, problem.num_heads_q // max(1, problem.num_heads_kv)
            count, span = schedule.num_n_blocks, schedule.row_range
        ranges = [span(max(0, count - 1) * k // 4) for k in range(5)]
        flops = 2 * _PRODUCTS[kernel] * tile.block_m * tile.block_n * block_d
        return Loop(
            blocks(kernel, tile, problem),
            tuple(heads * ceil_div(end - begin, size) for begin, end in ranges),
            flops * TABLE_SMS / (tile.tflops * 1e6),
            tile.min_blocks,
            device.num_sms,
        )

    def microseconds(self, num_splits: int = 1) -> float:
        """The estimate, but for what is the same in every tile; a part of the keys is a block."""
        passes = [ceil_div(count, num_splits) for count in self.passes]
        busiest = ceil_div(self.blocks * num_splits, self.num_sms)
        longest = max(passes) * self._turns(min(busiest, self.blocks_of_sm))
        mean = sum(passes) / len(passes) * self._turns(busiest)
        return self.pass_us * max(longest, mean)

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
