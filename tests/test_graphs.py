"""Graphs of launches, without a GPU: what they are made of, when there is one, what they hold."""

import collections
import ctypes
import sys
import threading
from array import array
from types import SimpleNamespace

import pytest
from fake_driver import STRICT, FakeDriver

from cuattn.abi.template import WORD
from cuattn.jit import graph, replay
from cuattn.jit.launch import Kernel

STREAM, OTHER = 77 << 40, 78 << 40  # addresses, so more than an int
FUNCTIONS = 5 << 40, 6 << 40
KERNELS = [
    (Kernel("cuattn_a", SimpleNamespace(ptr=FUNCTIONS[0]), (64, 2, 1), 512, synchronize=False), 7),
    (Kernel("cuattn_b", SimpleNamespace(ptr=FUNCTIONS[1]), (128, 1, 1), 0, synchronize=False), 9),
]
NODES = [(FUNCTIONS[0], (7, 1, 1), (64, 2, 1), 512), (FUNCTIONS[1], (9, 1, 1), (128, 1, 1), 0)]


def arguments(word):
    """A struct of two words, as a template gives it."""
    words = array("Q", [0, 1, word])
    words[0] = words.buffer_info()[0] + WORD
    return words


def launch(graphs, *streams, word=1):
    return [graphs.launch(stream, (word,), lambda: arguments(word)) for stream in streams]


def launch_words(graphs, *words):
    return [done for word in words for done in launch(graphs, STREAM, word=word)]


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
    monkeypatch.setattr(replay, "AFTER_CALLS", 1)
    monkeypatch.setattr(replay, "_made", [])
    graph._driver.cache_clear()
    yield fake
    graph._driver.cache_clear()


def test_a_graph_has_the_kernels_in_order_with_the_arguments(driver):
    graphs = replay.Replay(KERNELS)
    assert launch_words(graphs, 10, 10, 10) == [False, True, True]
    (executable,) = driver.nodes
    assert driver.launched == [(executable, STREAM, [(node, 10) for node in NODES])] * 2
    assert set(driver.modes.values()) == {STRICT}  # as it was
    assert len(driver.alive) == 2
    del graphs
    assert driver.alive == {}


def test_arguments_that_a_graph_holds_are_not_written_again(driver, monkeypatch):
    monkeypatch.setattr(replay, "AFTER_CALLS", 8)
    graphs, words = replay.Replay(KERNELS), (*[5] * 8, 1, 1, 2, 2, 2, 1)
    assert launch_words(graphs, *words) == [False] * 8 + [True] * 6
    assert [nodes for *_, nodes in driver.launched] == [
        [(node, word) for node in NODES] for word in words[8:]
    ]
    assert len(driver.nodes) == 1
    assert driver.filled == 2 * len(NODES)


@pytest.mark.parametrize("count", [2, 3, 24, 100])
def test_arguments_in_turn_have_a_graph_each(driver, monkeypatch, count):
    monkeypatch.setattr(replay, "AFTER_CALLS", 8)
    graphs, words = replay.Replay(KERNELS), [*range(count)]
    launch_words(graphs, *words * 12)
    assert len(driver.alive) == 2 * count
    filled = driver.filled
    assert launch_words(graphs, *words * 2) == [True] * 2 * count
    assert driver.filled == filled
    assert [nodes for *_, nodes in driver.launched[-count:]] == [
        [(node, word) for node in NODES] for word in words
    ]


def test_arguments_that_never_come_back_have_one_graph(driver):
    graphs = replay.Replay(KERNELS)
    words = range(1000, 3000)
    assert launch_words(graphs, *words) == [False] + [True] * 1999
    assert [nodes[0][1] for *_, nodes in driver.launched] == [*words][1:]
    assert len(driver.nodes) == 1


def test_arguments_come_back_where_they_were_met_before_not_too_many_others(driver, monkeypatch):
    monkeypatch.setattr(replay, "_MAX_MET", 10)
    graphs = replay.Replay(KERNELS)
    launch_words(graphs, *[*range(100, 112)] * 20)
    assert len(driver.nodes) == 1
    launch_words(graphs, *[*range(100, 110)] * 2)
    assert len(driver.nodes) > 2


