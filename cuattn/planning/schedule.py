"""One schedule: a mask as, for every query tile, an ordered range of key tiles, PARTIAL or FULL.

The range form: which keys a row sees is a ``Band``. Absent tiles are not listed, a FULL tile pays
no element rule, a PARTIAL one applies it. The backward walks the transpose, which is the same
rule read by columns. ``kernels_cu/softmax/schedule.cuh`` is this file in CUDA.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from cuattn.planning.problem import AttentionProblem, Band


class TileKind(enum.Enum):
    """PARTIAL: apply the element rule. FULL: every row of the tile sees every key of it."""

    PARTIAL = "partial"
    FULL = "full"


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b, for b > 0."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class RangeSchedule:
    """The tiles of one (batch, head): block_m rows by block_n keys under a band."""

    seqlen_q: int
    seqlen_k: int
    band: Band
    block_m: int
    block_n: int

    @staticmethod
    def of(problem: AttentionProblem, block_m: int, block_n: int) -> RangeSchedule:
        """The schedule of a problem under a tile shape."""
        return RangeSchedule(problem.seqlen_q, problem.seqlen_k, problem.band, block_m, block_n)

    @property
    def num_m_blocks(self) -> int:
        return ceil_div(self.seqlen_q, self.block_m)

    @property
    def num_n_blocks(self) -> int:
        return ceil_div(self.seqlen_k, self.block_n)

    def visible(self, row: int, key: int) -> bool:
        """The element rule."""
        return self.band.lower <= key - row <= self.band.upper

    def rows(self, m_block: int) -> tuple[int, int]:
        """Rows [begin, end) of a query tile."""
        return m_block * self.block_m, min((m_block + 1) * self.block_m, self.seqlen_q)

    def keys(self, n_block: int) -> tuple[int, int]:
        """Keys [begin, end) of a key tile."""
        return n_block * self.block_n, min((n_block + 1) * self.block_n, self.seqlen_k)

    def key_range(self, m_block: int) -> tuple[int, int]:
        """Keys [begin, end) outside of which no row of the query tile sees anything."""
        row_begin, row_end = self.rows(m_block)
        begin = max(0, row_begin + self.band.lower)
        return begin, max(begin, min(self.seqlen_k, row_end + self.band.upper))

    def row_range(self, n_block: int) -> tuple[int, int]:
        """Rows [begin, end) outside of which no key of the key tile is seen by anything."""
        key_begin, key_end = self.keys(n_block)
        begin = max(0, key_begin - self.band.upper)
        return begin, max(begin, min(self.seqlen_q, key_end - self.band.lower))

    def kind(self, m_block: int, n_block: int) -> TileKind:
        """FULL when no key is past the end and the tile's two outer corners are in the band."""
        row_begin, row_end = self.rows(m_block)
        key_begin, key_end = n_block * self.block_n, (n_block + 1) * self.block_n
        full = (
            key_end <= self.seqlen_k
            and self.visible(row_begin, key_end - 1)
            and self.visible(row_end - 1, key_begin)
        )
        return TileKind.FULL if full else TileKind.PARTIAL

    def key_tiles(self, m_block: int) -> Iterator[tuple[int, TileKind]]:
        """Key tiles that a query tile visits, in the order of the forward loop."""
        for n_block in self._blocks(self.key_range(m_block), self.block_n):
            yield n_block, self.kind(m_block, n_block)

    def query_tiles(self, n_block: int) -> Iterator[tuple[int, TileKind]]:
        """The transpose: query tiles that a key tile visits, in the order of the backward loop."""
        for m_block in self._blocks(self.row_range(n_block), self.block_m):
            yield m_block, self.kind(m_block, n_block)

    @staticmethod
    def _blocks(span: tuple[int, int], block: int) -> range:
        begin, end = span
        return range(begin // block, ceil_div(end, block)) if end > begin else range(0)

    def num_tiles(self) -> int:
        """Tiles visited in all: the work of one head in units of block_m x block_n."""
        spans = map(self.key_range, range(self.num_m_blocks))
        return sum(len(self._blocks(span, self.block_n)) for span in spans)


def num_visible(problem: AttentionProblem) -> int:
    """(row, key) pairs that are seen, of one head: what FLOPs are counted from."""

    def keys_up_to(distance: int) -> int:
        """Pairs with ``j - i <= distance``: row i has ``distance + 1 + i`` keys, 0 to seqlen_k."""
        return clamped_sum(distance + 1 + problem.seqlen_q) - clamped_sum(distance + 1)

    def clamped_sum(end: int) -> int:
        """The sum over x < end of x, but at least 0 and at most seqlen_k."""
        rising = min(max(end, 0), problem.seqlen_k)
        return rising * (rising - 1) // 2 + max(end - problem.seqlen_k, 0) * problem.seqlen_k

    band = problem.band
    return max(0, keys_up_to(band.upper) - keys_up_to(band.lower - 1))
