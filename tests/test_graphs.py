"""Graphs of launches, without a GPU: what they are made of, when there is one, what is filled."""

import collections
import ctypes
import sys
import threading
import time
from array import array
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from types import SimpleNamespace

import pytest

from cuattn.abi.template import WORD
from cuattn.jit import graph
from cuattn.jit.launch import Kernel

STREAM, OTHER = 77 << 40, 78 << 40  # addresses, so more than an int
FUNCTIONS = 5 << 40, 6 << 40
KERNELS = [
    (Kernel("cuattn_a", SimpleNamespace(ptr=FUNCTIONS[0]), (64, 2, 1), 512, synchronize=False), 7),
    (Kernel("cuattn_b", SimpleNamespace(ptr=FUNCTIONS[1]), (128, 1, 1), 0, synchronize=False), 9),
]
NODES = [(FUNCTIONS[0], (7, 1, 1), (64, 2, 1), 512), (FUNCTIONS[1], (9, 1, 1), (128, 1, 1), 0)]
STRICT, RELAXED = 0, 2


class CudaKernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2, field by field as in the driver's header."""

    _fields_ = (
        ("func", c_void_p),
        *((f"{of}Dim{axis}", c_uint) for of in ("grid", "block") for axis in "XYZ"),
        ("sharedMemBytes", c_uint),
        ("kernelParams", POINTER(POINTER(c_ulonglong))),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )

    def read(self):
        """The launch, and the first word of what its one argument holds."""
        assert (self.extra, self.kern, self.ctx) == (None, None, None)
        grid = self.gridDimX, self.gridDimY, self.gridDimZ
        block = self.blockDimX, self.blockDimY, self.blockDimZ
        word = self.kernelParams[0][0]
        return (self.func, grid, block, self.sharedMemBytes), word


class FakeDriver:
    """The calls that a graph needs, as C functions; each gives what ``status`` has for it."""

    def __init__(self):
        self.status = collections.Counter()
        self.modes = collections.defaultdict(lambda: STRICT)
        self.fresh = iter(range(1 << 40, 1 << 50, 1 << 36))
        self.alive, self.nodes, self.launched = {}, {}, []
        handles, params = POINTER(c_void_p), POINTER(CudaKernelNodeParams)
        self.functions = {}
        for function, types in (
            (self.cuGraphCreate, (handles, c_uint)),
            (self.cuGraphAddKernelNode_v2, (handles, c_void_p, handles, c_size_t, params)),
            (self.cuGraphInstantiateWithFlags, (handles, c_void_p, c_ulonglong)),
            (self.cuGraphExecKernelNodeSetParams_v2, (c_void_p, c_void_p, params)),
            (self.cuGraphLaunch, (c_void_p, c_void_p)),
            (self.cuGraphExecDestroy, (c_void_p,)),
            (self.cuGraphDestroy, (c_void_p,)),
            (self.cuThreadExchangeStreamCaptureMode, (POINTER(c_int),)),
        ):
            name = function.__name__
            self.functions[name] = CFUNCTYPE(c_int, *types)(self._with_status(name, function))

    def _with_status(self, name, function):
        def call(*arguments):
            return self.status[name] or function(*arguments) or 0

        return call

    def cuGraphCreate(self, graph, flags):
        assert flags == 0
        graph[0] = next(self.fresh)
        self.alive[graph[0]] = []

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, params):
        node[0] = next(self.fresh)
        kernel, _ = params[0].read()
        nodes = self.alive[graph]
        assert [before[i] for i in range(count)] == [each for each, _ in nodes[-1:]]
        nodes.append((node[0], kernel))

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        assert flags == 0
        assert self.modes[threading.get_ident()] == RELAXED
        executable[0] = next(self.fresh)
        self.alive[executable[0]] = graph
        self.nodes[executable[0]] = {node: (kernel, None) for node, kernel in self.alive[graph]}

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, params):
        assert self.nodes[executable][node][0] == params[0].read()[0]
        self.nodes[executable][node] = params[0].read()
        time.sleep(0)  # another thread may come between

    def cuGraphLaunch(self, executable, stream):
        self.launched.append((executable, stream, list(self.nodes[executable].values())))

    def cuGraphExecDestroy(self, executable):
        assert self.modes[threading.get_ident()] == RELAXED
        del self.alive[executable]

    def cuGraphDestroy(self, graph):
        assert self.modes[threading.get_ident()] == RELAXED
        del self.alive[graph]

    def cuThreadExchangeStreamCaptureMode(self, mode):
        thread = threading.get_ident()
        self.modes[thread], mode[0] = mode[0], self.modes[thread]


def arguments(word):
    """A struct of one word, as a template gives it."""
    words = array("Q", [0, word])
    words[0] = words.buffer_info()[0] + WORD
    return words


def launch(graphs, *streams, word=1):
    return [graphs.launch(stream, arguments(word)) for stream in streams]


@pytest.fixture
def driver(monkeypatch):
    fake, fake.capturing, fake.asked = FakeDriver(), set(), []

    def is_capturing(stream):
        fake.asked.append(stream)
        return stream in fake.capturing

    runtime = SimpleNamespace(streamIsCapturing=is_capturing)
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**fake.functions))
    monkeypatch.setattr(graph, "AFTER_CALLS", 1)
    monkeypatch.setattr(graph, "_made", collections.deque())
    graph._driver.cache_clear()
    yield fake
    graph._driver.cache_clear()


