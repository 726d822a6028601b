"""From a unit to a kernel on the current device, and its launch on a stream."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from cuattn.jit.cache import Entry, cache_key, default_cache
from cuattn.jit.compile import CompileOptions, debugging, nvrtc_version
from cuattn.jit.source import Unit

#: What a block may use without asking for more.
_DEFAULT_SMEM_BYTES = 48 * 1024

_MAX_GRID = 2**31 - 1

#: Takes a stream, the host address of a list of the arguments' addresses, and 0 for no other way to
#: pass them: the last three parameters of ``cuLaunchKernel``.
Launcher = Callable[[int, int, int], None]


class _Function(Protocol):
    """What is used of cupy.cuda.function.Function."""

    ptr: int


class _RawKernel(Protocol):
    """What is used of cupy.RawKernel."""

    kernel: _Function
    max_dynamic_shared_size_bytes: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel of one device; hold it, ``load`` hashes the source every time.

    Attributes
    ----------
    name : str
        The kernel's readable name.
    function : cupy.cuda.function.Function
        The loaded function; a launcher needs it alive.
    block : (int, int, int)
        Threads of a block.
    smem_bytes : int
        Dynamic shared memory of a block.
    synchronize : bool
        Wait after every launch (CUATTN_DEBUG), so that a fault names its kernel.
    """

    name: str
    function: _Function
    block: tuple[int, int, int]
    smem_bytes: int
    synchronize: bool

    def launcher(self, grid: int) -> Launcher:
        """What launches ``grid`` blocks on a stream of the current device.

        Parameters
        ----------
        grid : int
            Blocks, 1 to 2**31 - 1; a plan has no launch without blocks.

        Returns
        -------
        launcher : callable
            ``launcher(stream, arguments, 0)``, with the stream of ``current_stream`` and the
            address of what ``abi.template.Template.arguments`` returned.

        Raises
        ------
        ValueError
            The grid is none that a device can launch; an error of CuPy or the driver would name
            neither the kernel nor the limit.
        """
        if not 0 < grid <= _MAX_GRID:
            raise ValueError(f"{self.name}: got a grid of {grid}; expected 1 to {_MAX_GRID}")
        # why not the function itself: it takes a microsecond more for every launch
        driver_launch = sys.modules["cupy"].cuda.driver.launchKernel
        launch = partial(driver_launch, self.function.ptr, grid, 1, 1, *self.block, self.smem_bytes)
        return partial(_and_wait, launch) if self.synchronize else launch


def _and_wait(launch: Launcher, stream: int, arguments: int, extra: int) -> None:
    launch(stream, arguments, extra)
    sys.modules["cupy"].cuda.runtime.streamSynchronize(stream)


class _Thread(threading.local):
    """The devices whose contexts a thread has met."""

    def __init__(self) -> None:
        self.met: set[int] = set()


_thread = _Thread()


def current_stream(device_id: int) -> int:
    """CuPy's current stream in this thread, for launches on the current device, ``device_id``."""
    cuda = sys.modules["cupy"].cuda
    if device_id not in _thread.met:
        # why: the driver launches into the context of the calling thread, which has none before
        # the runtime was asked for something that needs one
        cuda.runtime.memGetInfo()
        _thread.met.add(device_id)
    stream: int = cuda.get_current_stream().ptr
    return stream


_kernels: dict[tuple[int, str, int], Kernel] = {}
# invariant: a lock belongs to one process; a child of fork never sees one that is held
_locks: dict[tuple[int, int, str], threading.Lock] = {}


def load(unit: Unit, arch: str, smem_bytes: int = 0) -> Kernel:
    """The unit's kernel on the current device, compiled and loaded where it is not yet.

    Parameters
    ----------
    unit : Unit
        The kernel.
    arch : str
        A target that the device runs (``compile.arch_for_device``).
    smem_bytes : int
        Dynamic shared memory of a block.

    Raises
    ------
    CompileError
        NVRTC is missing or refuses the unit.
    """
    import cupy

    options = CompileOptions(arch, lineinfo=debugging())
    device = int(cupy.cuda.runtime.getDevice())
    key = cache_key(unit, options, nvrtc_version())
    with _locks.setdefault((os.getpid(), device, key), threading.Lock()):
        kernel = _kernels.get((device, key, smem_bytes))
        if kernel is None:
            function = _load(unit, options, smem_bytes)
            block = (unit.num_threads, 1, 1)
            kernel = Kernel(unit.name, function, block, smem_bytes, debugging())
            _kernels[device, key, smem_bytes] = kernel
    return kernel


def _load(unit: Unit, options: CompileOptions, smem_bytes: int) -> _Function:
    import cupy

    cache = default_cache()
    try:
        raw = _raw_kernel(unit, cache.get(unit, options))
    except cupy.cuda.driver.CUDADriverError:
        # why: a cubin that passed its checksum and is refused was damaged before it was written;
        # where the device is at fault instead, the second attempt says so
        raw = _raw_kernel(unit, cache.rebuild(unit, options))
    if smem_bytes > _DEFAULT_SMEM_BYTES:
        raw.max_dynamic_shared_size_bytes = smem_bytes
    # why: RawKernel looks the device up at every call, its function is bound to this one
    return raw.kernel


def _raw_kernel(unit: Unit, entry: Entry) -> _RawKernel:
    import cupy

    with entry.cubin_path() as path:
        kernel: _RawKernel = cupy.RawModule(path=str(path)).get_function(unit.name)
    return kernel
