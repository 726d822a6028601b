"""A device whose kernels run on the emulator: what cuattn uses of CuPy, over host memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np

from cuattn import _arrays, execute
from cuattn.planning.device import KNOWN
from emulator.launch import EmulatedKernel

#: Whose plans are run. The kernels are those of sm_80 and later; the tiles are this one's.
DEVICE = KNOWN["sm_90a"]

#: What new memory holds: NaN in every float.
POISON = 0xFF
ALIGNMENT = 256


class Allocation:
    """Memory of the C library, aligned as a device's is, and of no more bytes than were asked for.

    why not an array of NumPy's: the address sanitizer knows where this one ends.
    """

    _libc = ctypes.CDLL(None)
    _libc.free.argtypes = (ctypes.c_void_p,)

    def __init__(self, nbytes: int) -> None:
        address = ctypes.c_void_p()
        size = ctypes.c_size_t(max(1, nbytes))
        if self._libc.posix_memalign(ctypes.byref(address), ctypes.c_size_t(ALIGNMENT), size):
            raise MemoryError(nbytes)
        self.address = address.value
        ctypes.memset(self.address, POISON, nbytes)

    def __del__(self) -> None:
        self._libc.free(self.address)


class Memory:
    """A place in an allocation, which lives as long as one of its places."""

    device_id = 0

    def __init__(self, allocation: Allocation, ptr: int) -> None:
        self.allocation, self.ptr = allocation, ptr

    def __add__(self, offset: int) -> Memory:
        return Memory(self.allocation, self.ptr + offset)


def alloc(nbytes: int) -> Memory:
    """New memory, as ``cupy.cuda.alloc`` gives it."""
    allocation = Allocation(nbytes)
    return Memory(allocation, allocation.address)


class ndarray:
    """An array on this device: not NumPy's, so it takes the way of kernels."""

    def __init__(self, shape, dtype, memptr=None, strides=None):
        self.dtype = np.dtype(dtype)
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.size = int(np.prod(self.shape))
        self.itemsize = self.dtype.itemsize
        self.nbytes = self.size * self.itemsize
        self.ndim = len(self.shape)
        self.data = alloc(self.nbytes) if memptr is None else memptr
        self.strides = np.empty(self.shape, self.dtype).strides if strides is None else strides

    def numpy(self) -> np.ndarray:
        """The same memory as NumPy's."""
        interface = {
            "version": 3,
            "typestr": f"|V{self.itemsize}",
            "shape": self.shape,
            "strides": self.strides,
            "data": (self.data.ptr, False),
        }
        if self.size == 0:
            return np.empty(self.shape, self.dtype)
        owner = SimpleNamespace(__array_interface__=interface, memory=self.data)
        return np.asarray(owner).view(self.dtype)


def zeros(shape, dtype) -> ndarray:
    array = ndarray(shape, dtype)
    array.numpy()[...] = 0
    return array


def asarray(array: np.ndarray) -> ndarray:
    """A copy with the same strides, zero and negative ones too."""
    if array.size == 0:
        return ndarray(array.shape, array.dtype)
    low, high = np.lib.array_utils.byte_bounds(array)
    memory = alloc(high - low)
    ctypes.memmove(memory.ptr, low, high - low)
    start = array.__array_interface__["data"][0] - low
    return ndarray(array.shape, array.dtype, memory + start, array.strides)


class Device:
    """The one there is."""

    def __init__(self, device_id: int = 0) -> None:
        self.id = device_id

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def cupy() -> ModuleType:
    """The module that ``sys.modules`` holds meanwhile."""
    module = ModuleType("cupy")
    vars(module).update(
        ndarray=ndarray,
        zeros=zeros,
        empty=ndarray,
        cuda=SimpleNamespace(
            alloc=alloc, Device=Device, runtime=SimpleNamespace(getDevice=lambda: 0)
        ),
    )
    return module


class LoadedPlan(execute.LoadedPlan):
    """A plan whose kernels are the emulator's."""

    def __init__(self, plan, device_id):
        specs = {launch.kernel.name: launch.kernel for launch in plan.launches}

        def load(unit, arch, smem_bytes):
            return EmulatedKernel(unit, specs[unit.name])

        with (
            mock.patch.object(execute, "load", load),
            mock.patch.object(execute, "build", lambda units, options: ()),
            mock.patch.object(execute, "debugging", lambda: True),  # launched one by one
        ):
            super().__init__(plan, device_id)


@contextlib.contextmanager
def emulated():
    """Calls of cuattn on arrays of this module launch its kernels on the emulator."""
    with (
        mock.patch.dict(sys.modules, cupy=cupy()),
        # Every array in memory of its own, so that a step past its end is seen.
        mock.patch.object(_arrays, "TOGETHER_BYTES", 0),
        mock.patch.object(execute, "LoadedPlan", LoadedPlan),
        mock.patch.object(execute, "cuda_device", lambda device_id: DEVICE),
        mock.patch.object(execute, "current_stream", lambda device_id: 0),
    ):
        execute.forget()
        try:
            yield
        finally:
            execute.forget()
