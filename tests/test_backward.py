"""The shared backward suite: every engine against the dense formula, one tolerance rule."""

import itertools

import numpy as np
import pytest
from calls import check_backward, gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Problem, problems
from tiles import RANKS

import cuattn


@settings(max_examples=400)
@given(problem=problems(), rank=st.sampled_from(RANKS))
def test_any_problem(engine, problem, rank):
    with engine.tile(rank):
        check_backward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tiles(engine, dtype, causal):
    align = "bottom_right" if causal else None
    problem = Problem(dtype, "bshd", 1, 260, 390, 1, 2, 64, 32, causal=causal, align=align)
    for rank in engine.ranks:
        with engine.tile(rank):
            check_backward(engine, problem)


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_keys(engine, dtype, head_dim):
    """One tile may hold all keys, and rows, many and of a group of heads, may see none of them.

    With the last number of keys none does, but both loops of a backward may be one launch.
    """
    # Rows in vectors, and not: head_dim_v as it is, and 3 less.
    for seqlen_k, less, rank in itertools.product((1, 64, 127, 190), (0, 3), engine.ranks):
        sizes = (1, 100, seqlen_k, 1, 2, head_dim, head_dim - less)
        problem = Problem(dtype, "bshd", *sizes, causal=True, align="bottom_right")
        with engine.tile(rank):
            check_backward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_keys_that_no_row_sees_get_zeros(engine, head_dim):
    """Whole tiles of them, in so many blocks that copies are still under way when these end."""
    sizes = (10, 1, 1500, 4, 1, head_dim, head_dim)
    problem = Problem("float16", "bshd", *sizes, causal=True, align="top_left")
    problem = problem.within(engine.dtypes)
    check_backward(engine, problem)
    dout, _ = problem.cotangents()
    _, dk, dv = gradients(engine, *problem.arrays(), dout, causal=True, align="top_left")
    assert not dk[:, 1:].any()
    assert not dv[:, 1:].any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("softmax_scale", [20.0, 300.0, -300.0, 1e7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores(engine, dtype, softmax_scale, deterministic):
    """One key outweighs all others of its row, and lse is large."""
    problem = Problem(dtype, "bshd", 1, 150, 140, 1, 2, 64, 32, softmax_scale=softmax_scale)
    check_backward(engine, problem.within(engine.dtypes), deterministic=deterministic)


@pytest.mark.parametrize("deterministic", [None, False, True])
def test_deterministic_or_not_is_as_exact(engine, deterministic):
    problem = Problem("float32", "bshd", 1, 70, 90, 2, 2, 64, 32)
    check_backward(engine, problem.within(engine.dtypes), deterministic=deterministic)


@pytest.mark.parametrize("output", ["out", "lse"])
def test_gradients_are_finite_differences(engine, output):
    """Independent of the oracle's gradient formulas: float64, one direction per input."""
    problem = Problem("float64", "bshd", 2, 9, 12, 2, 2, 5, 3, causal=True, align="bottom_right")
    inputs, (dout, dlse) = problem.arrays(), problem.cotangents()
    weights = {"out": (dout, None), "lse": (None, dlse)}[output]

    def value(*arrays):
        results = cuattn.attention(*map(engine.asarray, arrays), return_lse=True, **problem.options)
        return sum(
            (engine.asnumpy(result) * weight).sum()
            for result, weight in zip(results, weights, strict=True)
            if weight is not None
        )

    _, vjp = cuattn.attention_vjp(*map(engine.asarray, inputs), **problem.options)
    gradients = vjp(*(None if weight is None else engine.asarray(weight) for weight in weights))
    rng = np.random.default_rng(2)
    for i, gradient in enumerate((gradients.dq, gradients.dk, gradients.dv)):
        direction = rng.standard_normal(inputs[i].shape)
        along = (engine.asnumpy(gradient) * direction).sum()
        # Central differences in float64: the error is O(step^2) + eps / step, both near 1e-10.
        step = 1e-5
        moved = [
            value(*(a + sign * step * direction if j == i else a for j, a in enumerate(inputs)))
            for sign in (1, -1)
        ]
        slope = (moved[0] - moved[1]) / (2 * step)
        size = np.abs(engine.asnumpy(gradient) * direction).sum() + 1
        assert abs(slope - along) <= 1e4 * step**2 / 100 * size
