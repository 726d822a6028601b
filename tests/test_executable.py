"""A plan computes what the call computes, bit for bit, and refuses what it was not made for."""

import copy
import dataclasses
import gc
import pickle
import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from calls import draw, qkv, refused, same_bits
from engines import FORWARD_ENGINES

import cuattn
from cuattn import execute
from cuattn._arrays import LAYOUTS, byte_bounds, spec_of

SHAPES = (2, 150, 4, 40), (2, 200, 2, 40), (2, 200, 2, 24), (2, 150, 4, 24)
OPTIONS = {"causal": True, "align": "bottom_right", "deterministic": True}


def problem(engine, dtype=None):
    """q, k, v, dout and dlse of one call."""
    arrays = draw(*SHAPES, dtype=dtype)
    rows = draw((2, 4, 150), dtype="float64" if arrays[0].dtype == np.float64 else "float32")
    return [engine.asarray(each) for each in (*arrays, *rows)]


def numpy_of(engine, arrays):
    return [None if each is None else engine.asnumpy(each).copy() for each in arrays]


def fields(gradients):
    return [gradients.dq, gradients.dk, gradients.dv]


@pytest.mark.parametrize("which", ["dout", "dlse", "both"])
def test_it_has_the_bits_of_the_call_at_every_call(engine, which):
    q, k, v, dout, dlse = problem(engine)
    cotangents = {"dout": (dout, None), "dlse": (None, dlse), "both": (dout, dlse)}[which]
    run = cuattn.plan(q, k, v, backward=True, return_lse=True, **OPTIONS)
    for scale in (1, 2):
        q = engine.asarray(engine.asnumpy(q) * scale)  # elsewhere in memory
        (out, lse), vjp = cuattn.attention_vjp(q, k, v, return_lse=True, **OPTIONS)
        expected = numpy_of(engine, [out, lse, *fields(vjp(*cotangents))])
        got = numpy_of(engine, [*run(q, k, v), *fields(run.backward(*cotangents))])
        assert all(map(same_bits, got, expected))


def test_every_dtype(engine):
    for dtype in engine.dtypes:
        q, k, v, dout, _ = problem(engine, dtype)
        run = cuattn.plan(q, k, v, backward=True, **OPTIONS)
        out, vjp = cuattn.attention_vjp(q, k, v, **OPTIONS)
        got = numpy_of(engine, [run(q, k, v), *fields(run.backward(dout))])
        assert all(map(same_bits, got, numpy_of(engine, [out, *fields(vjp(dout))])))


def test_results_are_its_own_unless_given(engine):
    q, k, v, dout, _ = problem(engine)
    run = cuattn.plan(q, k, v, backward=True, return_lse=True, **OPTIONS)
    out, lse = run(q, k, v)
    assert out is run.out
    assert lse is run.lse
    assert run.backward(dout) is run.gradients is run.backward(dout)
    mine, rows = engine.xp.zeros_like(out), engine.xp.zeros_like(lse)
    assert run(k[:, :150].repeat(2, axis=2), k, v, out=mine, lse=rows) == (mine, rows)
    expected = cuattn.attention(q, k, v, return_lse=True, **OPTIONS)
    assert all(map(same_bits, *[numpy_of(engine, each) for each in ((out, lse), expected)]))
    other = cuattn.attention_vjp(k[:, :150].repeat(2, axis=2), k, v, **OPTIONS)[1](dout)
    got = fields(run.backward(dout))  # at the arrays of the last call
    assert all(map(same_bits, numpy_of(engine, got), numpy_of(engine, fields(other))))


def test_out_of_the_plan_is_where_it_writes(engine):
    q, k, v, *_ = problem(engine)
    memory = engine.xp.zeros((2, 150, 4, 30), q.dtype)
    out = memory[..., 3:27]
    run = cuattn.plan(q, k, v, out=out, **OPTIONS)
    assert run(q, k, v) is out
    expected = cuattn.attention(q, k, v, **OPTIONS)
    assert same_bits(engine.asnumpy(out), engine.asnumpy(expected))
    assert not memory[..., :3].any()
    assert not memory[..., 27:].any()


@pytest.mark.parametrize("letters", LAYOUTS)
def test_layouts(engine, letters):
    shape = {"b": 1, "s": 9, "h": 1, "d": 8}
    q, dout = map(engine.asarray, draw(*[[shape[axis] for axis in letters]] * 2))
    run = cuattn.plan(q, q, q, layout=letters, backward=True, return_lse=True)
    (out, lse), vjp = cuattn.attention_vjp(q, q, q, layout=letters, return_lse=True)
    expected = [out, lse, *fields(vjp(dout))]
    got = [*run(q, q, q), *fields(run.backward(dout))]
    assert all(map(same_bits, numpy_of(engine, got), numpy_of(engine, expected)))


