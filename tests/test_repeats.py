"""The same inputs give the same bits: where that is promised, on every engine."""

import numpy as np
import pytest
from calls import draw, gradients, qkv, run, same_bits
from strategies import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_gives_the_same_bits(engine, dtype):
    q, k, v = qkv(257, 300, 4, 2, 64, dtype=dtype)
    first, second = run(engine, q, k, v), run(engine, q, k, v)
    assert all(map(same_bits, first, second))


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_backward_gives_the_same_bits(engine, dtype):
    q, k, v = qkv(257, 300, 4, 2, 64, dtype=dtype)
    dout = draw(q.shape, dtype=dtype)[0]
    first = gradients(engine, q, k, v, dout, deterministic=True)
    second = gradients(engine, q, k, v, dout, deterministic=True)
    assert all(map(same_bits, first, second))


def test_a_result_does_not_depend_on_what_ran_before(engine):
    q, k, v = qkv(65, 65)
    first = run(engine, q, k, v)
    run(engine, np.full_like(q, np.nan), np.full_like(k, np.inf), np.full_like(v, np.nan))
    assert all(map(same_bits, first, run(engine, q, k, v)))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["sm80"], indirect=True, scope="module")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen_k", [64, 190])
def test_a_backward_in_one_launch_gives_the_same_bits(engine, seqlen_k, head_dim, dtype):
    """Unasked, for it adds nothing in memory; 200 blocks and more, so that a race would show."""
    q, k, v = qkv(200, seqlen_k, 4, 2, head_dim, dtype=dtype, batch=100)
    dout, dlse = draw(q.shape, (100, 4, 200), dtype=dtype)
    for rank in engine.ranks:
        with engine.tile(rank):
            first = gradients(engine, q, k, v, dout, dlse)
            for _ in range(3):
                assert all(map(same_bits, first, gradients(engine, q, k, v, dout, dlse)))
