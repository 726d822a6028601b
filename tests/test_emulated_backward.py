"""The shared backward suite on emulated kernels: what fits into a few minutes of it."""

import pytest
import test_backward
from calls import check_backward
from emulated import engine  # noqa: F401 - every test here takes this one
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems
from test_backward import (  # noqa: F401 - run here too
    test_deterministic_or_not_is_as_exact,
    test_gradients_are_finite_differences,
    test_large_scores,
    test_many_tiles,
)
from tiles import RANKS

#: Single tests that need no other engines.
EMULATED = {
    "test_few_keys": ("sm80", "sm80-both"),
    "test_keys_that_no_row_sees_get_zeros": ("sm80",),
    "test_gradients_are_finite_differences": ("simt", "dmma"),
    "test_deterministic_or_not_is_as_exact": ("simt", "sm80-tiles"),
    "test_large_scores": ("sm80",),
    "test_many_tiles": ("tf32x3", "sm80-tiles"),
}


@settings(max_examples=12)
@given(problem=problems(), rank=st.sampled_from(RANKS))
def test_any_problem(engine, problem, rank):  # noqa: F811
    with engine.tile(rank), engine.order(problem.seed):
        check_backward(engine, problem.within(engine.dtypes))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_few_keys(engine, dtype):  # noqa: F811
    test_backward.test_few_keys(engine, dtype, 64)


def test_keys_that_no_row_sees_get_zeros(engine):  # noqa: F811
    test_backward.test_keys_that_no_row_sees_get_zeros(engine, 64)
