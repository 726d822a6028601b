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

    def choose(self, kernel, problem, device):
        width = sm80.bucket(problem) if isinstance(self, Sm80) else problem.accumulator
        tiles = self.fitting_tiles(kernel, width, device)
        return tiles[min(rank, len(tiles) - 1)]

    with (
        mock.patch.object(Tiled, "choose_tile", choose),
        mock.patch.object(Sm80, "choose_tile", choose),
    ):
        execute.forget()
        try:
            yield
        finally:
            execute.forget()