def test_a_graph_has_the_kernels_in_order_and_every_call_fills_them(driver):
    graphs = graph.Graphs(KERNELS)
    assert [graphs.launch(STREAM, arguments(word)) for word in (10, 20, 30)] == [False, True, True]
    (executable,) = driver.nodes
    assert driver.launched == [
        (executable, STREAM, [(node, word) for node in NODES]) for word in (20, 30)
    ]
    assert set(driver.modes.values()) == {STRICT}  # as it was
    assert len(driver.alive) == 2
    del graphs
    assert driver.alive == {}


def test_a_graph_waits_for_as_many_calls_as_pay_for_it(driver, monkeypatch):
    monkeypatch.setattr(graph, "AFTER_CALLS", 3)
    calls = (STREAM, OTHER, STREAM, STREAM, OTHER, STREAM, STREAM)
    assert launch(graph.Graphs(KERNELS), *calls) == [False] * 5 + [True] * 2


def test_a_stream_has_a_graph_of_its_own(driver):
    assert launch(graph.Graphs(KERNELS), STREAM, OTHER, 0, STREAM, OTHER, 0)[3:] == [True] * 3
    assert [stream or 0 for _, stream, _ in driver.launched] == [STREAM, OTHER, 0]
    assert len({executable for executable, _, _ in driver.launched}) == 3


def test_a_thread_has_a_graph_of_its_own_on_the_stream_that_each_has(driver):
    graphs = graph.Graphs(KERNELS)
    assert launch(graphs, graph._PER_THREAD, graph._PER_THREAD) == [False, True]
    other = threading.Thread(target=launch, args=(graphs, *[graph._PER_THREAD] * 2))
    other.start()
    other.join()
    assert len({executable for executable, _, _ in driver.launched}) == 2


def test_threads_on_one_stream_launch_what_they_filled(driver):
    graphs, streams = graph.Graphs(KERNELS), [STREAM] * 200
    launch(graphs, STREAM, STREAM, word=0)
    threads = [
        threading.Thread(target=launch, args=(graphs, *streams), kwargs={"word": word})
        for word in range(1, 5)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = collections.Counter()
    for _, _, nodes in driver.launched[1:]:
        (word,) = {word for _, word in nodes}
        counted[word] += 1
    assert counted == dict.fromkeys(range(1, 5), len(streams))


def test_the_graphs_of_a_process_are_those_made_last(driver, monkeypatch):
    monkeypatch.setattr(graph, "_MAX_GRAPHS", 2)
    first, second = graph.Graphs(KERNELS), graph.Graphs(KERNELS)
    assert launch(first, STREAM, OTHER, STREAM, OTHER)[2:] == [True, True]
    assert launch(second, STREAM, STREAM) == [False, True]
    assert len(driver.alive) == 2 * 2
    assert launch(first, OTHER, STREAM) == [True, False]
    del first
    assert launch(second, OTHER, OTHER, STREAM) == [False, True, True]


def test_calls_are_counted_of_so_many_streams_and_not_more(driver, monkeypatch):
    monkeypatch.setattr(graph, "_MAX_COUNTED", 3)
    monkeypatch.setattr(graph, "AFTER_CALLS", 2)
    graphs = graph.Graphs(KERNELS)
    assert launch(graphs, *(STREAM, OTHER, 0) * 3) == [False] * 6 + [True] * 3
    for stream in range(STREAM + 1, STREAM + 20):
        assert launch(graphs, stream) == [False]
        assert len(graphs._calls) <= 3


def test_a_stream_that_is_captured_makes_no_graph_and_launches_none(driver):
    graphs = graph.Graphs(KERNELS)
    assert launch(graphs, STREAM) == [False]
    driver.capturing.add(STREAM)
    assert launch(graphs, STREAM, STREAM) == [False, False]
    assert driver.alive == {}
    driver.capturing.clear()
    assert launch(graphs, STREAM) == [True]
    driver.capturing.add(STREAM)
    assert launch(graphs, STREAM) == [False]
    assert len(driver.launched) == 1


def test_the_legacy_stream_is_not_asked_whether_it_is_captured(driver):
    launch(graph.Graphs(KERNELS), 0, graph._LEGACY, graph._PER_THREAD, STREAM)
    assert driver.asked == [graph._PER_THREAD, STREAM]


@pytest.mark.parametrize(
    "refused",
    [
        "cuGraphCreate",
        "cuGraphAddKernelNode_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphExecKernelNodeSetParams_v2",
        "cuGraphLaunch",
    ],
)
def test_what_the_driver_refuses_is_left_to_the_launches_and_tried_again(driver, refused):
    graphs = graph.Graphs(KERNELS)
    driver.status[refused] = 2
    assert launch(graphs, *[STREAM] * 4) == [False] * 4
    assert driver.launched == []
    assert driver.alive == {}
    assert set(driver.modes.values()) <= {STRICT}
    del driver.status[refused]
    assert launch(graphs, STREAM, STREAM, STREAM) == [False, True, True]
