"""Repeated calls of several launches run as graphs, and give what their launches give."""

import collections
import threading
import weakref

import numpy as np
import pytest
from calls import draw, same_bits

import cuattn
from cuattn import execute
from cuattn.jit import graph, replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.parametrize("engine", ["simt", "sm80"], indirect=True, scope="module"),
]


@pytest.fixture(autouse=True)
def soon_and_with_memory_where_it_was(monkeypatch):
    """Make a graph at every second call that may; addresses from a pool without a past."""
    import cupy

    monkeypatch.setattr(replay, "AFTER_CALLS", 1)
    monkeypatch.setattr(replay, "_made", [])
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc)
    yield
    cupy.cuda.set_allocator(before)


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
            patch.setattr(replay.Replay, "launch", lambda *_: False)
            self.expected = [self.on_host(self.gradients(i)) for i in range(count)]
        cupy.cuda.Device().synchronize()
        execute.forget()

    def gradients(self, i):
        gradients = cuattn.attention_backward(self.res[i], self.arrays[i][3])
        return gradients.dq, gradients.dk, gradients.dv

    def places(self, *problems):
        """Arrays to keep gradients of these problems in: those a call makes give their memory back,
        so that the next has the same addresses."""
        import cupy

        return [(i, [cupy.zeros_like(each) for each in self.arrays[i][:3]]) for i in problems]

    def run(self, places):
        import cupy

        for i, kept in places:
            list(map(cupy.copyto, kept, self.gradients(i)))

    @staticmethod
    def on_host(results):
        import cupy

        return [cupy.asnumpy(each) for each in results]

    def are_right(self, places):
        return all(all(map(same_bits, self.expected[i], self.on_host(kept))) for i, kept in places)


def graphs():
    """Of the one loaded plan that there is, by stream and thread and by arguments."""
    (found,) = [each for each in execute._loaded.values() if each.plan.problem.op == "backward"]
    assert len(found.plan.launches) == 3
    streams = found._replay._streams.items()
    return {(key, held): each for key, its in streams for held, each in its.graphs.items()}


def graphs_of_streams():
    """How many each stream has that has any."""
    return collections.Counter(stream for stream, _ in graphs())


def test_calls_one_after_another_get_the_bits_of_their_own_arrays(engine):
    import cupy

    case = Case(engine)
    for stream in (
        cupy.cuda.Stream.null,
        cupy.cuda.Stream.ptds,
        cupy.cuda.Stream(non_blocking=True),
    ):
        with stream:
            places = case.places(*[0, 1, 2, 3] * 5)
            case.run(places)
            assert case.are_right(places)
    assert list(graphs_of_streams().values()) == [4] * 3


def test_arrays_that_are_elsewhere_at_every_call_get_their_own_bits(engine):
    case = Case(engine)
    places = [(i, case.gradients(i)) for i in (0, 1) * 5]  # kept, so the next are not there
    assert case.are_right(places)
    assert list(graphs_of_streams().values()) == [1]


def test_threads_that_share_a_stream_get_the_bits_of_their_own_arrays(engine):
    import cupy

    case, stream = Case(engine), cupy.cuda.Stream(non_blocking=True)
    places = [case.places(*[i] * 20) for i in range(4)]
    cupy.cuda.Device().synchronize()
    start = threading.Barrier(len(places))

    def run(its):
        with cupy.cuda.Device(0), stream:
            start.wait(timeout=60)
            case.run(its)

    threads = [threading.Thread(target=run, args=(its,)) for its in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    stream.synchronize()
    assert all(map(case.are_right, places))
    assert list(graphs_of_streams()) == [stream.ptr]


def test_threads_on_the_per_thread_stream_do_not_wait_for_each_other(engine):
    """Their streams have one handle, and are two."""
    import cupy

    case, gate, is_held_up = Case(engine), threading.Event(), threading.Event()
    places = [case.places(0, 0, 0), case.places(1, 1, 1)]
    cupy.cuda.Device().synchronize()

    def first():
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds as stream:
            case.run(places[0])
            stream.synchronize()
            stream.launch_host_func(lambda _: gate.wait(60), None)
            case.run(places[0])
            is_held_up.set()
            stream.synchronize()

    def second():
        with cupy.cuda.Device(0), cupy.cuda.Stream.ptds as stream:
            case.run(places[1])
            stream.synchronize()
            is_held_up.wait(60)
            case.run(places[1])
            stream.synchronize()

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    threads[1].join(timeout=30)
    alive = [thread.is_alive() for thread in threads]
    gate.set()
    for thread in threads:
        thread.join(timeout=60)
    assert alive == [True, False]
    assert all(map(case.are_right, places))
    assert len(graphs_of_streams()) == 2


def test_no_more_streams_have_graphs_than_may(engine, monkeypatch):
    import cupy

    case = Case(engine)
    monkeypatch.setattr(replay, "_MAX_GRAPHS", 3)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(5)]
    places = [case.places(*[place % 4] * 3) for place in range(len(streams))]
    cupy.cuda.Device().synchronize()
    for calls in zip(*places, strict=True):
        for stream, call in zip(streams, calls, strict=True):
            with stream:
                case.run([call])
    cupy.cuda.Device().synchronize()
    assert all(map(case.are_right, places))
    assert list(graphs_of_streams().values()) == [1] * 3


