"""One test per line of the design's Arrays, Layout, dtypes and out=, on every engine."""

import itertools

import numpy as np
import pytest
from calls import (
    EVERYTHING,
    check_backward,
    check_forward,
    draw,
    gradients,
    like_lse,
    qkv,
    run,
    same_bits,
)
from compare import assert_backward, assert_forward
from strategies import DTYPES, LAYOUTS, STRIDES, Problem, with_strides

import cuattn
from cuattn._arrays import TOGETHER_BYTES, NewArrays
from cuattn.planning.problem import Band

# Arrays --------------------------------------------------------------------------------------


def test_result_is_of_the_kind_that_went_in(engine):
    q, k, v = map(engine.asarray, qkv())
    (out, lse), vjp = cuattn.attention_vjp(q, k, v, return_lse=True)
    grads = vjp(out, lse)
    assert all(type(each) is type(q) for each in (out, lse, grads.dq, grads.dk, grads.dv))


def test_inputs_are_not_changed(engine):
    q, k, v = qkv()
    dout, dlse = draw((1, 7, 2, 8), (1, 2, 7))
    arrays = [q, k, v, dout, like_lse(q, dlse)]
    held = [engine.asarray(array.copy()) for array in arrays]
    _, vjp = cuattn.attention_vjp(*held[:3], causal=True)
    vjp(*held[3:])
    assert all(same_bits(engine.asnumpy(a), b) for a, b in zip(held, arrays, strict=True))


def test_out_has_the_same_bits_whether_lse_is_wanted_or_not(engine):
    arrays = [engine.asarray(array) for array in qkv(70, 70)]
    out, _ = cuattn.attention(*arrays, causal=True, return_lse=True)
    assert same_bits(engine.asnumpy(cuattn.attention(*arrays, causal=True)), engine.asnumpy(out))


def test_residuals_are_references(engine):
    q, k, v = map(engine.asarray, qkv())
    out, res = cuattn.attention_forward(q, k, v)
    assert res.q is q
    assert res.k is k
    assert res.v is v
    assert res.out is out
    assert res.lse.shape == (1, 2, 7)


def test_one_array_may_be_q_k_and_v(engine):
    q = qkv()[0]
    x = engine.asarray(q)
    assert_forward(engine.asnumpy(cuattn.attention(x, x, x)), None, q, q, q, **EVERYTHING)


# Layout --------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", LAYOUTS)
def test_layout_letters_name_the_axes(engine, letters):
    heads = (2, 2) if "h" in letters else (1, 1)
    batch = 2 if "b" in letters else 1
    problem = Problem("float32", letters, batch, 6, 6, *heads, 4, 5, causal=True)
    check_forward(engine, problem)
    check_backward(engine, problem)


@pytest.mark.parametrize("letters", LAYOUTS)
def test_results_are_contiguous_in_the_callers_layout(engine, letters):
    q, k, v = map(engine.asarray, draw(*[(3,) * len(letters)] * 3))
    (out, lse), vjp = cuattn.attention_vjp(q, k, v, layout=letters, return_lse=True)
    grads = vjp(out)
    for each in (out, lse, grads.dq, grads.dk, grads.dv):
        assert each.flags.c_contiguous


def test_lse_lacks_the_axes_left_out(engine):
    q, k, v = draw((5, 2, 4), (5, 2, 4), (5, 2, 4))
    assert run(engine, q, k, v, layout="shd")[1].shape == (2, 5)
    assert run(engine, q, k, v, layout="bsd")[1].shape == (5, 2)
    assert run(engine, q[:, 0], k[:, 0], v[:, 0], layout="sd")[1].shape == (5,)


@pytest.mark.parametrize("heads_kv", [1, 2, 6])
def test_heads_q_is_a_multiple_of_heads_kv(engine, heads_kv):
    problem = Problem("float32", "bshd", 2, 9, 12, heads_kv, 6 // heads_kv, 8, 8)
    check_forward(engine, problem)
    check_backward(engine, problem)


@pytest.mark.parametrize("heads_kv", [0, 1])
@pytest.mark.parametrize(
    "empty", [axes for n in (1, 2) for axes in itertools.combinations("bqkh", n)], ids="".join
)
def test_any_other_axis_may_be_zero(engine, empty, heads_kv):
    size = {axis: 0 if axis in empty else 2 for axis in "bqkh"}
    heads = min(heads_kv, size["h"]) if size["h"] == 0 else 1
    q = np.ones((size["b"], size["q"], size["h"], 4), np.float32)
    k = v = np.ones((size["b"], size["k"], heads, 4), np.float32)
    out, lse = run(engine, q, k, v)
    assert out.shape == q.shape
    assert not out.any() or "k" not in empty
    assert lse.shape == (size["b"], size["h"], size["q"])
    dq, dk, dv = gradients(engine, q, k, v, np.ones_like(q), np.ones_like(lse))
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape)
    if "q" in empty or "h" in empty:
        assert not dk.any()
        assert not dv.any()
    if "k" in empty:
        assert not dq.any()
        assert np.isneginf(lse).all()


