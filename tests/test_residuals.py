"""Residuals rebuilt from arrays that were kept elsewhere differentiate the same call."""

import copy
import pickle

import numpy as np
import pytest
from calls import draw, refused, same_bits
from engines import FORWARD_ENGINES, NumpyEngine

import cuattn
from cuattn import Residuals
from cuattn._arrays import LAYOUTS

ENGINES = FORWARD_ENGINES
SHAPES = (2, 40, 4, 24), (2, 50, 2, 24), (2, 50, 2, 16), (2, 40, 4, 16)
OPTIONS = {"causal": True, "align": "bottom_right", "deterministic": True}


def forward(engine):
    """Residuals of views with strides, dout, and the gradients."""
    q, k, v, dout = map(engine.asarray, draw(*SHAPES))
    q, k = engine.xp.repeat(q, 2, axis=1)[:, ::2], k[:, ::-1]
    _, res = cuattn.attention_forward(q, k, v, **OPTIONS)
    return res, dout, cuattn.attention_backward(res, dout)


def arrays_of(res):
    return {name: getattr(res, name) for name in ("q", "k", "v", "out", "lse")}


def same_gradients(engine, got, expected):
    names = ("dq", "dk", "dv")
    pairs = ([engine.asnumpy(getattr(each, name)) for each in (got, expected)] for name in names)
    return all(same_bits(*pair) for pair in pairs)


def test_the_same_arrays_are_the_same_call(engine):
    res, dout, expected = forward(engine)
    again = Residuals.rebuild(res.call, **arrays_of(res))
    assert again.call is res.call
    assert all(getattr(again, name) is array for name, array in arrays_of(res).items())
    assert same_gradients(engine, cuattn.attention_backward(again, dout), expected)


def test_other_strides_are_other_strides(engine):
    res, dout, expected = forward(engine)
    copies = {name: engine.xp.ascontiguousarray(each) for name, each in arrays_of(res).items()}
    copies["out"] = engine.xp.repeat(copies["out"], 2, axis=2)[:, :, ::2]
    again = Residuals.rebuild(res.call, **copies)
    assert again.call.problem.layouts != res.call.problem.layouts
    assert same_gradients(engine, cuattn.attention_backward(again, dout), expected)
    assert Residuals.rebuild(res.call, **copies).call is again.call  # found, not made again


@pytest.mark.parametrize("letters", LAYOUTS)
def test_layouts(engine, letters):
    shape = {"b": 1, "s": 9, "h": 1, "d": 8}
    q, dout = map(engine.asarray, draw(*[[shape[axis] for axis in letters]] * 2))
    _, res = cuattn.attention_forward(q, q, q, layout=letters)
    copies = {name: each.copy() for name, each in arrays_of(res).items()}
    again = Residuals.rebuild(res.call, **copies)
    expected = cuattn.attention_backward(res, dout)
    assert same_gradients(engine, cuattn.attention_backward(again, dout), expected)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "lse"])
def test_an_array_of_another_shape_or_dtype_is_refused(engine, name):
    res, _, _ = forward(engine)
    arrays = arrays_of(res)

    def rebuild(array):
        return lambda: Residuals.rebuild(res.call, **{**arrays, name: array})

    fewer = arrays[name][:, :-1]
    refused(cuattn.ArgumentError, name, f"shape {fewer.shape}", run=rebuild(fewer))
    other = engine.xp.zeros(arrays[name].shape, np.int32)
    refused(cuattn.DTypeError, name, "dtype int32", run=rebuild(other))
    refused(cuattn.DTypeError, name, "None", run=rebuild(None))


def test_lse_is_in_c_order(engine):
    res, _, _ = forward(engine)
    arrays = arrays_of(res)
    arrays["lse"] = engine.xp.repeat(arrays["lse"], 2, axis=2)[..., ::2]
    refused(
        cuattn.ArgumentError,
        *("lse", "strides", "ascontiguousarray"),
        run=lambda: Residuals.rebuild(res.call, **arrays),
    )


@pytest.mark.parametrize("how", [copy.deepcopy, lambda res: pickle.loads(pickle.dumps(res))])
def test_copies_have_the_strides_of_their_own_arrays(how):
    """A copy of a view is no view; its elements are where its call says."""
    engine = NumpyEngine()
    res, dout, expected = forward(engine)
    again = how(res)
    strides = [step // again.q.itemsize for step in again.q.strides]
    assert list(again.call.problem.layouts.q) == strides
    assert again.q.strides != res.q.strides
    assert same_gradients(engine, cuattn.attention_backward(again, dout), expected)


def test_what_is_no_call_is_refused():
    q = np.ones((1, 2, 1, 4))
    res = cuattn.attention_forward(q, q, q)[1]
    run = lambda: Residuals.rebuild(res, **arrays_of(res))  # noqa: E731
    refused(cuattn.DTypeError, "call", "Residuals", "residuals.call", run=run)


def test_printed_residuals_are_short():
    q = np.ones((1, 2, 1, 4))
    assert len(repr(cuattn.attention_forward(q, q, q)[1])) < 80