def test_wrt_names_the_gradients(engine):
    q, k, v, dout, _ = problem(engine)
    run = cuattn.plan(q, k, v, backward=True, wrt={"v"}, **OPTIONS)
    run(q, k, v)
    gradients = run.backward(dout)
    assert gradients.dq is None
    assert gradients.dk is None
    expected = cuattn.attention_vjp(q, k, v, **OPTIONS)[1](dout, wrt={"v"}).dv
    assert same_bits(engine.asnumpy(gradients.dv), engine.asnumpy(expected))


def test_an_empty_problem_is_planned(engine):
    q, k = map(engine.asarray, draw((2, 0, 2, 8), (2, 5, 2, 8)))
    run = cuattn.plan(q, k, k, backward=True)
    out = run(q, k, k)
    assert out.shape == (2, 0, 2, 8)
    assert not run.backward(out).dk.any()


# Misuse --------------------------------------------------------------------------------------

LOOKS = {
    "shape": lambda q: q[:, :149],
    "strides": lambda q: q[:, ::-1],
    "dtype": lambda q: q.astype("float16" if q.dtype != np.float16 else "float32"),
    "more axes": lambda q: q[None],
}


@pytest.mark.parametrize("kind", LOOKS)
@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
def test_an_array_that_looks_otherwise_is_refused(engine, name, kind):
    q, k, v, dout, _ = problem(engine)
    run = cuattn.plan(q, k, v, backward=True, **OPTIONS)
    run(q, k, v)
    arrays = {"q": q, "k": k, "v": v, "out": engine.xp.zeros_like(run.out), "dout": dout}
    changed = LOOKS[kind](arrays[name])
    before = engine.asnumpy(run.out).copy()

    def call():
        if name == "dout":
            run.backward(changed)
        else:
            given = {**arrays, name: changed}
            run(given["q"], given["k"], given["v"], out=given["out"])

    got = f"shape {changed.shape}, dtype {changed.dtype}, strides {changed.strides}"
    remedy = "ascontiguousarray" if (name, kind) == ("dout", "strides") else "make a plan"
    refused(cuattn.ArgumentError, name, got, "as planned", remedy, run=call)
    assert same_bits(engine.asnumpy(run.out), before)


def test_strides_of_an_axis_of_length_one_do_not_matter(engine):
    q, wide = map(engine.asarray, draw((1, 6, 1, 8), (3, 6, 4, 8)))
    run = cuattn.plan(q, q, q)
    odd = engine.xp.lib.stride_tricks.as_strided(q, q.shape, (wide.strides[0], *q.strides[1:]))
    assert same_bits(engine.asnumpy(run(odd, q, q)), engine.asnumpy(cuattn.attention(q, q, q)))


@pytest.mark.parametrize("name", ["lse", "dlse"])
def test_lse_is_contiguous(engine, name):
    q, k, v, _, dlse = problem(engine)
    run = cuattn.plan(q, k, v, backward=True, **OPTIONS)
    run(q, k, v)
    wide = engine.xp.repeat(dlse, 2, axis=2)[..., ::2]
    call = {"lse": lambda: run(q, k, v, lse=wide), "dlse": lambda: run.backward(None, wide)}
    refused(cuattn.ArgumentError, name, "strides", "as planned", run=call[name])


def test_outputs_must_not_overlap_what_they_are_made_of(engine):
    (q,) = map(engine.asarray, draw((1, 20, 2, 8)))
    run = cuattn.plan(q, q, q, backward=True, return_lse=True)
    out, lse = run(q, q, q)
    gradients = run.backward(out)
    memory = engine.xp.zeros(2 * out.size, out.dtype)
    first, second = memory[: out.size].reshape(out.shape), memory[8 : out.size + 8]
    calls = [
        ("out", "q", lambda: run(first, q, q, out=second.reshape(out.shape))),
        ("out", "v", lambda: run(q, q, out)),
        ("out", "lse", lambda: run(q, q, q, out=first, lse=overlaid(memory, lse))),
        ("lse", "k", lambda: run(q, first, q, lse=overlaid(memory, lse))),
        ("dq", "dout", lambda: run.backward(gradients.dq)),
        ("dv", "dlse", lambda: run.backward(None, overlaid(gradients.dv, lse))),
        ("dk", "q", lambda: (run(gradients.dk, q, q), run.backward(out))),
    ]
    for written, other, call in calls:
        parts = (written, f"memory that {other} uses", "memory of its own", f"{other}.copy()")
        refused(cuattn.ArgumentError, *parts, run=call)


def overlaid(array, like):
    """The first bytes of an array, as one that looks like another."""
    return array.reshape(-1).view(like.dtype)[: like.size].reshape(like.shape)


def test_interleaved_memory_does_not_overlap(engine):
    memory = engine.xp.zeros((2, 20, 2, 8, 2), draw((1,))[0].dtype)
    q, out = memory[..., 0], memory[..., 1]
    assert cuattn.plan(q, q, q, out=out)(q, q, q) is out