def test_other_arguments_are_written_into_the_graph_launched_longest_ago(driver, monkeypatch):
    graphs = replay.Replay(KERNELS)
    launch_words(graphs, *[1, 2, 3] * 4)
    assert len(driver.nodes) == 3
    monkeypatch.setattr(replay, "AFTER_CALLS", 1000)
    filled = driver.filled
    launch_words(graphs, 2, 1, 3, 4)
    assert driver.filled == filled + len(NODES)
    launch_words(graphs, 4, 1, 3, 5)
    assert driver.filled == filled + 2 * len(NODES)
    launch_words(graphs, 1, 3, 5)
    assert driver.filled == filled + 2 * len(NODES)


def test_a_graph_waits_for_as_many_calls_as_pay_for_it(driver, monkeypatch):
    monkeypatch.setattr(replay, "AFTER_CALLS", 3)
    calls = (STREAM, OTHER, STREAM, STREAM, OTHER, STREAM, STREAM)
    assert launch(replay.Replay(KERNELS), *calls) == [False] * 5 + [True] * 2


def test_a_stream_has_a_graph_of_its_own(driver):
    assert launch(replay.Replay(KERNELS), STREAM, OTHER, 0, STREAM, OTHER, 0)[3:] == [True] * 3
    assert [stream or 0 for _, stream, _ in driver.launched] == [STREAM, OTHER, 0]
    assert len({executable for executable, _, _ in driver.launched}) == 3


def test_a_thread_has_a_graph_of_its_own_on_the_stream_that_each_has(driver):
    graphs = replay.Replay(KERNELS)
    assert launch(graphs, replay._PER_THREAD, replay._PER_THREAD) == [False, True]
    other = threading.Thread(target=launch, args=(graphs, *[replay._PER_THREAD] * 2))
    other.start()
    other.join()
    assert len({executable for executable, _, _ in driver.launched}) == 2


