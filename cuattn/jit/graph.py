"""A plan's launches as one CUDA graph that every call fills anew.

The host fills the nodes' parameters and launches once, for less than half of what as many launches
cost it, and the device goes from kernel to kernel sooner. Graph management of the CUDA driver API;
CuPy has no call that changes the parameters of a node, so they are called by ctypes.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache, partial

from cuattn.jit.launch import Kernel

#: Calls on a stream before there is a graph for it: to make one takes the host 230 us, and a call
#: takes 7 us less through it (H200, the three launches of a backward).
_AFTER_CALLS = 32
#: Graphs of a process: each takes 130 KB of the device, which a program of many shapes would fill.
_MAX_GRAPHS = 128
#: Streams of a plan whose calls are counted at a time, for streams come and go.
_MAX_COUNTED = 64

_CAPTURE_MODE_RELAXED = 2

_alive: weakref.WeakSet[_Graph] = weakref.WeakSet()
_lock = threading.Lock()


class Graphs:
    """The graphs of a plan: one a stream, for two launches of the same graph never overlap.

    Parameters
    ----------
    launches : sequence of (Kernel, int)
        The kernels in order, all of which take the same arguments, with their grids.
    """

    def __init__(self, launches: Sequence[tuple[Kernel, int]]) -> None:
        self._launches = launches
        self._calls: dict[int, int] = {}
        self._graphs: dict[int, _Graph] = {}

    def launch(self, stream: int, arguments: array[int]) -> bool:
        """Whether a graph did all launches on a stream of the current device; else nothing is done.

        There is none for the first calls on a stream, for one that is captured, and where a process
        has too many already.

        Parameters
        ----------
        stream : int
            What ``launch.current_stream`` returned.
        arguments : array of int
            What ``abi.template.Template.arguments`` returned.
        """
        # 0 is the legacy stream, which cannot be captured: to ask it could invalidate a capture.
        if stream and sys.modules["cupy"].cuda.runtime.streamIsCapturing(stream):
            return False  # a capture takes kernels, not a graph that is ready to run
        graph = self._graphs.get(stream) or self._after_calls(stream, arguments)
        if graph is None:
            return False
        graph.launch(stream, arguments)
        return True

    def _after_calls(self, stream: int, arguments: array[int]) -> _Graph | None:
        with _lock:
            if stream not in self._graphs:
                if len(self._calls) >= _MAX_COUNTED:
                    self._calls.clear()
                calls = self._calls[stream] = self._calls.get(stream, 0) + 1
                if calls <= _AFTER_CALLS or len(_alive) >= _MAX_GRAPHS:
                    return None
                self._graphs[stream] = _Graph(self._launches, arguments)
            return self._graphs[stream]


class _Graph:
    """Kernels in order, as an executable graph of the device that is current."""

    def __init__(self, launches: Sequence[tuple[Kernel, int]], arguments: array[int]) -> None:
        driver = _driver()
        graph, executable = c_void_p(), c_void_p()
        _check(driver.cuGraphCreate(byref(graph), 0))
        self._argument = c_void_p(arguments[0])
        nodes = []
        before = None
        for kernel, grid in launches:
            params, node = _NodeParams(), c_void_p()
            params.func = kernel.function.ptr
            params.grid = (grid, 1, 1)
            params.block = kernel.block
            params.smem_bytes = kernel.smem_bytes
            params.arguments = ctypes.addressof(self._argument)
            _check(
                driver.cuGraphAddKernelNode_v2(
                    byref(node),
                    graph,
                    None if before is None else byref(before),
                    0 if before is None else 1,
                    byref(params),
                )
            )
            nodes.append((node, params))
            before = node
        with _relaxed(driver):
            _check(driver.cuGraphInstantiateWithFlags(byref(executable), graph, 0))
        # Params are read again at every fill.
        self._fills: list[Callable[[], int]] = [
            partial(driver.cuGraphExecKernelNodeSetParams_v2, executable, node, byref(params))
            for node, params in nodes
        ]
        self._launch: Callable[[int], int] = partial(driver.cuGraphLaunch, executable)
        # invariant: from filling to launching is one step, or a call runs with another's arrays
        self._lock = threading.Lock()
        _alive.add(self)
        # A graph that waits on the device or runs is freed by the driver when it has ended.
        weakref.finalize(self, _destroy, driver, graph, executable).atexit = False

    def launch(self, stream: int, arguments: array[int]) -> None:
        """Launch all kernels with these arguments, which are copied before this returns."""
        with self._lock:
            self._argument.value = arguments[0]
            for fill in self._fills:
                if status := fill():
                    break
            else:
                status = self._launch(stream)
        _check(status)


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
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    handle, handles = c_void_p, POINTER(c_void_p)
    for name, types in (
        ("cuGraphCreate", (handles, c_uint)),
        ("cuGraphAddKernelNode_v2", (handles, handle, handles, c_size_t, POINTER(_NodeParams))),
        ("cuGraphInstantiateWithFlags", (handles, handle, c_ulonglong)),
        ("cuThreadExchangeStreamCaptureMode", (POINTER(c_int),)),
        ("cuGraphExecKernelNodeSetParams_v2", (handle, handle, POINTER(_NodeParams))),
        ("cuGraphLaunch", (handle, handle)),
        ("cuGraphExecDestroy", (handle,)),
        ("cuGraphDestroy", (handle,)),
    ):
        getattr(driver, name).argtypes = types
    return driver


@contextlib.contextmanager
def _relaxed(driver: ctypes.CDLL) -> Iterator[None]:
    """Let this thread do what a capture elsewhere, in a strict mode, would be invalidated by."""
    mode = c_int(_CAPTURE_MODE_RELAXED)
    _check(driver.cuThreadExchangeStreamCaptureMode(byref(mode)))
    try:
        yield
    finally:
        _check(driver.cuThreadExchangeStreamCaptureMode(byref(mode)))


def _check(status: int) -> None:
    if status:
        raise sys.modules["cupy"].cuda.driver.CUDADriverError(status)


def _destroy(driver: ctypes.CDLL, graph: c_void_p, executable: c_void_p) -> None:
    driver.cuGraphExecDestroy(executable)
    driver.cuGraphDestroy(graph)
