"""How the CPU engine cuts up its work: heads in batches, products in pieces, both over cores.

Small heads are batched until one tile of the batch is worth a NumPy call. Every product is cut into
pieces below the size at which OpenBLAS starts its own threads: two threads that call a threaded
BLAS wait for each other (measured on 2 cores: 2 to 4 times slower than one thread each), and the
exponentials, which BLAS does not do, need the cores as much as the products do.
"""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from cuattn.planning.problem import AttentionProblem, Band
from cuattn.planning.schedule import RangeSchedule

Array = NDArray[Any]
T = TypeVar("T")
#: Largest tile, queries by keys: NumPy calls are dear below this, caches small above.
BLOCK_M, BLOCK_N = 256, 480
#: What batches in flight may hold beyond inputs and outputs, when there is a choice.
WORKING_BYTES = 48 << 20
#: OpenBLAS multiplies on one thread below twice 2^18 multiplications (its interface/gemm.c).
PIECE_MULTIPLICATIONS = 2**19 - 1
#: With fewer batches than this, each is also cut into parts that are spread over the cores. Neither
#: number depends on the number of cores, so that the order of every sum does not.
ENOUGH_BATCHES, PARTS = 8, 4
#: Below this much work (multiplications), starting threads costs more than it saves.
THREADED_WORK = 1 << 24


@dataclass(frozen=True)
class Heads:
    """A batch of (batch, key head) pairs that walk the schedule together."""

    batch_idx: NDArray[np.intp]
    kv_head_idx: NDArray[np.intp]
    group_size: int

    def __len__(self) -> int:
        return len(self.batch_idx)

    def _head_idx(self, group_idx: int | None) -> NDArray[np.intp]:
        """Of the query heads with this place in their group, or (None) of the key heads."""
        if group_idx is None:
            return self.kv_head_idx
        return self.kv_head_idx * self.group_size + group_idx

    def load(self, a: Array, rows: slice, dtype: str, group_idx: int | None = None) -> Array:
        """Rows of every head of the batch, shape (heads, rows, dim), contiguous in ``dtype``."""
        return a[self.batch_idx, rows, self._head_idx(group_idx)].astype(dtype, "C", copy=False)

    def load_with_column(
        self, a: Array, rows: slice, dtype: str, group_idx: int | None = None
    ) -> Array:
        """As ``load``, with a last column of ones: shape (heads, rows, dim + 1)."""
        values = a[self.batch_idx, rows, self._head_idx(group_idx)]
        widened = np.empty((*values.shape[:2], values.shape[2] + 1), dtype)
        widened[..., :-1] = values
        widened[..., -1] = 1
        return widened

    def store(self, a: Array, rows: slice, value: Array, group_idx: int | None = None) -> None:
        """The opposite of ``load``; rounds once."""
        a[self.batch_idx, rows, self._head_idx(group_idx)] = value

    def load_rows(self, a: Array, rows: slice, dtype: str, group_idx: int) -> Array:
        """Of an array (batch, heads_q, seqlen_q) such as lse: shape (heads, rows, 1)."""
        return a[self.batch_idx, self._head_idx(group_idx), rows, None].astype(dtype, copy=False)

    def store_rows(self, a: Array, rows: slice, value: Array, group_idx: int) -> None:
        """The opposite of ``load_rows``."""
        a[self.batch_idx, self._head_idx(group_idx), rows] = value[..., 0]


