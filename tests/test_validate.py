"""Rules that need shapes and devices but no arrays, and the memory of checked calls.

A device is an attribute of a spec, and CuPy can describe memory that is not there, so no GPU is
needed.
"""

import threading

import numpy as np
import pytest
from calls import refused

from cuattn import ArgumentError, DTypeError
from cuattn._arrays import ArraySpec, overlaps_itself, spec_of
from cuattn.attention import prepare
from cuattn.planning.options import Options
from cuattn.planning.problem import Band
from cuattn.planning.validate import REMEMBERED, backward_call, forward_call, remembered

# Devices -------------------------------------------------------------------------------------


def spec(device=None, *, shape=(2, 6, 4, 8), strides=None, misaligned=0):
    dense = np.empty(shape, "float32")
    return ArraySpec(shape, strides or dense.strides, dense.dtype, device, misaligned)


def checked(**changes):
    specs = {"q": spec(0), "k": spec(0), "v": spec(0), "out": None, **changes}
    return forward_call(*specs.values(), *Options())


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_host_and_device_mixed(name):
    parts = "an array in host memory", "CUDA device 0 like q", "cupy.asarray"
    refused(DTypeError, name, *parts, run=lambda: checked(**{name: spec(None)}))


def test_device_and_host_mixed():
    parts = "an array on CUDA device 0", "host memory like q", "cupy.asnumpy"
    refused(DTypeError, "k", *parts, run=lambda: checked(q=spec(None)))


@pytest.mark.parametrize("name", ["k", "v", "out"])
def test_two_devices(name):
    parts = "CUDA device 1", "device 0 like q", "cupy.cuda.Device(0)"
    refused(ArgumentError, name, *parts, run=lambda: checked(**{name: spec(1)}))


@pytest.mark.parametrize("name", ["dout", "dlse"])
@pytest.mark.parametrize("device", [None, 1])
def test_cotangent_elsewhere(name, device):
    error = DTypeError if device is None else ArgumentError
    shape = (2, 6, 4, 8) if name == "dout" else (2, 4, 6)
    specs = {"dout": None, "dlse": None, name: spec(device, shape=shape)}
    run = lambda: backward_call(checked(), *specs.values(), None)  # noqa: E731
    refused(error, name, "like q", run=run)


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize("wrong", [{"misaligned": 2}, {"strides": (770, 130, 32, 4)}], ids=str)
def test_device_array_off_its_alignment(name, wrong):
    parts = "multiples of the itemsize 4", f"{name}.copy()"
    refused(ArgumentError, name, *parts, run=lambda: checked(**{name: spec(0, **wrong)}))


def test_a_stride_that_is_never_used_may_be_anything():
    odd = spec(0, shape=(1, 6, 4, 8), strides=(3, 128, 32, 4))
    checked(q=odd, k=odd, v=odd)


def on_device(address=1 << 40, shape=(2, 6, 4, 8), strides=None):
    """A CuPy array over memory that is not there."""
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, device_id=3)
    return cupy.ndarray(shape, "float32", cupy.cuda.MemoryPointer(memory, 0), strides)


def test_a_cupy_array_is_described():
    array = on_device(strides=(768, 128, 32, 4))
    want = ArraySpec((2, 6, 4, 8), (768, 128, 32, 4), np.dtype("float32"), 3, 0)
    assert spec_of(array) == want
    assert spec_of(on_device((1 << 40) + 2)).misaligned == 2


def test_a_cupy_call_is_checked_without_a_gpu():
    q = on_device()
    call = prepare(q, q, q, on_device(1 << 41), Options())
    assert call.device == 3
    assert call.problem.layouts.q == (192, 32, 8, 1)


def test_overlap_on_a_device_is_of_addresses():
    wide = {"shape": (1, 6, 1, 8), "strides": (384, 64, 64, 8)}
    q, far = on_device(**wide), on_device(1 << 41, **wide)
    prepare(q, far, far, on_device((1 << 40) + 4, **wide), Options())  # interleaved
    for shift in (0, 8, -64):
        out = on_device((1 << 40) + shift, **wide)
        refused(
            ArgumentError,
            "out",
            "q reads",
            run=lambda out=out: prepare(q, far, far, out, Options()),
        )


# Layouts in memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("strides", [(4,), (8,), (12,), (16,), (-8,), (0,), (2,), (6, 4), (8, 12)])
@pytest.mark.parametrize("lengths", [(1, 1), (2, 2), (3, 4), (5, 2)])
def test_self_overlap_is_exact(strides, lengths):
    """Against the set of all bytes."""
    strides = (*strides, 16)[:2]
    shape = lengths
    spec = ArraySpec(shape, strides, np.dtype("float32"))
    steps = (
        np.arange(shape[0])[:, None, None] * strides[0] + np.arange(shape[1])[:, None] * strides[1]
    )
    touched = (steps + np.arange(4)).ravel()
    assert overlaps_itself(spec) == (len(np.unique(touched)) < touched.size)


# Positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "band"),
    [
        ({}, Band(-6, 9)),
        ({"causal": True, "align": "top_left"}, Band(-6, 0)),
        ({"causal": True, "align": "bottom_right"}, Band(-6, 3)),
        ({"causal": True, "q_offset": 2, "k_offset": 7}, Band(-6, -5)),
        ({"causal": True, "q_offset": 10**30}, Band(-6, 9)),
        ({"causal": True, "k_offset": 10**30}, Band(-6, -6)),
    ],
    ids=str,
)
def test_positions_become_a_band(options, band):
    keys = spec(shape=(2, 9, 4, 8))
    call = forward_call(spec(), keys, keys, None, *Options(**options))
    assert call.problem.band == band


def test_gradients_are_asked_in_one_order():
    problem = backward_call(checked(), spec(0), None, frozenset("vq")).problem
    assert problem.wrt == ("q", "v")
    assert problem.op == "backward"
    assert problem.layouts.dq == problem.layouts.dv == (192, 32, 8, 1)
    assert problem.layouts.dk is None
    assert problem.layouts.dlse is None


# Memory of checked calls ---------------------------------------------------------------------


def test_the_same_look_is_the_same_record():
    assert checked() is checked()
    assert checked() is not checked(q=spec(0, strides=(4096, 128, 32, 4)))


def test_values_that_compare_equal_are_told_apart():
    kinds = remembered(lambda value: type(value))
    assert [kinds(value) for value in (1, True, 1.0)] == [int, bool, float]


def test_what_has_no_hash_takes_the_slow_path():
    assert remembered(lambda value: len(value))([1, 2]) == 2
    with pytest.raises(TypeError, match="by the check"):
        remembered(_raise)(TypeError("by the check"))


def test_errors_are_not_remembered():
    errors = [ArgumentError("first"), ArgumentError("second")]
    check = remembered(lambda _: _raise(errors.pop()))
    for text in ("second", "first"):
        with pytest.raises(ArgumentError, match=text):
            check("same")


def _raise(error):
    raise error


def test_memory_is_bounded_and_shared_by_threads():
    calls = []
    check = remembered(lambda value: calls.append(value) or value)

    def work():
        for value in range(2 * REMEMBERED):
            assert check(value) == value

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls.clear()
    check(0)
    check(2 * REMEMBERED - 1)
    assert calls == [0]  # the oldest is forgotten, the newest is not
