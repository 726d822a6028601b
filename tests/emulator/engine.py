"""What the shared suites run on where the kernels are emulated."""

from __future__ import annotations

import contextlib

from tiles import RANKS, tile_of_rank

from emulator import device
from emulator.launch import settings


class EmulatedEngine:
    """Kernels of one family on a CPU; ``dtypes`` are those that it takes."""

    def __init__(self, family):
        self.name, self.dtypes, self.xp = f"emulated-{family.name}", family.dtypes, device.cupy()
        self.ranks = RANKS

    def asarray(self, array):
        return device.asarray(array)

    def asnumpy(self, array):
        return array.numpy()

    def tile(self, rank):
        return tile_of_rank(rank)

    @contextlib.contextmanager
    def order(self, seed):
        """Threads and CTAs run in the order of a seed, and copies land when it says."""
        settings.seed, before = seed, settings.seed
        try:
            yield
        finally:
            settings.seed = before
