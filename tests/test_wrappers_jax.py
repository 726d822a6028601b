"""The wrapper that an example gives away: cuattn within the gradients of JAX."""

import gc
import importlib
import weakref

import needs
import numpy as np
import pytest
from calls import draw, same_bits
from wrapped import LSE_SHAPE, OPTIONS, SHAPES, copied, example, on_host, record_second

import cuattn


@pytest.fixture(scope="module")
def of_jax():
    needs.library("jax")
    return example("jax")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def jax(of_jax, request):
    """JAX with arrays made on that device."""
    jax = of_jax.jax
    if request.param == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    with jax.default_device(jax.devices(request.param)[0]):
        yield jax


def to_cuattn(array):
    """The JAX array as cuattn reads it."""
    import jax

    if array.devices() <= {*jax.devices("cpu")}:
        return np.asarray(array)
    return importlib.import_module("cupy").from_dlpack(array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_jax_gets_the_bits_that_cuattn_gives(jax, of_jax, dtype, return_lse):
    *inputs, dout = map(jax.numpy.asarray, draw(*SHAPES, dtype=dtype))
    (dlse,) = map(jax.numpy.asarray, draw(LSE_SHAPE, dtype="float32"))
    attention = of_jax.attention_with(return_lse=return_lse, **OPTIONS)
    results, pull = jax.vjp(attention, *inputs)
    got = jax.tree.leaves((results, pull((dout, dlse) if return_lse else dout)))

    expected, vjp = cuattn.attention_vjp(*map(to_cuattn, inputs), return_lse=return_lse, **OPTIONS)
    gradients = vjp(*map(to_cuattn, (dout, dlse) if return_lse else (dout,)))
    expected = [*(expected if return_lse else (expected,))]
    expected += [gradients.dq, gradients.dk, gradients.dv]
    pairs = zip(got, expected, strict=True)
    assert all(same_bits(np.asarray(ours), on_host(theirs)) for ours, theirs in pairs)
    assert all(each.devices() == inputs[0].devices() for each in got)
    assert same_bits(np.asarray(got[0]), np.asarray(jax.tree.leaves(attention(*inputs))[0]))


def gradient_of(jax, f):
    """The gradient by q of the sum of what f gives."""
    return jax.grad(lambda q, k, v: f(q, k, v).sum())


TRANSFORMS = {
    "jit": lambda jax, f: jax.jit(f),
    "vmap": lambda jax, f: jax.vmap(f),
    "jit of grad": lambda jax, f: jax.jit(gradient_of(jax, f)),
    "grad of jit": lambda jax, f: gradient_of(jax, jax.jit(f)),
    "vmap of grad": lambda jax, f: jax.vmap(gradient_of(jax, f)),
    "grad of grad": lambda jax, f: gradient_of(jax, gradient_of(jax, f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_jax_is_told_where_to_call(jax, of_jax, transform):
    arrays = map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))
    transformed = TRANSFORMS[transform](jax, of_jax.attention_with())
    with pytest.raises(cuattn.DTypeError, match="call cuattn outside of the traced function"):
        transformed(*arrays)


def test_jax_says_itself_that_there_is_no_forward_mode(jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(of_jax.attention_with(), arrays, arrays)


def test_jax_frees_what_was_kept(monkeypatch, jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))]
    function, kept = cuattn.attention_vjp, []

    def recording(*args, **kwargs):
        results, vjp = function(*args, **kwargs)
        kept.append(weakref.ref(vjp))
        return results, vjp

    monkeypatch.setattr(cuattn, "attention_vjp", recording)
    attention = of_jax.attention_with()
    for _ in range(2):
        jax.grad(lambda *arrays: attention(*arrays).sum())(*arrays)
    gc.collect()
    assert [each() for each in kept] == [None, None]
