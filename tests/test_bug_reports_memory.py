"""What others' users reported of attention kernels, as tests here: strides, addresses, memory.

As in ``test_bug_reports.py``, by number of the report.
"""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from calls import draw, qkv, same_bits
from checked import CAUSAL, call, check_arrays, dtype_within, new_memory_is_nan
from strategies import dtype_of

import cuattn

# Strides -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bc18_transposed_and_packed_arrays_are_read_where_they_lie(engine, dtype):
    """pytorch/pytorch#112577, ROCm/pytorch#3230, flagos-ai/FlagGems#5896, without a mask."""
    dtype = dtype_within(engine, dtype)
    arrays = map(engine.asarray, draw(*[(2, 4, 62, 32)] * 3, dtype=dtype))
    check_arrays(engine, *(each.transpose(0, 2, 1, 3) for each in arrays))
    (packed,) = map(engine.asarray, draw((2, 62, 3, 4, 32), dtype=dtype))
    check_arrays(engine, packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])


def views(engine, kind):
    """q of 18 rows, k and v of 21, two heads of 16, as views of this kind."""
    dtype = dtype_within(engine, "float16")

    def new(*shape):
        (array,) = draw(shape, dtype=dtype)
        return engine.asarray(array)

    if kind == "reversed":
        q, k, v = (new(2, n, 2, 16) for n in (18, 21, 21))
        return q[:, ::-1], k[:, ::-1], v[:, :, ::-1]
    if kind == "stepped":
        return (
            new(2, 36, 2, 16)[:, ::2],
            new(2, 63, 2, 16)[:, 1::3],
            new(2, 42, 4, 16)[:, ::2, 1::2],
        )
    if kind == "stepped dims":
        return (
            new(2, 18, 2, 32)[..., ::2],
            new(2, 21, 2, 32)[..., 1::2],
            new(2, 21, 2, 16)[..., ::-1],
        )
    if kind == "dims first":
        return tuple(new(16, 2, n, 2).transpose(1, 2, 3, 0) for n in (18, 21, 21))
    if kind == "fortran":
        return tuple(new(16, 2, n, 2).transpose(3, 2, 1, 0) for n in (18, 21, 21))
    if kind == "columns of wider":
        return tuple(new(2, n, 2, 24)[..., 4:20] for n in (18, 21, 21))
    if kind == "one batch":  # whose stride says nothing
        rows = (new(n, 2, 16) for n in (18, 21, 21))
        as_strided = engine.xp.lib.stride_tricks.as_strided
        return tuple(as_strided(x, (1, *x.shape), (7 * x.itemsize, *x.strides)) for x in rows)
    raise AssertionError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("reversed", "stepped", "stepped dims", "dims first", "fortran"),
        *("columns of wider", "one batch"),
    ],
)
def test_bc20_a_view_is_not_its_base(engine, kind):
    """cupy/cupy#7267 and #5427, pytorch/pytorch#187506."""
    check_arrays(engine, *views(engine, kind), causal=True)


@pytest.mark.parametrize("kind", ["of a sum", "transposed", "reversed", "columns of wider"])
def test_bc21_dout_may_have_any_strides(engine, kind):
    """pytorch/pytorch#138529: the gradient of a sum has stride 0 everywhere."""
    dtype = dtype_within(engine, "float16")
    q, k, v = map(engine.asarray, qkv(20, 33, 4, 2, 32, dtype=dtype, batch=2))
    one, swapped, plain, wide = map(
        engine.asarray,
        draw((1, 1, 1, 1), (2, 4, 20, 32), (2, 20, 4, 32), (2, 20, 4, 50), dtype=dtype),
    )
    dout = {
        "of a sum": engine.xp.broadcast_to(one, q.shape),
        "transposed": swapped.transpose(0, 2, 1, 3),
        "reversed": plain[:, ::-1, :, ::-1],
        "columns of wider": wide[..., 7:39],
    }[kind]
    check_arrays(engine, q, k, v, dout, causal=True)


def mostly_untouched(engine, size, dtype):
    """So many elements, of which memory holds only what is touched."""
    if engine.xp is np:
        return np.empty(size, dtype)
    import cupy

    with cupy.cuda.using_allocator(cupy.cuda.malloc_managed):
        return cupy.empty(size, dtype)


def test_bc22_offsets_of_queries_values_and_dout_are_sixty_four_bits(engine):
    """Dao-AILab/flash-attention#2611, pytorch/pytorch#190857; of keys in ``test_arrays.py``."""
    rows, step, dim = 40, 55_500_007, 16
    dtype = dtype_within(engine, "float16")
    q, k, v, dout = draw(*[(1, rows, 1, dim)] * 4, dtype=dtype)
    far = mostly_untouched(engine, (rows - 1) * step + dim, q.dtype)
    item = far.itemsize
    strides = (rows * step * item, step * item, item, item)
    view = engine.xp.lib.stride_tricks.as_strided(far, q.shape, strides)
    assert (rows - 1) * step > 2**31
    for which in range(4):
        arrays = list(map(engine.asarray, (q, k, v, dout)))
        view[...], arrays[which] = arrays[which], view
        check_arrays(engine, *arrays)


@pytest.mark.parametrize("seqlen_k", [43, 77, 361, 364])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bc55_rows_may_lie_at_any_address(engine, dtype, seqlen_k):
    """facebookresearch/xformers#813 and #808, pytorch/pytorch#134995, without a bias."""
    dtype = dtype_within(engine, dtype)
    shapes = (1, 21, 2, 37), (1, seqlen_k, 2, 37), (1, seqlen_k, 2, 37)
    wide = list(map(engine.asarray, draw(*shapes, dtype=dtype)))
    for columns in (slice(0, 32), slice(1, 33)):
        check_arrays(engine, *(each[..., columns] for each in wide))


