"""Repeated calls of several launches run as graphs, and give what their launches give."""

import collections
import threading

import numpy as np
import pytest
from calls import draw, same_bits

import cuattn
from cuattn import execute
from cuattn.jit import graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("engine", ["simt", "sm80"], indirect=True, scope="module"),
]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Make a graph at the second call of a stream."""
    monkeypatch.setattr(graph, "AFTER_CALLS", 1)


class Case:
    """Arrays of one problem, several times, and what the launches give for each of them."""

    def __init__(self, engine, count=4):
        import cupy

        execute.forget()
        shape = (1, 1024, 16, 64)
        all_arrays = draw(*[(count, *shape)] * 4)
        self.arrays = [[engine.asarray(each[i]) for each in all_arrays] for i in range(count)]
        self.res = [
            cuattn.attention_forward(*each[:3], deterministic=True)[1] for each in self.arrays
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graph.Graphs, "launch", lambda *_: False)
            self.expected = [self.on_host(self.enqueue(i)) for i in range(count)]
        cupy.cuda.Device().synchronize()
        execute.forget()

    def enqueue(self, i):
        gradients = cuattn.attention_backward(self.res[i], self.arrays[i][3])
        return gradients.dq, gradients.dk, gradients.dv

    @staticmethod
    def on_host(results):
        import cupy

        return [cupy.asnumpy(each) for each in results]

    def is_right(self, i, results):
        return all(map(same_bits, self.expected[i], self.on_host(results)))


def streams_with_graphs():
    """Of the one executable that there is."""
    (found,) = [
        each for each in execute._executables.values() if each.plan.problem.op == "backward"
    ]
    assert len(found.plan.launches) == 3
    return list(found._graphs._graphs)


def test_calls_one_after_another_get_the_bits_of_their_own_arrays(engine):
    import cupy

    case = Case(engine)
    for stream in (
        cupy.cuda.Stream.null,
        cupy.cuda.Stream.ptds,
        cupy.cuda.Stream(non_blocking=True),
    ):
        with stream:
            results = [(i, case.enqueue(i)) for _ in range(5) for i in range(len(case.arrays))]
            assert all(case.is_right(i, its) for i, its in results)
    assert len(streams_with_graphs()) == 3


def test_threads_that_share_a_stream_get_the_bits_of_their_own_arrays(engine):
    import cupy

    case, stream = Case(engine), cupy.cuda.Stream(non_blocking=True)
    results = [[] for _ in case.arrays]
    start = threading.Barrier(len(results))

    def run(i):
        with cupy.cuda.Device(0), stream:
            start.wait(timeout=60)
            results[i] += [case.enqueue(i) for _ in range(20)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(results))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    stream.synchronize()
    for i, its in enumerate(results):
        assert len(its) == 20
        assert all(case.is_right(i, each) for each in its)
    assert streams_with_graphs() == [stream.ptr]


def test_streams_run_side_by_side_and_no_more_than_may_have_graphs(engine, monkeypatch):
    import cupy

    case = Case(engine)
    monkeypatch.setattr(graph, "_made", collections.deque())
    monkeypatch.setattr(graph, "_MAX_GRAPHS", 3)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(5)]
    results = []
    for _ in range(3):
        for place, stream in enumerate(streams):
            i = place % len(case.arrays)
            with stream:
                results.append((i, case.enqueue(i)))
    cupy.cuda.Device().synchronize()
    assert all(case.is_right(i, its) for i, its in results)
    assert len(streams_with_graphs()) == 3


def test_a_call_is_captured_where_a_graph_was_launched(engine):
    import cupy

    case, stream = Case(engine), cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(3):
            case.enqueue(0)
        stream.synchronize()
        assert streams_with_graphs() == [stream.ptr]
        stream.begin_capture()
        results = case.enqueue(1)
        captured = stream.end_capture()
        for _ in range(2):
            for each in results:
                each[...] = 0
            captured.launch(stream)
            assert case.is_right(1, results)
        assert case.is_right(0, case.enqueue(0))


def test_a_graph_is_made_and_launched_while_another_stream_is_captured(engine):
    """In the strictest mode, in which a capture forbids whatever could disturb it."""
    import cupy

    case, captured = Case(engine), cupy.cuda.Stream(non_blocking=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case.enqueue(0)  # so that kernels are there
        cupy.cuda.alloc(1 << 28)  # and memory, in the pool of this stream
    captured.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
    try:
        with stream:
            results = [(i, case.enqueue(i)) for i in (0, 1, 0, 1)]
    finally:
        captured.end_capture()
    stream.synchronize()
    assert all(case.is_right(i, its) for i, its in results)
    assert streams_with_graphs() == [stream.ptr]


def test_a_graph_may_be_dropped_while_it_waits_on_the_device(engine):
    import cupy

    case, gate = Case(engine), threading.Event()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(2):
            case.enqueue(0)
        case.enqueue(1)
        stream.synchronize()
        assert streams_with_graphs()
        stream.launch_host_func(lambda _: gate.wait(60), None)
        results = [case.enqueue(i) for i in (0, 1)]
        execute.forget()
        was_held_up = not stream.done
        gate.set()
        stream.synchronize()
    assert was_held_up
    assert all(case.is_right(i, its) for i, its in enumerate(results))


def test_a_split_forward_is_a_graph_where_it_is_two_launches(engine):
    import cupy

    drawn = draw((2, 1, 8, 2, 64), *[(2, 1, 16384, 2, 64)] * 2)
    calls = [[engine.asarray(each[i]) for each in drawn] for i in (0, 1, 0, 1, 0, 1)]
    execute.forget()
    results = [cupy.asnumpy(cuattn.attention(*arrays)) for arrays in calls]
    (found,) = execute._executables.values()
    if engine.name == "sm80":
        assert len(found.plan.launches) == 2
        assert len(found._graphs._graphs) == 1
    first, second = results[:2]
    assert not same_bits(first, second)
    assert np.isfinite(results[0].astype(np.float32)).all()
    assert all(map(same_bits, results, [first, second] * 3))
