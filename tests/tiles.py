"""A tile by its rank, instead of the one that suits the problem.

A problem small enough for the oracle takes the smallest tile; large ones must be right too.
"""

import contextlib
from unittest import mock

from cuattn import execute
from cuattn.planning import sm80
from cuattn.planning.simt import Tiled
from cuattn.planning.sm80 import Sm80

#: As many as the longest table of ``planning.tuning`` has rows.
RANKS = range(3)


@contextlib.contextmanager
def tile_of_rank(rank):
    """Every problem in the tile of this rank of its table, 0 for the largest that fits."""

    def ranked(tiles):
        return tiles[min(rank, len(tiles) - 1)] if tiles else None

    def choose(self, kernel, problem, device):
        width = sm80.bucket(problem) if isinstance(self, Sm80) else problem.accumulator
        return ranked(self.fitting_tiles(kernel, width, device))

    def choose_one(self, problem, device):
        return ranked(self.holding_tiles(problem, device))

    def choose_both(self, problem, device):
        return ranked(self.side_by_side_tiles(problem, device))

    with (
        mock.patch.object(Tiled, "choose_tile", choose),
        mock.patch.object(Sm80, "choose_tile", choose),
        mock.patch.object(Sm80, "one_tile", choose_one),
        mock.patch.object(Sm80, "both_tile", choose_both),
        _planned_anew(),
    ):
        yield


@contextlib.contextmanager
def both_loops():
    """No backward has all keys in one tile: short sequences take the way of those not so short."""
    with mock.patch.object(Sm80, "holding_tiles", lambda *_: []), _planned_anew():
        yield


@contextlib.contextmanager
def keys_in_tiles():
    """No backward is one kernel: short sequences take the way of long ones."""
    with both_loops(), mock.patch.object(Sm80, "side_by_side_tiles", lambda *_: []):
        yield


@contextlib.contextmanager
def _planned_anew():
    execute.forget()
    try:
        yield
    finally:
        execute.forget()
