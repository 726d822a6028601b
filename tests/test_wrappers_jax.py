"""The wrapper that an example gives away: cuattn within the gradients of JAX."""

import functools
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


def test_jax_is_told_of_custom_vjp(jax):
    """Where somebody differentiates cuattn itself."""
    q, k, v = map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))
    with pytest.raises(
        cuattn.DTypeError, match=r"jax\.grad .* through a jax\.custom_vjp as in examp"
    ):
        jax.grad(lambda q: jax.numpy.asarray(cuattn.attention(q, k, v)).sum())(q)


def test_what_is_to_be_copied_is_complete(jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*SHAPES[:3], dtype="bfloat16"))]
    results = []
    for attention_with in (copied("jax")["attention_with"], of_jax.attention_with):
        out, pull = jax.vjp(attention_with(**OPTIONS), *arrays)
        results.append([np.asarray(each) for each in (out, *pull(out))])
    assert all(map(same_bits, *results))


def test_jax_may_call_back_from_what_it_compiles():
    """On the host, as the example says."""
    jax = needs.library("jax")

    @jax.custom_vjp
    def attention(q, k, v):
        shape = jax.ShapeDtypeStruct((*q.shape[:-1], v.shape[-1]), q.dtype)
        call = functools.partial(cuattn.attention, **OPTIONS)
        return jax.pure_callback(call, shape, q, k, v)

    def forward(*arrays):
        return attention(*arrays), arrays

    def gradients(q, k, v, dout):
        _, vjp = cuattn.attention_vjp(q, k, v, **OPTIONS)
        gradients = vjp(dout)
        return gradients.dq, gradients.dk, gradients.dv

    def backward(arrays, dout):
        shapes = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arrays)
        return jax.pure_callback(gradients, shapes, *arrays, dout)

    attention.defvjp(forward, backward)
    *arrays, dout = draw(*SHAPES, dtype="float32")
    with jax.default_device(jax.devices("cpu")[0]):
        pulled = jax.jit(lambda *arrays: jax.vjp(attention, *arrays[:3])[1](arrays[3]))
        got = [*map(np.asarray, (jax.jit(attention)(*arrays), *pulled(*arrays, dout)))]
    expected = [cuattn.attention(*arrays, **OPTIONS), *gradients(*arrays, dout)]
    assert all(map(same_bits, got, expected))


def test_jax_says_itself_that_there_is_no_forward_mode(jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(of_jax.attention_with(), arrays, arrays)


def test_jax_frees_what_was_kept(monkeypatch, jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))]
    kept = record_second(monkeypatch, "attention_vjp", weakref.ref)
    attention = of_jax.attention_with()
    for _ in range(2):
        jax.grad(lambda *arrays: attention(*arrays).sum())(*arrays)
    gc.collect()
    assert [each() for each in kept] == [None, None]
