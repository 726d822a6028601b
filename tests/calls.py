"""How the suites call cuattn: NumPy arrays in, through an engine, NumPy arrays out."""

import re

import numpy as np
import pytest
from compare import assert_backward, assert_forward
from strategies import dtype_of

import cuattn
from cuattn.planning.problem import Band

RNG_SEED = 5

#: What the oracle is told of ``qkv()`` without options.
EVERYTHING = {"band": Band(-7, 7), "softmax_scale": 8**-0.5}


#: The dtype of arrays that a test draws without naming one; the engine fixture sets it to one that
#: the family under test takes.
DTYPE = "float32"


def draw(*shapes, dtype=None):
    rng = np.random.default_rng(RNG_SEED)
    return [rng.standard_normal(shape).astype(dtype_of(dtype or DTYPE)) for shape in shapes]


def qkv(seqlen_q=7, seqlen_k=7, heads_q=2, heads_kv=2, head_dim=8, dtype=None, batch=1):
    return draw(
        (batch, seqlen_q, heads_q, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        (batch, seqlen_k, heads_kv, head_dim),
        dtype=dtype,
    )


def run(engine, q, k, v, **options):
    """(out, lse) as NumPy arrays."""
    out, lse = cuattn.attention(*map(engine.asarray, (q, k, v)), return_lse=True, **options)
    return engine.asnumpy(out), engine.asnumpy(lse)


def like_lse(q, rows):
    """The same numbers in the dtype of lse."""
    return rows.astype(np.float64 if q.dtype == np.float64 else np.float32)


def gradients(engine, q, k, v, dout=None, dlse=None, *, wrt=None, **options):
    """(dq, dk, dv) as NumPy arrays, None where not asked."""
    _, res = cuattn.attention_forward(*map(engine.asarray, (q, k, v)), **options)
    dlse = None if dlse is None else like_lse(q, dlse)
    dout, dlse = (None if each is None else engine.asarray(each) for each in (dout, dlse))
    grads = cuattn.attention_backward(res, dout, dlse, wrt=wrt)
    return tuple(
        None if each is None else engine.asnumpy(each) for each in (grads.dq, grads.dk, grads.dv)
    )


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_forward(engine, problem):
    """Run a problem and compare out and lse with the oracle."""
    q, k, v = problem.arrays()
    out, lse = cuattn.attention(*map(engine.asarray, (q, k, v)), return_lse=True, **problem.options)
    out, lse = engine.asnumpy(out), engine.asnumpy(lse)
    assert out.shape == problem.shape(problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    out_dtype = dtype_of(problem.out_dtype or problem.dtype)
    assert_forward(
        problem.canonical(out),
        problem.canonical_lse(lse),
        *map(problem.canonical, (q, k, v)),
        **problem.oracle,
        out_dtype=out_dtype,
    )


def check_without_lse(engine, problem):
    """The same bits of out where lse is not asked for."""
    arrays = [*map(engine.asarray, problem.arrays())]
    out, _ = cuattn.attention(*arrays, return_lse=True, **problem.options)
    alone = cuattn.attention(*arrays, **problem.options)
    assert same_bits(engine.asnumpy(out), engine.asnumpy(alone))


def check_backward(engine, problem, **options):
    """Run a problem and compare dq, dk and dv with the oracle."""
    q, k, v = problem.arrays()
    dout, dlse = problem.cotangents()
    out, res = cuattn.attention_forward(
        *map(engine.asarray, (q, k, v)), **problem.options, **options
    )
    gradients = cuattn.attention_backward(
        res,
        None if dout is None else engine.asarray(dout),
        None if dlse is None else engine.asarray(dlse),
    )
    dq, dk, dv = (engine.asnumpy(each) for each in (gradients.dq, gradients.dk, gradients.dv))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    assert_backward(
        tuple(map(problem.canonical, (dq, dk, dv))),
        *map(problem.canonical, (q, k, v, engine.asnumpy(out))),
        None if dout is None else problem.canonical(dout),
        None if dlse is None else problem.canonical_lse(dlse),
        **problem.oracle,
    )


def refused(error, name, *parts, run):
    """The class, and that the message has name, got, expected and the remedy, in that order."""
    with pytest.raises(error) as caught:
        run()
    message = str(caught.value)
    assert re.match(rf"{re.escape(name)}: ", message), message
    if error is not cuattn.UnsupportedError:
        assert re.match(r".+: got .+; expected .+; .+", message), message
    for part in parts:
        assert part in message, message