def test_threads_on_one_stream_launch_what_they_filled(driver):
    graphs, results = replay.Replay(KERNELS), collections.defaultdict(list)
    launch_words(graphs, 0, 0)
    words = [*range(1, 5)] * 50

    def run(number):
        for word in words:
            results[number, word] += launch_words(graphs, 10 * word + number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = collections.Counter()
    for _, _, nodes in driver.launched[1:]:
        (word,) = {word for _, word in nodes}
        counted[word] += 1
    its = {10 * word + number: sum(done) for (number, word), done in results.items()}
    assert counted == {word: count for word, count in its.items() if count}
    assert counted


def test_a_call_within_a_call_launches_by_itself(driver):
    """As from a signal's handler, or a ``__del__``."""
    graphs, within = replay.Replay(KERNELS), []
    launch_words(graphs, 1, 1)
    driver.meanwhile = lambda: within.extend(launch_words(graphs, 3))
    assert launch_words(graphs, 2) == [True]
    assert within == [False] * len(NODES)


def test_in_a_full_process_a_graph_gives_place_to_the_first_of_a_stream(driver, monkeypatch):
    monkeypatch.setattr(replay, "_MAX_GRAPHS", 2)
    first, second = replay.Replay(KERNELS), replay.Replay(KERNELS)
    assert launch(first, STREAM, OTHER, STREAM, OTHER)[2:] == [True, True]
    assert launch(second, STREAM, STREAM) == [False, True]
    assert len(driver.alive) == 2 * 2
    assert launch(first, OTHER, STREAM) == [True, False]  # the one launched longest ago went
    del second
    assert launch(first, STREAM) == [True]
    assert len(driver.alive) == 2 * 2


def test_a_graph_gives_place_by_itself(driver, monkeypatch):
    first, second = replay.Replay(KERNELS), replay.Replay(KERNELS)
    launch_words(first, *[1, 2, 3] * 4)
    monkeypatch.setattr(replay, "_MAX_GRAPHS", 3)
    launch_words(second, 1, 1)
    assert len(driver.alive) == 2 * 3
    filled = driver.filled
    launch_words(first, 2, 3)  # 1 was launched before them
    assert driver.filled == filled


def test_in_a_full_process_an_idle_graph_gives_place_to_any(driver, monkeypatch):
    monkeypatch.setattr(replay, "_MAX_GRAPHS", 2)
    monkeypatch.setattr(replay, "_IDLE", 100)
    busy, idle = replay.Replay(KERNELS), replay.Replay(KERNELS)
    launch_words(busy, 1, 1)
    launch_words(idle, 1, 1)
    launch_words(busy, *[1, 2] * 20)
    filled = driver.filled
    assert filled > 0
    assert launch_words(idle, 1) == [True]
    assert driver.filled == filled
    launch_words(busy, *[1, 2] * 100)
    filled = driver.filled
    launch_words(busy, 1, 2)
    assert driver.filled == filled
    assert len(driver.alive) == 2 * 2
    made = len(driver.nodes)
    launch_words(idle, 1)
    assert len(driver.nodes) == made + 1  # for its own is gone


@pytest.mark.parametrize("refused", ["cuGraphInstantiateWithFlags", "cuGraphLaunch"])
def test_what_was_refused_takes_no_place(driver, monkeypatch, refused):
    monkeypatch.setattr(replay, "_MAX_GRAPHS", 2)
    good, other = replay.Replay(KERNELS), replay.Replay(KERNELS)
    launch_words(good, 1, 1)
    driver.status[refused] = 2
    assert launch_words(other, *[1] * 20) == [False] * 20
    del driver.status[refused]
    assert launch_words(good, 1) == [True]
    launch_words(good, *[1, 2] * 3)
    assert len(driver.alive) == 2 * 2
    assert len(replay._made) == 2


def test_of_many_streams_those_launched_on_last_have_graphs(driver, monkeypatch):
    monkeypatch.setattr(replay, "_MAX_STREAMS", 3)
    graphs = replay.Replay(KERNELS)
    assert launch(graphs, *(STREAM, OTHER, 0) * 2) == [False] * 3 + [True] * 3
    for stream in range(STREAM + 1, STREAM + 20):
        assert launch(graphs, STREAM, stream, stream) == [True, False, True]
        assert len(graphs._streams) == 3
    assert len(driver.alive) == 2 * 3
    assert launch(graphs, OTHER) == [False]


def test_a_stream_that_is_captured_makes_no_graph_and_launches_none(driver):
    graphs = replay.Replay(KERNELS)
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
    launch(replay.Replay(KERNELS), 0, replay._LEGACY, replay._PER_THREAD, STREAM)
    assert driver.asked == [replay._PER_THREAD, STREAM]


@pytest.mark.parametrize(
    "refused",
    [
        "cuGraphCreate",
        "cuGraphAddKernelNode_v2",
        "cuGraphInstantiateWithFlags",
        "cuGraphLaunch",
    ],
)
def test_what_the_driver_refuses_is_left_to_the_launches_and_tried_again(driver, refused):
    graphs = replay.Replay(KERNELS)
    driver.status[refused] = 2
    assert launch_words(graphs, *[1] * 4) == [False] * 4
    assert driver.launched == []
    assert driver.alive == {}
    assert set(driver.modes.values()) <= {STRICT}
    del driver.status[refused]
    assert launch_words(graphs, 1, 1, 1) == [False, True, True]


def test_a_graph_that_cannot_be_filled_is_gone(driver):
    graphs = replay.Replay(KERNELS)
    assert launch_words(graphs, 1, 1) == [False, True]
    driver.status["cuGraphExecKernelNodeSetParams_v2"] = 2
    assert launch_words(graphs, 1, 2) == [True, False]
    assert driver.alive == {}
    assert launch_words(graphs, 2, 2) == [True, True]


def test_a_graph_whose_filling_was_interrupted_is_gone(driver):
    def interrupt():
        raise KeyboardInterrupt

    graphs = replay.Replay(KERNELS)
    launch_words(graphs, 1, 1)
    (its,) = graphs._streams[STREAM].graphs.values()
    its._fills.insert(1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch_words(graphs, 2)
    del its
    assert driver.alive == {}
    assert launch_words(graphs, 1) == [True]
    assert [word for _, word in driver.launched[-1][2]] == [1] * len(NODES)


def test_without_a_driver_that_has_graphs_there_are_none(driver, monkeypatch):
    def is_missing(name):
        raise OSError

    for library in (is_missing, lambda name: SimpleNamespace()):
        monkeypatch.setattr(ctypes, "CDLL", library)
        assert launch_words(replay.Replay(KERNELS), *[1] * 4) == [False] * 4