@dataclass(frozen=True)
class Visible:
    """The rectangle of rows that see a key and keys that are seen, and its own schedule.

    Outside of it nothing is ever read: an empty row cannot spoil anything, whatever its bits.
    """

    rows: slice
    keys: slice
    schedule: RangeSchedule

    @staticmethod
    def of(problem: AttentionProblem) -> Visible:
        """Rows and keys of a band are intervals; inside them positions count from their begin."""
        band, seqlen_q, seqlen_k = problem.band, problem.seqlen_q, problem.seqlen_k
        row_begin = max(0, -band.upper)
        row_end = max(row_begin, min(seqlen_q, seqlen_k - band.lower))
        key_begin = max(0, row_begin + band.lower)
        key_end = max(key_begin, min(seqlen_k, row_end + band.upper))
        shift = row_begin - key_begin
        num_rows, num_keys = row_end - row_begin, key_end - key_begin
        schedule = RangeSchedule(
            num_rows,
            num_keys,
            Band(band.lower + shift, band.upper + shift),
            max(1, min(BLOCK_M, num_rows)),
            max(1, min(BLOCK_N, num_keys)),
        )
        return Visible(slice(row_begin, row_end), slice(key_begin, key_end), schedule)

    @property
    def empty(self) -> bool:
        return self.schedule.seqlen_q == 0 or self.schedule.seqlen_k == 0

    def row_slice(self, m_block: int) -> slice:
        """Rows of a query tile, in the whole array."""
        begin, end = self.schedule.rows(m_block)
        return slice(self.rows.start + begin, self.rows.start + end)

    def key_slice(self, m_block: int, n_block: int) -> slice:
        """Keys of a key tile that some row of the query tile sees, from the first visible key."""
        tile_begin, tile_end = self.schedule.keys(n_block)
        begin, end = self.schedule.key_range(m_block)
        return slice(max(begin, tile_begin), min(end, tile_end))

    def hidden(self, m_block: int, keys: slice) -> NDArray[np.bool_]:
        """Where the element rule hides one of these keys from a row of the query tile."""
        rows = np.arange(*self.schedule.rows(m_block))[:, None]
        key = np.arange(keys.start, keys.stop)
        band = self.schedule.band
        return (key < rows + band.lower) | (key > rows + band.upper)


def split(problem: AttentionProblem, visible: Visible) -> tuple[list[Heads], int]:
    """The batches of heads, and the bytes that one of them keeps while it is at work."""
    schedule = visible.schedule
    dims = problem.head_dim + problem.head_dim_v
    itemsize = np.dtype(problem.accumulator).itemsize
    # Forward: K, V. Backward: Q, dO, out or dQ, and K, V, dK, dV.
    rows_held = schedule.seqlen_k
    if problem.op == "backward":
        rows_held = 2 * (schedule.seqlen_q + schedule.seqlen_k)
    per_head = max(1, rows_held * dims * itemsize)
    size = min(
        BLOCK_M * BLOCK_N // (schedule.block_m * schedule.block_n),
        WORKING_BYTES // (8 * per_head),
    )
    size = max(1, size)
    pairs = np.arange(problem.batch * problem.num_heads_kv)
    batches = [
        Heads(*np.divmod(pairs[begin : begin + size], problem.num_heads_kv), problem.group_size)
        for begin in range(0, len(pairs), size)
    ]
    return batches, size * per_head


class Stopped(Exception):
    """Work given up because another part of it failed or was interrupted."""


class Cores:
    """Spreads parts of the work over threads, and stops all of them when one cannot go on."""

    def __init__(self, pool: ThreadPoolExecutor | None, stop: threading.Event) -> None:
        self._pool, self._stop = pool, stop

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterable[Any]:
        """As the builtin: the results in the order of the items."""
        if self._pool is None:
            return map(function, items)
        return (result() for result in [self._begin(function, item) for item in items])

    def _begin(self, function: Callable[[Any], Any], item: Any) -> Callable[[], Any]:
        try:
            return self._pool.submit(function, item).result  # type: ignore[union-attr]
        except RuntimeError:  # the interpreter is shutting down and takes no more work
            return functools.partial(function, item)

    def going(self, tiles: Iterable[T]) -> Iterator[T]:
        """The tiles one by one, for as long as nothing has stopped the work."""
        for tile in tiles:
            if self._stop.is_set():
                raise Stopped
            yield tile


