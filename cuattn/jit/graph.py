"""The launches of a plan as one CUDA graph, into which every call writes its arguments.

It costs the host less than half of what the launches do, and the device pauses less between them
(kernels_cu/TUNING.md). CuPy lacks the calls that are needed, so they go to the driver by ctypes:
CUDA driver API, Graph Management.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from ctypes import POINTER, byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from functools import cache, partial

from cuattn.jit.launch import Kernel

#: Calls on a stream before there is a graph for it: to make one takes the host 230 us, and a call
#: takes 7 us less through it (H200, the three launches of a backward).
AFTER_CALLS = 32
#: Graphs of a process, those made last: each takes 0.13 MB of the device.
_MAX_GRAPHS = 128
#: Streams of a plan whose calls are counted at a time, for streams come and go.
_MAX_COUNTED = 64

#: Handles that are no address: the legacy stream (0 is it too), and each thread's own.
_LEGACY, _PER_THREAD = 1, 2
_CAPTURE_MODE_RELAXED = 2

#: A stream; with its thread where every thread has its own under the same handle.
Key = int | tuple[int, int]


class Graphs:
    """The graphs of a plan: one a stream, for two launches of the same graph never overlap.

    A graph is a shortcut and nothing else: where the driver refuses one, or to launch it, the
    caller launches kernel by kernel, and hears from that what is wrong, if more is.

    Parameters
    ----------
    launches : sequence of (Kernel, int)
        The kernels in order, all of which take the same arguments, with their grids.
    """

    def __init__(self, launches: Sequence[tuple[Kernel, int]]) -> None:
        self._launches = launches
        self._calls: dict[Key, int] = {}
        self._graphs: dict[Key, _Graph] = {}

    def launch(self, stream: int, arguments: array[int]) -> bool:
        """Whether a graph did all launches on a stream of the current device; else nothing is done.

        None does for the first calls on a stream, nor for one that is captured.

        Parameters
        ----------
        stream : int
            What ``launch.current_stream`` returned.
        arguments : array of int
            What ``abi.template.Template.arguments`` returned.
        """
        # The legacy stream cannot be captured, and to ask it is an error while another one is.
        if stream > _LEGACY and sys.modules["cupy"].cuda.runtime.streamIsCapturing(stream):
            return False  # a capture takes kernels, not a graph that is ready to run
        key: Key = stream if stream != _PER_THREAD else (stream, threading.get_ident())
        try:
            graph = self._graphs.get(key) or self._after_calls(key, arguments)
            if graph is None:
                return False
            graph.launch(stream, arguments)
        except _RefusedError:
            self._graphs.pop(key, None)
            return False
        return True

    def _after_calls(self, key: Key, arguments: array[int]) -> _Graph | None:
        with _lock:
            if key in self._graphs:
                return self._graphs[key]
            if key not in self._calls and len(self._calls) >= _MAX_COUNTED:
                self._calls.clear()
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= AFTER_CALLS:
                return None
            del self._calls[key]
        graph = _Graph(self._launches, arguments)
        with _lock:
            self._graphs[key] = graph
            _made.append((weakref.ref(self), key))
            if len(_made) > _MAX_GRAPHS:
                oldest, its_key = _made.popleft()
                owner = oldest()
                if owner is not None:
                    owner._graphs.pop(its_key, None)
        return graph


#: Whose graph on which stream, the oldest first; some of them may be gone.
_made: deque[tuple[Callable[[], Graphs | None], Key]] = deque()
_lock = threading.Lock()


class _Graph:
    """Kernels in order, as an executable graph of the device that is current."""

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
        self._fills: list[Callable[[], int]] = [
            partial(driver.cuGraphExecKernelNodeSetParams_v2, executable, node, byref(params))
            for node, params in nodes
        ]
        self._launch: Callable[[int], int] = partial(driver.cuGraphLaunch, executable)
        # invariant: from filling to launching is one step, or a call runs with another's arrays
        self._lock = threading.Lock()

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
    handle, handles, params = c_void_p, POINTER(c_void_p), POINTER(_NodeParams)
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
    return driver


class _RefusedError(Exception):
    """The driver does not do it; its status says why."""


def _check(status: int) -> None:
    if status:
        raise _RefusedError(status)


@contextlib.contextmanager
def _relaxed(driver: ctypes.CDLL) -> Iterator[None]:
    """Let this thread do what would invalidate a capture in a strict mode elsewhere."""
    mode = c_int(_CAPTURE_MODE_RELAXED)
    driver.cuThreadExchangeStreamCaptureMode(byref(mode))
    try:
        yield
    finally:
        driver.cuThreadExchangeStreamCaptureMode(byref(mode))


def _destroy(driver: ctypes.CDLL, graph: c_void_p, executable: c_void_p) -> None:
    with _relaxed(driver):
        if executable:
            driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)
