"""Which CUDA graph a repeated call launches instead of its kernels.

A graph holds the arguments of a call (``graph.py``). Memory comes from a pool, so a loop often has
the addresses of an earlier round, and then the graph that holds them is launched as it is. What
none holds is written into the one that was launched longest ago; that and its launch take 8 to 10
us more. A stream has as many graphs as it takes to find again what comes back.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence

from cuattn.jit.graph import Graph, RefusedError
from cuattn.jit.launch import Kernel

#: Calls on a stream before one of them makes a graph, and before the next one does: to make one
#: takes the host 230 us, and a call whose arguments one holds 9 us less (H200, three launches).
AFTER_CALLS = 32
#: Graphs of a process: each takes 0.13 MB of the device.
_MAX_GRAPHS = 128
#: Launches of a process after which a graph that had none of them gives its place to another.
_IDLE = 4096
#: Arguments that a stream remembers to have met, those of the last calls that found no graph.
_MAX_MET = 256
#: Streams of a plan, those launched on last, for streams come and go.
_MAX_STREAMS = 64

#: Handles that are no address: the legacy stream (0 is it too), and each thread's own.
_LEGACY, _PER_THREAD = 1, 2

#: A stream; with its thread where every thread has its own under the same handle.
_Stream = int | tuple[int, int]


class Replay:
    """The launches of a plan, by graph.

    A graph is a shortcut and nothing else: where there is none, or the driver refuses it, the
    caller launches kernel by kernel, and hears from that what is wrong, if more is.

    Parameters
    ----------
    launches : sequence of (Kernel, int)
        The kernels in order, all of which take the same arguments, with their grids.
    """

    def __init__(self, launches: Sequence[tuple[Kernel, int]]) -> None:
        self._launches = launches
        #: A stream has its own graphs, for two launches of one never overlap.
        self._streams: dict[_Stream, _OfStream] = {}

    def launch(
        self, stream: int, addresses: tuple[int, ...], arguments: Callable[[], array[int]]
    ) -> bool:
        """Whether a graph did all launches on a stream of the current device; else nothing is done.

        None does for the first calls on a stream, nor for one that is captured.

        Parameters
        ----------
        stream : int
            What ``launch.current_stream`` returned.
        addresses : tuple of int
            All addresses in the arguments, in one order: what a graph is found by.
        arguments : callable
            Returns what ``abi.template.Template.arguments`` does; called where no graph holds it.
        """
        # The legacy stream cannot be captured, and to ask it is an error while another one is.
        if stream > _LEGACY and sys.modules["cupy"].cuda.runtime.streamIsCapturing(stream):
            return False  # a capture takes kernels, not a graph that is ready to run
        key = stream if stream != _PER_THREAD else (stream, threading.get_ident())
        graphs = self._streams.get(key) or self._new(key)
        return graphs.launch(stream, addresses, arguments)

    def _new(self, key: _Stream) -> _OfStream:
        with _lock:
            graphs = self._streams.setdefault(key, _OfStream(self._launches))
            _idle = None
            if len(self._streams) > _MAX_STREAMS:
                _idle = self._streams.pop(min(self._streams, key=lambda k: self._streams[k].used))
        return graphs  # and what was dropped goes without the lock


class _OfStream:
    """The graphs of a plan on one stream."""

    def __init__(self, launches: Sequence[tuple[Kernel, int]]) -> None:
        self.used = next(_clock)
        #: By the addresses that they hold, in the order of their last launches.
        self.graphs: dict[tuple[int, ...], Graph] = {}
        self._launches = launches
        self._met: dict[int, bool] = {}  # hashes: two that are one cost a graph
        self._calls = 0
        # invariant: who has it is alone with these graphs, which the driver leaves to its users
        self._lock = threading.Lock()

    def launch(
        self, stream: int, addresses: tuple[int, ...], arguments: Callable[[], array[int]]
    ) -> bool:
        """Whether a graph did it; where one is refused, all of the stream go."""
        if not self._lock.acquire(blocking=False):
            return False  # another thread has it, or this one, interrupted by what calls this
        try:
            self._calls += 1
            self.used = next(_clock)
            graph = self.graphs.pop(addresses, None) or self._that_takes(addresses, arguments)
            if graph is None:
                return False
            self.graphs[addresses] = graph
            graph.used = self.used
            graph.launch(stream)
        except RefusedError:
            self.graphs.clear()
            return False
        finally:
            self._lock.release()
        return True

    def _that_takes(
        self, addresses: tuple[int, ...], arguments: Callable[[], array[int]]
    ) -> Graph | None:
        """Another graph, for arguments that came back, or the one launched longest ago."""
        is_first = not self.graphs
        came_back = self._met.pop(hash(addresses), False)
        if self._calls > AFTER_CALLS and (came_back or is_first):
            self._calls = 0
            if _has_room(is_urgent=is_first):
                new = Graph(self._launches, arguments())
                with _lock:
                    _made.append((weakref.ref(new), weakref.ref(self)))
                return new
        self._met[hash(addresses)] = True
        if len(self._met) > _MAX_MET:
            del self._met[next(iter(self._met))]
        oldest = next(iter(list(self.graphs)), ())  # of a copy: another thread may take it
        graph = self.graphs.pop(oldest, None)
        if graph is not None:
            graph.fill(arguments())
        return graph

    def drop(self, graph: Graph) -> None:
        """Have it no longer."""
        for addresses, each in list(self.graphs.items()):
            if each is graph:
                self.graphs.pop(addresses, None)


#: The graphs of this process, and whose they are: some may be gone.
_made: list[tuple[Callable[[], Graph | None], Callable[[], _OfStream | None]]] = []
_lock = threading.RLock()  # the garbage collector may call in
#: Counts launches.
_clock = itertools.count()


def _has_room(*, is_urgent: bool) -> bool:
    """Whether there may be another graph, in place of the one launched longest ago if need be."""
    with _lock:
        alive = [(graph, each) for each in _made if (graph := each[0]()) is not None]
        _made[:] = [each for _, each in alive]
        if len(alive) < _MAX_GRAPHS:
            return True
        oldest, (_, owner) = min(alive, key=lambda each: each[0].used)
        if not is_urgent and next(_clock) - oldest.used < _IDLE:
            return False
        its_stream = owner()
        if its_stream is not None:
            its_stream.drop(oldest)
    return True  # and what was dropped goes without the lock