# What a call leaves --------------------------------------------------------------------------


@pytest.mark.parametrize(("seqlen_q", "head_dim"), [(1, 64), (5, 37), (70, 64)])
def test_bc86_nothing_is_written_but_the_results(engine, seqlen_q, head_dim):
    """Dao-AILab/flash-attention#638: not inputs, not what lies around them, not small arrays."""
    dtype = dtype_within(engine, "float16")
    shapes = (2, seqlen_q, 4, head_dim), *[(2, 90, 2, head_dim)] * 2, (2, seqlen_q, 4, head_dim)
    around, inside = [], []
    for array in (*draw(*shapes, dtype=dtype), np.zeros(shapes[0], dtype_of(dtype))):
        batch, seqlen, heads, dim = array.shape
        guarded = np.full((batch + 2, seqlen, heads, dim + 6), 77, array.dtype)
        guarded[1:-1, ..., 3:-3] = array
        around.append(engine.asarray(guarded))
        inside.append(around[-1][1:-1, ..., 3:-3])
    small = [engine.xp.arange(4) for _ in range(8)]
    q, k, v, dout, out = inside
    before = [engine.asnumpy(each).tobytes() for each in (*around[:4], *small)]
    cuattn.attention(q[:1], k[:1, :44], v[:1, :44], out=out[:1])
    call(q, k, v, dout, out=out, **CAUSAL)
    assert before == [engine.asnumpy(each).tobytes() for each in (*around[:4], *small)]
    assert engine.asnumpy(out).any()
    out[...] = 77
    assert (engine.asnumpy(around[4]) == 77).all()


def used_bytes(engine):
    gc.collect()
    if engine.name == "numpy":
        return tracemalloc.get_traced_memory()[0]
    return engine.xp.get_default_memory_pool().used_bytes()


def test_bc69_memory_does_not_grow_with_the_shapes_met(engine):
    """pytorch/pytorch#177869 and #165407, meta-pytorch/attention-gym#159."""
    dtype = dtype_within(engine, "float16")

    def sweep():
        for seqlen in range(40, 250, 7):
            q, k, v = map(engine.asarray, qkv(seqlen, seqlen, 2, 1, 32, dtype=dtype, batch=2))
            call(q, k, v, q, causal=True)
            cuattn.attention(q[:, :1], k, v)
        return used_bytes(engine)

    tracemalloc.start()
    try:
        sweep()
        second, third = sweep(), sweep()
    finally:
        tracemalloc.stop()
    one_call = 2 * 250 * (2 * 2 + 1 + 1) * 32 * 2  # q, k, v and out of the largest
    assert third - second < one_call


def test_bc69_arrays_are_freed_with_the_last_that_needs_them(engine):
    q, k, v = map(engine.asarray, qkv(70, 70))
    _, res = cuattn.attention_forward(q, k, v)
    cuattn.attention_backward(res, q)
    _, vjp = cuattn.attention_vjp(q, k, v)
    vjp(q)
    held = [weakref.ref(each) for each in (q, k, v, res.out, res.lse)]
    gc.disable()  # at once, not when a collector comes by
    try:
        del q, k, v, _
        assert all(each() is not None for each in held)
        del vjp
        assert all(each() is not None for each in held)
        del res
        assert [each() for each in held] == [None] * 5
    finally:
        gc.enable()


def test_bc53_results_do_not_share_memory_with_those_of_other_calls(engine):
    """A result that is kept stays as it was."""
    arrays = *qkv(70, 90), draw((1, 70, 2, 8))[0]
    kept = call(*map(engine.asarray, arrays), deterministic=True)
    before = [np.array(engine.asnumpy(each)) for each in kept]
    for _ in range(3):
        call(*(engine.asarray(-each) for each in arrays), deterministic=True)
    assert all(map(same_bits, before, map(engine.asnumpy, kept)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "heads", "head_dim"),
    [
        ((0, 12, 8, 0), (25, 17, 9, 30), (4, 1), 64),  # BC-34
        ((0, 12, 8, 0), (25, 17, 9, 30), (4, 1), 256),
        ((5, 33, 1, 64), (7, 0, 40, 65), (4, 2), 64),  # BC-37
    ],
)
def test_bc37_sequences_that_lie_side_by_side_do_not_meet(
    engine, lengths_q, lengths_k, heads, head_dim, causal
):
    """NVIDIA/cudnn-frontend#943, #878 and #740, Dao-AILab/flash-attention#2562: one by one."""
    dtype = dtype_within(engine, "bfloat16")
    ends = np.cumsum([lengths_q, lengths_k], axis=1)
    for end_q, end_k, seqlen_q, seqlen_k in zip(*ends, lengths_q, lengths_k, strict=True):
        mine = slice(end_q - seqlen_q, end_q), slice(end_k - seqlen_k, end_k)
        packed = []
        for length, number, which in (
            (ends[0, -1], heads[0], 0),
            *[(ends[1, -1], heads[1], 1)] * 2,
        ):
            (array,) = draw((1, length, number, head_dim), dtype=dtype)
            array[:, : mine[which].start] = array[:, mine[which].stop :] = np.nan
            packed.append(engine.asarray(array)[:, mine[which]])
        with new_memory_is_nan(engine):
            out, lse, dq, dk, dv = check_arrays(engine, *packed, causal=causal)
        if seqlen_k == 0:
            assert np.isneginf(lse).all()
        for nothing in (dk, dv) if seqlen_q == 0 else (out, dq) if seqlen_k == 0 else ():
            assert not nothing.any()
