"""A forward and a backward of arrays as they lie, compared with the oracle; memory full of NaN."""

import contextlib
from unittest import mock

import numpy as np
from calls import like_lse
from compare import assert_backward, assert_forward
from strategies import Problem

import cuattn
from cuattn.planning.problem import Band

#: Causal in the way that takes any lengths.
CAUSAL = {"causal": True, "align": "bottom_right"}


def problem(engine, dtype, batch, seqlens, heads, head_dims, **options):
    """A problem in this dtype, or in one that the engine takes; heads are (heads_q, heads_kv)."""
    group = heads[0] // heads[1]
    asked = Problem(dtype, "bshd", batch, *seqlens, heads[1], group, *head_dims, **options)
    return asked.within(engine.dtypes)


def dtype_within(engine, *wanted):
    """The first of these dtypes that the engine takes, or the first that it takes at all."""
    return next((dtype for dtype in wanted if dtype in engine.dtypes), engine.dtypes[0])


def cotangents(engine, q, v, seed=11):
    """(dout, dlse) on the engine's side for arrays in the axes (batch, seqlen, heads, dim)."""
    rng = np.random.default_rng(seed)
    dout = rng.standard_normal((*q.shape[:3], v.shape[3])).astype(q.dtype)
    dlse = like_lse(q, rng.standard_normal((q.shape[0], q.shape[2], q.shape[1])))
    return engine.asarray(dout), engine.asarray(dlse)


def call(q, k, v, dout=None, dlse=None, **options):
    """out, lse, dq, dk and dv, where the arrays are."""
    out, res = cuattn.attention_forward(q, k, v, **options)
    gradients = cuattn.attention_backward(res, dout, dlse)
    return out, res.lse, gradients.dq, gradients.dk, gradients.dv


def check_arrays(engine, q, k, v, dout=None, dlse=None, **options):
    """Call on arrays of the engine, whatever their strides, and compare every result.

    Causal is bottom-right here. Cotangents are drawn where neither is given.
    """
    if dout is None and dlse is None:
        dout, dlse = cotangents(engine, q, v)
    if options.get("causal"):
        options = {**options, **CAUSAL}
    results = list(map(engine.asnumpy, call(q, k, v, dout, dlse, **options)))
    q, k, v, dout, dlse = (
        None if each is None else np.array(engine.asnumpy(each)) for each in (q, k, v, dout, dlse)
    )
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    far = seqlen_q + seqlen_k
    band = Band(-far, seqlen_k - seqlen_q if options.get("causal") else far)
    scale = options.get("softmax_scale") or q.shape[3] ** -0.5
    oracle = {"band": band, "softmax_scale": float(scale)}
    out, lse, *gradients = results
    assert_forward(out, lse, q, k, v, **oracle)
    assert_backward(tuple(gradients), q, k, v, out, dout, dlse, **oracle)
    return results


@contextlib.contextmanager
def new_memory_is_nan(engine):
    """Whatever cuattn does not write of what it allocates is NaN, in every dtype."""
    if engine.name != "numpy":
        with _nan_on_the_device():
            yield
        return
    empty = np.empty

    def full_of_nan(shape, dtype=float, **how):
        array = empty(shape, dtype, **how)
        array.reshape(-1).view(np.uint8)[...] = 0xFF
        return array

    with mock.patch.object(np, "empty", full_of_nan):
        yield


@contextlib.contextmanager
def _nan_on_the_device():
    import cupy

    pool = cupy.cuda.MemoryPool()

    def full_of_nan(size):
        memory = pool.malloc(size)
        if size:
            memory.memset_async(0xFF, size)
        return memory

    with cupy.cuda.using_allocator(full_of_nan):
        yield