def test_an_interrupted_call_leaves_nothing_to_differentiate(monkeypatch):
    q, k, v = qkv()
    run = cuattn.plan(q, k, v, backward=True)
    out = run(q, k, v).copy()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(execute, "forward", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(k, q, v)
    refused(cuattn.ArgumentError, "backward", "run(q, k, v)", run=lambda: run.backward(out))
    run(q, k, v)
    expected = cuattn.attention_vjp(q, k, v)[1](out)
    assert all(map(same_bits, fields(run.backward(out)), fields(expected)))


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(how):
    run = cuattn.plan(*qkv())
    with pytest.raises(TypeError, match="another plan"):
        how(run)


class FakeStreams:
    """What a plan asks of CuPy about streams; the current one can be chosen."""

    def __init__(self):
        self.current = SimpleNamespace(ptr=7, synchronize=self.synchronize)
        self.waited = 0
        self.cuda = SimpleNamespace(
            get_current_stream=lambda: self.current,
            runtime=SimpleNamespace(getDevice=lambda: 0),
        )

    def synchronize(self):
        self.waited += 1


@pytest.fixture
def streams(monkeypatch):
    fake = FakeStreams()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake


@pytest.fixture
def bound(streams):
    """A plan that takes itself for one of a device."""
    run = cuattn.plan(*qkv())
    run._call = dataclasses.replace(run._call, device=0)
    return run


def test_the_stream_of_the_first_call_has_it_until_it_is_released(bound, streams):
    bound._check_stream()
    bound._check_stream()
    streams.current = SimpleNamespace(ptr=8)
    refused(cuattn.ArgumentError, "stream", "0x8", "0x7", "release()", run=bound._check_stream)
    bound.release()
    assert streams.waited == 1
    bound._check_stream()
    streams.current = SimpleNamespace(ptr=7)
    refused(cuattn.ArgumentError, "stream", "0x7", "0x8", run=bound._check_stream)


def test_a_stream_that_every_thread_has_is_released_where_it_was_used(bound, streams):
    streams.current.ptr = 2
    done, may_end = threading.Event(), threading.Event()

    def use():
        bound._check_stream()
        done.set()
        may_end.wait(60)
        bound.release()

    thread = threading.Thread(target=use)
    thread.start()
    done.wait(60)
    refused(cuattn.ArgumentError, "stream", "release()", run=bound._check_stream)
    refused(cuattn.ArgumentError, "thread", "release() there", run=bound.release)
    assert streams.waited == 0
    may_end.set()
    thread.join()
    assert streams.waited == 1
    bound._check_stream()


def test_a_plan_of_a_forward_keeps_no_input():
    q, k, v = qkv()
    run = cuattn.plan(q, k, v)
    gone = weakref.ref(q)
    run(q, k, v)
    del q
    gc.collect()
    assert gone() is None
    assert run.out is not None


def test_misuse_is_told_what_to_do():
    q, k, v = qkv()
    run = cuattn.plan(q, k, v)
    refused(cuattn.ArgumentError, "backward", "backward=True", run=lambda: run.backward(q))
    lse = np.empty((1, 2, 7), np.float32)
    refused(cuattn.ArgumentError, "lse", "return_lse=True", run=lambda: run(q, k, v, lse=lse))
    run = cuattn.plan(q, k, v, backward=True)
    refused(cuattn.ArgumentError, "backward", "run(q, k, v)", run=lambda: run.backward(q))
    run(q, k, v)
    refused(cuattn.ArgumentError, "dout", "dlse", run=lambda: run.backward(None))
    fixed = np.empty_like(run.out)
    fixed.flags.writeable = False
    refused(cuattn.ArgumentError, "out", "read-only", run=lambda: run(q, k, v, out=fixed))
    planned = lambda **how: lambda: cuattn.plan(q, k, v, **how)  # noqa: E731
    refused(cuattn.ArgumentError, "wrt", "backward=True", run=planned(wrt={"q"}))
    refused(cuattn.ArgumentError, "wrt", "'q'", run=planned(backward=True, wrt={"x"}))
    refused(cuattn.DTypeError, "backward", "True or False", run=planned(backward=1))
    run.release()
    assert same_bits(run(q, k, v), cuattn.attention(q, k, v))


@pytest.mark.parametrize("strides", [(96, 32, 4), (-96, 32, -4), (0, 0, 4), (96, 32, 8)])
def test_bounds_hold_every_element_and_no_more(strides):
    memory = np.zeros(4096, np.uint8)
    array = np.ndarray((5, 3, 6), np.float32, memory, 2048, strides)
    array[...] = np.nan
    low, high = byte_bounds(spec_of(array))
    written = np.flatnonzero(memory)
    assert memory[2048 + low : 2048 + high].any()
    assert 2048 + low <= written[0]
    assert written[-1] < 2048 + high
    assert written[0] - (2048 + low) < 4
    assert 2048 + high - written[-1] <= 4


ENGINES = FORWARD_ENGINES