def test_a_call_is_captured_where_a_graph_was_launched(engine):
    import cupy

    case, stream = Case(engine), cupy.cuda.Stream(non_blocking=True)
    with stream:
        case.run(case.places(0, 0, 0))
        stream.synchronize()
        assert graphs_of_streams() == {stream.ptr: 1}
        places = case.places(0)
        stream.begin_capture()
        case.run(places)
        captured = stream.end_capture()
        for _ in range(2):
            for each in places[0][1]:
                each[...] = 0
            captured.launch(stream)
            assert case.are_right(places)
        places = case.places(0)
        case.run(places)
        assert case.are_right(places)


def test_a_graph_is_made_and_launched_while_another_stream_is_captured(engine):
    """In the strictest mode, in which a capture forbids whatever could disturb it."""
    import cupy

    case, captured = Case(engine), cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        places = case.places(1, 1, 1)
        case.run(case.places(0))  # so that kernels are there, and memory in the stream's pool
    captured.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
    try:
        with stream:
            case.run(places)
    finally:
        captured.end_capture()
    stream.synchronize()
    assert case.are_right(places)
    assert graphs_of_streams() == {stream.ptr: 1}


def test_a_graph_is_dropped_while_another_stream_is_captured(engine):
    import cupy

    case, captured = Case(engine), cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        case.run(case.places(0, 0, 0))
        stream.synchronize()
    (its_graph,) = map(weakref.ref, graphs().values())
    captured.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
    try:
        execute.forget()
    finally:
        captured.end_capture()
    assert its_graph() is None


def test_a_graph_is_dropped_in_a_thread_that_has_met_no_device(engine, monkeypatch):
    import cupy

    case, statuses, driver = Case(engine), [], graph._driver()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        case.run(case.places(0, 0, 0))
        stream.synchronize()
    assert len(graphs()) == 1

    def recording(function):
        return lambda handle: statuses.append(function(handle))

    for name in ("cuGraphExecDestroy", "cuGraphDestroy"):
        monkeypatch.setattr(driver, name, recording(getattr(driver, name)))
    thread = threading.Thread(target=execute.forget)
    thread.start()
    thread.join(timeout=60)
    assert statuses == [0, 0]


def test_a_graph_may_be_dropped_while_it_waits_on_the_device(engine):
    import cupy

    case, gate = Case(engine), threading.Event()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        case.run(case.places(0, 0, 0))
        places = case.places(0, 0)
        stream.synchronize()
        (its_graph,) = map(weakref.ref, graphs().values())
        stream.launch_host_func(lambda _: gate.wait(60), None)
        case.run(places)
        was_launched = list(graphs().values()) == [its_graph()]
        execute.forget()
        was_held_up = not stream.done
        gate.set()
        stream.synchronize()
    assert was_launched
    assert was_held_up
    assert its_graph() is None
    assert case.are_right(places)


def test_a_split_forward_is_a_graph_where_it_is_two_launches(engine):
    import cupy

    drawn = draw((2, 1, 8, 2, 64), *[(2, 1, 16384, 2, 64)] * 2)
    calls = [[engine.asarray(each[i]) for each in drawn] for i in (0, 1, 0, 1, 0, 1)]
    execute.forget()
    results = [cupy.asnumpy(cuattn.attention(*arrays)) for arrays in calls]
    (found,) = execute._loaded.values()
    if engine.name == "sm80":
        assert len(found.plan.launches) == 2
        assert any(its.graphs for its in found._replay._streams.values())
    first, second = results[:2]
    assert not same_bits(first, second)
    assert np.isfinite(results[0].astype(np.float32)).all()
    assert all(map(same_bits, results, [first, second] * 3))