@pytest.mark.parametrize("head_dims", [(1, 1), (1, 7), (7, 1), (264, 24)])
def test_head_dim_and_head_dim_v_are_at_least_one(engine, head_dims):
    problem = Problem("float32", "bshd", 1, 9, 9, 1, 2, *head_dims, causal=True)
    q, k, v = problem.arrays()
    assert_forward(*run(engine, q, k, v, causal=True), q, k, v, **problem.oracle)


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(engine, dtype, kind):
    problem = Problem(dtype, "bshd", 2, 9, 12, 2, 1, 8, 8, strides=(kind,) * 4)
    check_forward(engine, problem)
    check_backward(engine, problem)


def test_offsets_are_sixty_four_bits(engine):
    """Rows 8,400,007 elements apart: the last one starts beyond 2^31."""
    rows, step, dim = 260, 8_400_007, 16
    q, k, v, dout = (each[0] for each in draw(*[(1, rows, 1, dim)] * 4, dtype="float16"))
    far = engine.xp.zeros(((rows - 1) * step + dim,), "float16")
    item = far.itemsize
    view = engine.xp.lib.stride_tricks.as_strided(far, (rows, 1, dim), (step * item, item, item))
    view[...] = engine.asarray(k)
    out, res = cuattn.attention_forward(
        engine.asarray(q), view, engine.asarray(v), layout="shd", causal=True
    )
    dk = cuattn.attention_backward(res, engine.asarray(dout)).dk
    canonical = [each[None] for each in (q, k, v)]
    oracle = {"band": Band(-rows, 0), "softmax_scale": 0.25}
    out, dk = engine.asnumpy(out)[None], engine.asnumpy(dk)[None]
    assert_forward(out, None, *canonical, **oracle)
    assert_backward((None, dk, None), *canonical, out, dout[None], None, **oracle)


# dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_their_dtypes(engine, dtype):
    q, k, v = qkv(dtype=dtype)
    out, lse = run(engine, q, k, v)
    assert out.dtype == q.dtype
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    grads = gradients(engine, q, k, v, out, lse)
    assert all(each.dtype == q.dtype for each in grads)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_out_dtype_float32_is_the_unrounded_out(engine, dtype):
    q, k, v = qkv(dtype=dtype)
    rounded, _ = run(engine, q, k, v)
    for spelling in ("float32", np.float32, np.dtype("float32")):
        exact, _ = run(engine, q, k, v, out_dtype=spelling)
        assert exact.dtype == np.float32
        assert same_bits(exact.astype(q.dtype), rounded)
        assert not np.array_equal(exact, rounded.astype(np.float32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_dtype_may_be_that_of_q(engine, dtype):
    q, k, v = qkv(dtype=dtype)
    assert same_bits(run(engine, q, k, v, out_dtype=dtype)[0], run(engine, q, k, v)[0])


# out= ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "sliced", "reversed"])
def test_out_may_have_any_strides_and_is_returned(engine, kind):
    q, k, v = qkv(batch=2)
    out = engine.asarray(with_strides(np.full(q.shape, 7, q.dtype), kind))
    strides = out.strides
    assert cuattn.attention(*map(engine.asarray, (q, k, v)), out=out) is out
    assert out.strides == strides
    assert_forward(engine.asnumpy(out), None, q, k, v, **EVERYTHING)


def test_nothing_beside_out_is_written(engine):
    q, k, v = map(engine.asarray, qkv(batch=2, dtype="float32"))
    around = engine.xp.full((5, 15, 5, 17), 7, "float32")
    inside = tuple(slice(1, 2 * n + 1, 2) for n in q.shape)
    cuattn.attention(q, k, v, out=around[inside])
    around[inside] = 7
    assert (engine.asnumpy(around) == 7).all()


def test_out_has_out_dtype(engine):
    q, k, v = map(engine.asarray, qkv(dtype="float16"))
    out = engine.xp.empty(q.shape, "float32")
    assert cuattn.attention(q, k, v, out_dtype="float32", out=out) is out
    with pytest.raises(cuattn.DTypeError, match=r"out: .*float16"):
        cuattn.attention(q, k, v, out=out)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_out_must_not_overlap_an_input(engine, which):
    arrays = list(map(engine.asarray, qkv()))
    with pytest.raises(cuattn.ArgumentError, match=f"out: got memory that {'qkv'[which]} reads"):
        cuattn.attention(*arrays, out=arrays[which][:, ::-1])


def test_out_may_interleave_with_an_input(engine):
    q, k, v = qkv(dtype="float32")
    both = engine.xp.zeros((1, 7, 2, 16), "float32")
    both[..., ::2] = engine.asarray(q)
    out = cuattn.attention(
        both[..., ::2], engine.asarray(k), engine.asarray(v), out=both[..., 1::2]
    )
    assert_forward(engine.asnumpy(out), None, q, k, v, **EVERYTHING)


@pytest.mark.parametrize("strides", [(0, 32, 16, 4), (16, 16, 4, 4), (8, 4, 4, 4)])
def test_out_must_not_overlap_itself(engine, strides):
    q, k, v = map(engine.asarray, qkv(2, 2, head_dim=4, batch=2, dtype="float32"))
    out = engine.xp.lib.stride_tricks.as_strided(engine.xp.zeros(128, "float32"), q.shape, strides)
    with pytest.raises(cuattn.ArgumentError, match=r"out: got strides .*do not share memory"):
        cuattn.attention(q, k, v, out=out)


def test_out_is_untouched_on_an_error(engine):
    q, k, v = map(engine.asarray, qkv())
    out = engine.xp.full(q.shape, 7, "float32")
    with pytest.raises(cuattn.CuattnError):
        cuattn.attention(q, k, v[:, 1:], out=out)
    with pytest.raises(cuattn.CuattnError):
        cuattn.attention(q, k, v, softcap=1.0, out=out)
    assert (engine.asnumpy(out) == 7).all()


SMALL = (3, 5), np.dtype("float32")
LARGE = (TOGETHER_BYTES // 8, 2), np.dtype("float32")


def test_new_arrays_of_a_device_share_memory_where_they_are_small():
    few = NewArrays.of(0, SMALL, SMALL)
    assert few.places == ((*SMALL, 0), (*SMALL, 256))
    assert few.nbytes == 512
    assert NewArrays.of(0, SMALL, LARGE).nbytes == 0  # together they are not small
    assert NewArrays.of(0, SMALL).nbytes == NewArrays.of(None, SMALL, SMALL).nbytes == 0
    assert NewArrays.of(0, None, SMALL).nbytes == 0
    assert NewArrays.of(0, SMALL, None, SMALL).places == ((*SMALL, 0), None, (*SMALL, 256))


def test_new_arrays_are_contiguous_and_do_not_meet(engine):
    device = None if engine.name == "numpy" else 0
    for kinds in ((SMALL, SMALL, LARGE), (SMALL, SMALL), (SMALL,), (((0, 4), SMALL[1]), SMALL)):
        arrays = NewArrays.of(device, *kinds)()
        for number, (array, (shape, dtype)) in enumerate(zip(arrays, kinds, strict=True)):
            assert (array.shape, array.dtype) == (shape, dtype)
            assert array.flags.c_contiguous
            array[...] = number
        for number, array in enumerate(arrays):
            assert (engine.asnumpy(array) == number).all()


def test_an_array_that_is_not_made_is_none(engine):
    device = None if engine.name == "numpy" else 0
    for kinds in ((SMALL, None, SMALL), (None, SMALL, None), (None, LARGE, SMALL), (None, None)):
        arrays = NewArrays.of(device, *kinds)()
        shapes = [None if array is None else array.shape for array in arrays]
        assert shapes == [kind and kind[0] for kind in kinds]


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["sm80"], indirect=True, scope="module")
def test_small_gradients_are_one_allocation_and_outlive_each_other(engine):
    q, k, v = map(engine.asarray, qkv(dtype="float16"))
    out, vjp = cuattn.attention_vjp(q, k, v)
    gradients, again = vjp(out), vjp(out)
    pieces = [each.data.mem for each in (gradients.dq, gradients.dk, gradients.dv)]
    assert pieces[0] is pieces[1] is pieces[2]
    kept, expected = gradients.dk, engine.asnumpy(gradients.dk)
    assert again.dk.data.mem is not pieces[0]
    del gradients, pieces
    vjp(2 * out)
    assert np.array_equal(engine.asnumpy(kept), expected)