def run(
    problem: AttentionProblem,
    visible: Visible,
    work: Callable[[Heads, Cores, int], None],
) -> None:
    """Call ``work(heads, cores, num_parts)`` for every batch of heads, using the cores.

    With many batches that fit memory together each is one task, and work runs in one part.
    Otherwise each is cut into parts that ``cores`` spreads, and the next batches begin while the
    last parts run. Which of the two depends on the problem alone.
    """
    batches, batch_bytes = split(problem, visible)
    many = min(len(batches), WORKING_BYTES // batch_bytes) >= ENOUGH_BATCHES
    num_parts = 1 if many else PARTS
    if not many:
        batch_bytes += PARTS * batch_bytes // 8  # of what a backward keeps, dQ is an eighth
    at_once = max(1, WORKING_BYTES // batch_bytes)
    pairs = visible.schedule.num_tiles() * visible.schedule.block_m * visible.schedule.block_n
    heads = problem.batch * problem.num_heads_q
    multiplications = pairs * heads * (problem.head_dim + problem.head_dim_v)
    num_cores = _num_cores()
    stop = threading.Event()

    if num_cores == 1 or multiplications < THREADED_WORK:
        alone = Cores(None, stop)
        for heads_batch in batches:
            work(heads_batch, alone, num_parts)
        return
    in_flight = min(len(batches), at_once, num_cores)
    with ThreadPoolExecutor(in_flight) as batch_pool, ThreadPoolExecutor(num_cores) as part_pool:
        cores = Cores(None if many else part_pool, stop)
        try:
            for _ in Cores(batch_pool, stop).map(lambda b: work(b, cores, num_parts), batches):
                pass
        except BaseException:  # an interrupt too: the pools wait for their threads
            stop.set()
            batch_pool.shutdown(wait=False, cancel_futures=True)
            raise


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parts(items: Sequence[T], num_parts: int) -> Iterator[Sequence[T]]:
    """Interleaved parts, none empty: neighbours cost alike, so the parts do."""
    for part in range(min(num_parts, len(items))):
        yield items[part::num_parts]


def matmul(a: Array, b: Array, out: Array | None = None) -> Array:
    """``a @ b`` (into ``out``) as a stack of pieces; all (heads, rows, columns)."""
    heads, num_rows, num_terms = a.shape
    num_columns = b.shape[2]
    if out is None:
        out = np.empty((heads, num_rows, num_columns), a.dtype)
    if num_rows * num_terms * num_columns <= PIECE_MULTIPLICATIONS:
        return np.matmul(a, b, out=out)
    rows, terms, columns = _piece(num_rows, num_terms, num_columns)
    whole = num_rows // rows * rows
    # Axes: heads, row piece, column piece, term piece, and the piece itself in the last two.
    a_pieces = a[:, :whole].reshape(heads, -1, 1, rows, num_terms // terms, terms).swapaxes(3, 4)
    b_pieces = b.reshape(heads, 1, -1, terms, num_columns // columns, columns)
    b_pieces = b_pieces.transpose(0, 1, 4, 2, 3, 5)
    out_pieces = out[:, :whole].reshape(heads, -1, rows, num_columns // columns, columns)
    out_pieces = out_pieces.swapaxes(2, 3)
    if terms == num_terms:
        np.matmul(a_pieces[:, :, :, 0], b_pieces[:, :, :, 0], out=out_pieces)
    else:
        np.matmul(a_pieces, b_pieces).sum(axis=3, out=out_pieces)
    if whole < num_rows:
        matmul(a[:, whole:], b, out[:, whole:])
    return out


@functools.cache
def _piece(rows: int, terms: int, columns: int) -> tuple[int, int, int]:
    """Halve the longest side until OpenBLAS takes one thread: near-cubes cost it least packing.

    Terms count half, for their pieces have to be added up. Rows alone may leave a rest.
    """
    sides, reluctance = [rows, terms, columns], (1, 2, 1)
    while math.prod(sides) > PIECE_MULTIPLICATIONS:
        even = [side for side in range(3) if sides[side] % 2 == 0]
        if not even:
            sides[0] = max(1, min(sides[0], PIECE_MULTIPLICATIONS // (sides[1] * sides[2])))
            break
        sides[max(even, key=lambda side: sides[side] / reluctance[side])] //= 2
    return sides[0], sides[1], sides[2]
