"""The shared forward suite: every engine against the dense formula, one tolerance rule."""

import numpy as np
import pytest
from calls import check_forward, run
from compare import assert_forward
from engines import FORWARD_ENGINES
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Problem, dtype_of, problems
from tiles import RANKS

import cuattn

ENGINES = FORWARD_ENGINES


@settings(max_examples=400)
@given(problem=problems(), rank=st.sampled_from(RANKS))
def test_any_problem(engine, problem, rank):
    with engine.tile(rank):
        check_forward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tiles(engine, dtype, causal):
    align = "bottom_right" if causal else None
    problem = Problem(dtype, "bshd", 1, 515, 390, 1, 2, 64, 64, causal=causal, align=align)
    for rank in engine.ranks:
        with engine.tile(rank):
            check_forward(engine, problem)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_and_many_keys(engine, dtype, causal):
    """Where a family splits the keys."""
    position = {"causal": True, "q_offset": 1000} if causal else {}
    problem = Problem(dtype, "bshd", 1, 33, 1900, 1, 2, 64, 40, **position)
    check_forward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("rounded", [True, False])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(200, 200), (64, 61), (128, 128), (72, 68)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_parts_of_the_keys(engine, dtype, head_dim, head_dim_v, rounded):
    """More than a warp has lanes, of numbers in vectors and not; test_plan_sm80 says how many."""
    out_dtype = None if rounded or dtype == "float64" else "float32"
    sizes = (1, 3, 9000, 1, 2, head_dim, head_dim_v)
    problem = Problem(dtype, "bshd", *sizes, out_dtype=out_dtype)
    check_forward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing_of_a_part_of_the_keys(engine, dtype):
    """Keys are split by the longest row; test_plan says that the first rows have empty parts."""
    problem = Problem(dtype, "bshd", 1, 1030, 1030, 1, 1, 64, 64, causal=True, align="top_left")
    check_forward(engine, problem.within(engine.dtypes))


def test_more_heads_than_a_grid_axis_holds(engine):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 65540, 4, 1, 4)).astype(np.float32)
    out = engine.asnumpy(cuattn.attention(*map(engine.asarray, (q, k, v))))
    for some in (slice(0, 2), slice(65534, 65540)):
        few = Problem("float32", "bshd", 2, 4, 4, 1, 1, 4, 4)
        assert_forward(out[some], None, q[some], k[some], v[some], **few.oracle)


@pytest.mark.parametrize("seqlen_k", [40, 1100])
@pytest.mark.parametrize("softmax_scale", [1234.567, -1234.567, 1e7 / 3])
def test_lse_of_a_key_that_outweighs_all_others_is_its_score(engine, softmax_scale, seqlen_k):
    """To the last bit, so that the backward finds it again."""
    rng = np.random.default_rng(3)
    dtype = engine.dtypes[0]
    q, k, v = (
        rng.integers(-4, 5, (1, seqlen, 2, 64)).astype(dtype_of(dtype))
        for seqlen in (20, seqlen_k, seqlen_k)
    )
    _, lse = run(engine, q, k, v, softmax_scale=softmax_scale)
    products = np.einsum("bqhd,bkhd->bhqk", q.astype(lse.dtype), k.astype(lse.dtype))  # exact
    scores = np.sort(products * lse.dtype.type(softmax_scale))
    is_one = scores[..., -1] > scores[..., -2]
    assert is_one.any()
    np.testing.assert_array_equal(lse[is_one], scores[..., -1][is_one])
