"""The shared forward suite on emulated kernels: what fits into a few minutes of it."""

import pytest
from calls import check_forward, check_without_lse
from emulated import engine  # noqa: F401 - every test here takes this one
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Problem, problems
from test_forward import (  # noqa: F401 - run here too
    ENGINES,
    test_few_rows_and_many_keys,
    test_lse_of_a_key_that_outweighs_all_others_is_its_score,
    test_many_tiles,
    test_rows_that_see_nothing_of_a_part_of_the_keys,
)
from tiles import RANKS

#: Single tests that need no other engines.
EMULATED = {
    "test_few_rows_and_many_keys": ("sm80",),
    "test_lse_of_a_key_that_outweighs_all_others_is_its_score": ("sm80",),
    "test_many_tiles": ("sm80", "tf32x3", "dmma"),
    "test_keys_in_parts_with_lse_and_without": ("sm80",),
    "test_many_parts_of_the_keys": ("sm80",),
    "test_rows_that_see_nothing_of_a_part_of_the_keys": ("sm80",),
}


@settings(max_examples=35)
@given(problem=problems(), rank=st.sampled_from(RANKS))
def test_any_problem(engine, problem, rank):  # noqa: F811
    with engine.tile(rank), engine.order(problem.seed):
        check_forward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("softmax_scale", [None, 1e7])
def test_keys_in_parts_with_lse_and_without(engine, softmax_scale):  # noqa: F811
    problem = Problem("bfloat16", "bshd", 1, 20, 1100, 1, 1, 64, 64, softmax_scale=softmax_scale)
    check_forward(engine, problem)
    check_without_lse(engine, problem)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 128), (64, 61)])
def test_many_parts_of_the_keys(engine, head_dim, head_dim_v):  # noqa: F811
    """More than a warp has lanes, of numbers in vectors and not."""
    check_forward(engine, Problem("bfloat16", "bshd", 1, 3, 9000, 1, 2, head_dim, head_dim_v))
