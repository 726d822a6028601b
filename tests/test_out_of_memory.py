"""CuPy's pool may be limited: a call without memory is an error, and nothing else."""

import numpy as np
import pytest
from calls import draw, same_bits

import cuattn

pytestmark = pytest.mark.gpu


@pytest.fixture
def pool():
    """A pool for this test alone; CuPy's allocator is put back afterwards."""
    import cupy

    before, pool = cupy.cuda.get_allocator(), cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(pool.malloc)
    yield pool
    cupy.cuda.Device().synchronize()
    cupy.cuda.set_allocator(before)


def sevens(array):
    return np.full(array.shape, 7, array.dtype)


def limited(pool):
    """No more than is in use now."""
    pool.free_all_blocks()
    pool.set_limit(size=pool.used_bytes())


@pytest.mark.parametrize("engine", ["simt", "sm80"], indirect=True, scope="module")
def test_a_call_without_memory_is_an_error_that_changes_nothing(engine, pool):
    """lse, the gradients: a call that has less than it needs says so, and the next one is right."""
    import cupy

    q, k, v, dout = (engine.asarray(each) for each in draw(*[(16, 1024, 8, 64)] * 4))
    expected_out, res = cuattn.attention_forward(q, k, v, deterministic=True)
    expected = cuattn.attention_backward(res, dout)
    out = engine.asarray(sevens(q))
    cupy.cuda.Device().synchronize()
    limited(pool)
    for _ in range(2):
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cuattn.attention_forward(q, k, v, out=out)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cuattn.attention(q, k, v)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cuattn.attention_backward(res, dout)
    pool.set_limit(size=0)
    assert same_bits(engine.asnumpy(out), sevens(q))
    again, its_res = cuattn.attention_forward(q, k, v, out=out, deterministic=True)
    gradients = cuattn.attention_backward(its_res, dout)
    assert again is out
    for one, other in (
        (out, expected_out),
        (its_res.lse, res.lse),
        *((getattr(gradients, name), getattr(expected, name)) for name in ("dq", "dk", "dv")),
    ):
        assert same_bits(engine.asnumpy(one), engine.asnumpy(other))


@pytest.mark.parametrize("engine", ["sm80"], indirect=True, scope="module")
def test_a_call_without_memory_for_its_workspace_leaves_out_as_it_was(engine, pool):
    """The parts of a split forward are all that it needs beside out."""
    import cupy

    shapes = (1, 8, 4, 64), (1, 65536, 4, 64), (1, 65536, 4, 64)
    q, k, v = (engine.asarray(each) for each in draw(*shapes))
    expected = cuattn.attention(q, k, v)
    out = engine.asarray(sevens(q))
    cupy.cuda.Device().synchronize()
    limited(pool)
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cuattn.attention(q, k, v, out=out)
    pool.set_limit(size=0)
    assert same_bits(engine.asnumpy(out), sevens(q))
    cuattn.attention(q, k, v, out=out)
    assert same_bits(engine.asnumpy(out), engine.asnumpy(expected))
