"""Graphs of launches without a GPU: what they are made of, when there is one, what is filled."""

import ctypes
import sys
import weakref
from array import array
from types import SimpleNamespace

import pytest

from cuattn.abi.template import WORD
from cuattn.jit import graph
from cuattn.jit.launch import Kernel

STREAM, OTHER = 77, 78
KERNELS = [
    (Kernel("cuattn_a", SimpleNamespace(ptr=5), (64, 1, 1), 512, synchronize=False), 7),
    (Kernel("cuattn_b", SimpleNamespace(ptr=6), (128, 1, 1), 0, synchronize=False), 9),
]


class FakeDriver:
    """The driver calls that a graph needs, with a status to give back."""

    def __init__(self):
        self.nodes, self.filled, self.launched, self.destroyed = [], [], [], []
        self.status, self.mode = 0, 0

    def cuGraphCreate(self, graph, flags):
        graph._obj.value = 1000
        return 0

    def cuGraphAddKernelNode_v2(self, node, graph, before, count, params):
        node._obj.value = len(self.nodes) + 1
        self.nodes.append((before and before._obj.value, count, *self.read(params._obj)))
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.mode, mode._obj.value = mode._obj.value, self.mode
        return 0

    def cuGraphInstantiateWithFlags(self, executable, graph, flags):
        assert self.mode == 2
        executable._obj.value = 2000
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, executable, node, params):
        self.filled.append((executable.value, node.value, *self.read(params._obj)))
        return 0

    def cuGraphLaunch(self, executable, stream):
        self.launched.append((executable.value, stream))
        return self.status

    def cuGraphExecDestroy(self, executable):
        self.destroyed.append(executable.value)

    def cuGraphDestroy(self, graph):
        self.destroyed.append(graph.value)

    @staticmethod
    def read(params):
        """The function, grid, block, shared memory, and the first word of the argument."""
        argument = ctypes.c_uint64.from_address(params.arguments).value
        word = ctypes.c_uint64.from_address(argument).value
        return params.func, tuple(params.grid), tuple(params.block), params.smem_bytes, word


def arguments(word):
    """A struct of one word, as a template gives it."""
    words = array("Q", [0, word])
    words[0] = words.buffer_info()[0] + WORD
    return words


@pytest.fixture
def driver(monkeypatch):
    fake, capturing = FakeDriver(), set()
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(streamIsCapturing=lambda stream: stream in capturing),
        driver=SimpleNamespace(CUDADriverError=RuntimeError),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(graph, "_driver", lambda: fake)
    monkeypatch.setattr(graph, "_AFTER_CALLS", 1)
    monkeypatch.setattr(graph, "_alive", weakref.WeakSet())
    fake.capturing = capturing
    return fake


def test_the_second_call_of_a_stream_makes_its_graph_and_every_call_fills_it(driver):
    graphs = graph.Graphs(KERNELS)
    assert [graphs.launch(STREAM, arguments(word)) for word in (10, 20, 30)] == [False, True, True]
    first, second = (5, (7, 1, 1), (64, 1, 1), 512), (6, (9, 1, 1), (128, 1, 1), 0)
    assert driver.nodes == [(None, 0, *first, 20), (1, 1, *second, 20)]
    assert driver.filled == [
        (2000, node, *kernel, word)
        for word in (20, 30)
        for node, kernel in ((1, first), (2, second))
    ]
    assert driver.launched == [(2000, STREAM)] * 2
    assert driver.mode == 0
    del graphs
    assert driver.destroyed == [2000, 1000]


def test_a_graph_waits_for_as_many_calls_as_pay_for_it(driver, monkeypatch):
    monkeypatch.setattr(graph, "_AFTER_CALLS", 3)
    graphs = graph.Graphs(KERNELS)
    calls = (STREAM, OTHER, STREAM, STREAM, OTHER, STREAM, STREAM)
    given = [graphs.launch(stream, arguments(1)) for stream in calls]
    assert given == [False] * 5 + [True] * 2


def test_a_process_has_so_many_graphs_and_not_more(driver, monkeypatch):
    monkeypatch.setattr(graph, "_MAX_GRAPHS", 2)
    first, second = graph.Graphs(KERNELS), graph.Graphs(KERNELS)

    def launch(graphs, *streams):
        return [graphs.launch(stream, arguments(1)) for stream in streams]

    assert launch(first, 0, STREAM, 0, STREAM) == [False, False, True, True]
    assert launch(second, OTHER, OTHER) == [False, False]
    del first
    assert launch(second, OTHER) == [True]


def test_calls_are_counted_of_so_many_streams_and_not_more(driver, monkeypatch):
    monkeypatch.setattr(graph, "_MAX_COUNTED", 3)
    graphs = graph.Graphs(KERNELS)
    for stream in range(20):
        assert not graphs.launch(stream, arguments(1))
        assert len(graphs._calls) <= 3


def test_a_stream_that_is_captured_gets_no_graph(driver):
    graphs = graph.Graphs(KERNELS)
    assert [graphs.launch(STREAM, arguments(1)) for _ in range(2)] == [False, True]
    driver.capturing.add(STREAM)
    assert not graphs.launch(STREAM, arguments(1))
    assert len(driver.launched) == 1


def test_the_legacy_stream_is_not_asked_whether_it_is_captured(driver):
    driver.capturing.add(0)
    graphs = graph.Graphs(KERNELS)
    assert [graphs.launch(0, arguments(1)) for _ in range(2)] == [False, True]


def test_an_error_of_the_driver_is_raised(driver):
    graphs = graph.Graphs(KERNELS)
    graphs.launch(STREAM, arguments(1))
    driver.status = 700
    with pytest.raises(RuntimeError, match="700"):
        graphs.launch(STREAM, arguments(1))


def test_a_node_has_the_layout_of_the_driver():
    params = graph._NodeParams
    assert ctypes.sizeof(params) == 72
    offsets = {"func": 0, "grid": 8, "block": 20, "smem_bytes": 32, "arguments": 40, "extra": 48}
    assert {name: getattr(params, name).offset for name in offsets} == offsets
