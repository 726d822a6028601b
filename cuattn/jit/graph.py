"""The launches of a plan as one CUDA graph, which holds the arguments of a call.

Launched as it is, it costs the host a third of what the launches do, and the device pauses less
between them (kernels_cu/TUNING.md). CuPy lacks the calls that are needed, so they go to the driver
by ctypes: CUDA driver API, Graph Management.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache, partial

from cuattn.jit.launch import Kernel

_CAPTURE_MODE_RELAXED = 2


class RefusedError(Exception):
    """The driver does not do it, or lacks it."""


class Graph:
    """Kernels in order with their arguments, as an executable graph of the current device.

    One thread at a time may use it; every method raises RefusedError where the driver does.

    Attributes
    ----------
    used : int
        When it was launched last, by the clock of whoever does.
    """

    used = 0

    def __init__(self, launches: Sequence[tuple[Kernel, int]], arguments: array[int]) -> None:
        driver = _driver()
        graph, executable = c_void_p(), c_void_p()
        _check(driver.cuGraphCreate(byref(graph), 0))
        # What waits on the device or runs is freed by the driver when it has ended.
        weakref.finalize(self, _destroy, driver, graph, executable).atexit = False
        self._argument = c_void_p(arguments[0])
        nodes: list[tuple[c_void_p, _NodeParams]] = []
        for kernel, grid in launches:
            params, node = _NodeParams(), c_void_p()
            params.func = kernel.function.ptr
            params.grid = (grid, 1, 1)
            params.block = kernel.block
            params.smem_bytes = kernel.smem_bytes
            params.arguments = ctypes.addressof(self._argument)
            before = (byref(nodes[-1][0]), 1) if nodes else (None, 0)
            _check(driver.cuGraphAddKernelNode_v2(byref(node), graph, *before, byref(params)))
            nodes.append((node, params))
        with _relaxed(driver):
            _check(driver.cuGraphInstantiateWithFlags(byref(executable), graph, 0))
        fill = driver.cuGraphExecKernelNodeSetParams_v2
        self._fills: list[Callable[[], int]] = [
            partial(fill, executable, node, byref(params)) for node, params in nodes
        ]
        self._launch: Callable[[int], int] = partial(driver.cuGraphLaunch, executable)

    def fill(self, arguments: array[int]) -> None:
        """Hold other arguments, which are copied before this returns."""
        self._argument.value = arguments[0]
        for fill in self._fills:
            _check(fill())

    def launch(self, stream: int) -> None:
        """Launch all kernels."""
        _check(self._launch(stream))


class _NodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS of the driver API, as it is since CUDA 12."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("smem_bytes", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


@cache
def _driver() -> ctypes.CDLL:
    """The CUDA driver, which CuPy has loaded."""
    handle, handles, params = c_void_p, POINTER(c_void_p), POINTER(_NodeParams)
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        for name, types in (
            ("cuGraphCreate", (handles, c_uint)),
            ("cuGraphAddKernelNode_v2", (handles, handle, handles, c_size_t, params)),
            ("cuGraphInstantiateWithFlags", (handles, handle, c_ulonglong)),
            ("cuGraphExecKernelNodeSetParams_v2", (handle, handle, params)),
            ("cuGraphLaunch", (handle, handle)),
            ("cuGraphExecDestroy", (handle,)),
            ("cuGraphDestroy", (handle,)),
            ("cuThreadExchangeStreamCaptureMode", (POINTER(c_int),)),
        ):
            getattr(driver, name).argtypes = types
    except (OSError, AttributeError) as error:  # not there, or older than CUDA 12
        raise RefusedError from error
    return driver


def _check(status: int) -> None:
    if status:
        raise RefusedError(status)


@contextlib.contextmanager
def _relaxed(driver: ctypes.CDLL) -> Iterator[None]:
    """Let this thread do what would invalidate a capture in a strict mode elsewhere."""
    mode = c_int(_CAPTURE_MODE_RELAXED)
    _check(driver.cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(byref(mode))


def _destroy(driver: ctypes.CDLL, graph: c_void_p, executable: c_void_p) -> None:
    with contextlib.suppress(RefusedError), _relaxed(driver):
        if executable:
            driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)
