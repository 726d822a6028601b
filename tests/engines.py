"""What the shared suites run on: the CPU engine, and every kernel family."""

import contextlib
import ctypes
from unittest import mock

import calls
import compare
import numpy as np
from strategies import DTYPES
from tiles import RANKS, both_loops, keys_in_tiles, tile_of_rank

from cuattn import execute
from cuattn.planning import select
from cuattn.planning.families import FAMILIES
from cuattn.planning.sm80 import SM80


class NumpyEngine:
    """The tiled CPU engine."""

    name = "numpy"
    dtypes = DTYPES
    ranks = range(1)  # one tile for all
    xp = np

    def asarray(self, array):
        return array

    def asnumpy(self, array):
        return array

    def tile(self, rank):
        """Compute in the tile of this rank, out of ``ranks``."""
        return contextlib.nullcontext()


#: Every family, and the one that has three ways for short sequences in its second and third.
CUDA_ENGINES = {family.name: (family, contextlib.nullcontext) for family in FAMILIES}
CUDA_ENGINES["sm80-both"] = (SM80, both_loops)
CUDA_ENGINES["sm80-tiles"] = (SM80, keys_in_tiles)
#: Those whose forwards differ.
FORWARD_ENGINES = ("numpy", *(family.name for family in FAMILIES))


@contextlib.contextmanager
def family_of(name):
    """The family of an engine, tried first in every plan; behind it the one that takes all.

    Arrays are drawn in a dtype that it takes, and compared as it rounds.
    """
    family, its_way = CUDA_ENGINES[name]
    dtypes = family.dtypes
    with (
        mock.patch.object(select, "FAMILIES", (family, FAMILIES[-1])),
        mock.patch.object(calls, "DTYPE", "float32" if "float32" in dtypes else dtypes[-1]),
        mock.patch.object(compare, "ROUNDS_TO_ZERO", dtypes if family.rounds_to_zero else ()),
        its_way(),
    ):
        execute.forget()
        try:
            yield family
        finally:
            execute.forget()


class CudaEngine:
    """Compiled kernels of one family on CuPy arrays; ``dtypes`` are those that it takes."""

    def __init__(self, family):
        import cupy

        self.name, self.dtypes, self.xp = family.name, family.dtypes, cupy
        self.ranks = RANKS

    def asarray(self, array):
        """Copy to the device with the same strides, zero and negative ones too."""
        if array.size == 0:
            return self.xp.empty(array.shape, array.dtype)
        low, high = np.lib.array_utils.byte_bounds(array)
        memory = np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
        start = array.__array_interface__["data"][0] - low
        buffer = self.xp.asarray(memory)
        return self.xp.ndarray(array.shape, array.dtype, buffer.data + start, array.strides)

    def asnumpy(self, array):
        return self.xp.asnumpy(array)

    def tile(self, rank):
        return tile_of_rank(rank)
