"""What others' users reported of attention kernels, as tests here: shapes, heads and positions.

A test carries the number of its report (BC-09) and the reports themselves, by repository and
number. Those of numbers, of memory, of devices and of foreign arrays are in the files beside this.
"""

import itertools

import numpy as np
import pytest
from calls import check_backward, check_forward, draw, qkv, refused, run, same_bits
from checked import (
    CAUSAL,
    check_arrays,
    dtype_within,
    new_memory_is_nan,
    problem,
)
from compare import assert_accepted

import cuattn
from cuattn.cpu.tolerance import Expected, expected_backward, expected_forward
from cuattn.planning.problem import Band


def check_both(engine, asked):
    check_forward(engine, asked)
    check_backward(engine, asked)


# Options that wait ---------------------------------------------------------------------------

#: A value that each option would take of ``qkv()``.
VALUES = {
    "window": (2, 0),
    "mask": np.ones((1, 1, 7, 7), bool),
    "bias": np.zeros((1, 1, 7, 7), np.float32),
    "softcap": 3.0,
    "sinks": np.zeros(2, np.float32),
    "dropout_p": 0.3,
}

#: Reports whose right value needs an option that waits; when it comes, they get a test of it. What
#: they say beside it is tested under the same number.
WAITING = {
    "BC-01": ("mask",),  # rows of a mask that are all False
    "BC-02": ("bias",),  # the most negative finite number as a mask
    "BC-03": ("mask",),  # padding of queries and keys
    "BC-05": ("bias",),  # a band written as a bias of -inf
    "BC-06": ("bias",),  # its gradient in float32 beside bfloat16
    "BC-18": ("mask",),
    "BC-27": ("window",),  # both bounds inclusive
    "BC-29": ("window",),  # more queries than keys
    "BC-30": ("window",),  # sizes below 0 are refused
    "BC-31": ("window",),
    "BC-40": ("softcap",),
    "BC-42": ("sinks",),
    "BC-43": ("mask",),
    "BC-45": ("softcap", "window", "mask"),
    "BC-47": ("dropout_p",),
    "BC-49": ("window", "bias"),
    "BC-55": ("bias", "mask"),
    "BC-59": ("mask", "bias"),
    "BC-60": ("dropout_p",),
    "BC-67": ("mask",),  # one over DLPack
    "BC-78": ("mask",),  # of blocks
    "BC-80": ("mask",),
    "BC-81": ("window", "softcap"),
    "BC-86": ("softcap",),
}


@pytest.mark.parametrize(
    ("report", "option"), [(report, each) for report, its in WAITING.items() for each in its]
)
def test_an_option_that_a_report_waits_for_is_refused_by_name(report, option):
    q, k, v = qkv()
    with pytest.raises(cuattn.UnsupportedError, match=f"^{option}: "):
        cuattn.attention(q, k, v, **{option: VALUES[option]})


@pytest.mark.parametrize("report", ["BC-34", "BC-36", "BC-37", "BC-38", "BC-41", "BC-47", "BC-60"])
def test_packed_sequences_that_a_report_waits_for_are_not_there(report):
    assert not hasattr(cuattn, "attention_varlen")


# Causal where the lengths differ -------------------------------------------------------------


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "head_dim"),
    [(3, 128, 128), (1, 77, 32), (64, 65, 32), (17, 300, 40), (128, 192, 64)],
)
def test_bc08_fewer_queries_than_keys_are_the_last_positions(engine, seqlen_q, seqlen_k, head_dim):
    """NVIDIA/cutlass#2336, Dao-AILab/flash-attention#282 and #517."""
    asked = problem(
        *(engine, "float16", 1, (seqlen_q, seqlen_k), (1, 1), (head_dim, head_dim)), **CAUSAL
    )
    check_both(engine, asked)


@pytest.mark.parametrize("lengths", [(5, 2), (70, 33), (130, 1), (200, 64), (5, 0)])
def test_bc09_rows_before_the_first_key_are_empty(engine, lengths):
    """Dao-AILab/flash-attention#1778, flashinfer-ai/flashinfer#4452; BC-01, BC-29 without mask."""
    q, k, v = map(engine.asarray, qkv(*lengths, heads_kv=1, head_dim=16, batch=2))
    with new_memory_is_nan(engine):
        out, lse, dq, _, _ = check_arrays(engine, q, k, v, causal=True)
    blind = lengths[0] - lengths[1]
    assert not out[:, :blind].any()
    assert np.isneginf(lse[:, :, :blind]).all()
    assert not dq[:, :blind].any()


@pytest.mark.parametrize("seqlen", [70, 129])
def test_bc27_a_row_sees_its_own_position_and_none_after(engine, seqlen):
    """Dao-AILab/flash-attention#1133, without its window."""
    (v,) = draw((1, seqlen, 1, 4))
    q = engine.asarray(np.zeros_like(v))
    _, lse, *_ = check_arrays(engine, q, q, engine.asarray(v), causal=True)
    assert np.array_equal(np.rint(np.exp(lse[0, 0])), np.arange(1, seqlen + 1))


def test_bc45_a_past_row_does_not_change_with_the_future(engine):
    """Dao-AILab/flash-attention#1025, without its softcap."""
    q, k, v = qkv(40, 40, head_dim=32)
    before, lse_before = run(engine, q, k, v, causal=True)
    k[:, 20:] += 5
    v[:, 20:] -= 100
    after, lse_after = run(engine, q, k, v, causal=True)
    assert same_bits(before[:, :20], after[:, :20])
    assert same_bits(lse_before[:, :, :20], lse_after[:, :, :20])
    assert not np.array_equal(before[:, 20:], after[:, 20:])


# Nothing to do -------------------------------------------------------------------------------


def check_empty(engine, shape_q, shape_k, **options):
    """Shapes are right, all gradients 0, and a call that has something to do is right after it."""
    dtype = dtype_within(engine, "float16")
    q, k, v, dout = map(engine.asarray, draw(shape_q, shape_k, shape_k, shape_q, dtype=dtype))
    out, res = cuattn.attention_forward(q, k, v, **options)
    grads = cuattn.attention_backward(res, dout)
    assert out.shape == shape_q
    assert res.lse.shape == (shape_q[0], shape_q[2], shape_q[1])
    assert (grads.dq.shape, grads.dk.shape, grads.dv.shape) == (shape_q, shape_k, shape_k)
    assert not engine.asnumpy(grads.dk).any()
    assert not engine.asnumpy(grads.dv).any()
    check_arrays(engine, *map(engine.asarray, qkv(3, 5, dtype=dtype)))


def test_bc11_a_batch_of_none_is_an_empty_result(engine):
    """pytorch/pytorch#133780, Dao-AILab/flash-attention#1159, NVIDIA/cudnn-frontend#101."""
    check_empty(engine, (0, 395, 10, 64), (0, 16, 10, 64))


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=("full", "causal"))
@pytest.mark.parametrize("seqlen_k", [7, 0])
def test_bc12_no_queries_are_an_empty_result(engine, seqlen_k, options):
    """facebookresearch/xformers#852; BC-34 of one sequence."""
    with new_memory_is_nan(engine):
        check_empty(engine, (2, 0, 4, 32), (2, seqlen_k, 2, 32), **options)


# Head dims -----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 160, 192, 256])
def test_bc14_the_last_columns_of_a_head_decide(engine, head_dim):
    """triton-lang/triton#621."""
    q, k, v = qkv(19, 35, head_dim=head_dim, dtype=dtype_within(engine, "float16"))
    q[..., :-8] = k[..., :-8] = 0
    q, k = q * q.dtype.type(3), k * k.dtype.type(3)
    check_arrays(engine, *map(engine.asarray, (q, k, v)))


@pytest.mark.parametrize("head_dim", [256, 264, 320, 512, 1024])
def test_bc16_large_head_dims_are_right(engine, head_dim):
    """Dao-AILab/flash-attention#1645 and #2750, pytorch/pytorch#189849."""
    asked = problem(engine, "bfloat16", 1, (33, 40), (2, 1), (head_dim, head_dim), **CAUSAL)
    with new_memory_is_nan(engine):
        check_both(engine, asked)


@pytest.mark.parametrize("dims", [(64, 128), (192, 128), (128, 256), (40, 8), (16, 1)])
def test_bc17_values_may_have_another_head_dim(engine, dims):
    """Dao-AILab/flash-attention#952 and #753."""
    check_both(engine, problem(engine, "float16", 2, (17, 29), (4, 2), dims, **CAUSAL))


# Many of them --------------------------------------------------------------------------------


def repeated(expected, axis, index):
    """What results must be whose slices along an axis are those of ``index``."""
    bound = np.broadcast_to(expected.bound, expected.value.shape)
    return Expected(expected.value.take(index, axis), bound.take(index, axis), expected.dtype)


@pytest.mark.parametrize("what", ["batch", "heads"])
def test_bc25_more_than_65535_entries_are_all_right(engine, what):
    """facebookresearch/xformers#845, pytorch/pytorch#146704 and #142228.

    The entries are those of a few that the oracle is asked for, again and again.
    """
    few, many = 7, 65_541
    sizes = {"batch": (few, 4, 1, 8), "heads": (1, 3, 3 * few, 8)}
    dtype = dtype_within(engine, "float16")
    q, dout = draw(sizes[what], sizes[what], dtype=dtype)
    k, v = draw(*[(few, 4, 1, 8) if what == "batch" else (1, 3, few, 8)] * 2, dtype=dtype)
    axis = 0 if what == "batch" else 2
    entry = np.arange(many) % few
    # three query heads share a key head
    row = entry if what == "batch" else (3 * entry[: many // 3, None] + np.arange(3)).reshape(-1)
    key = entry if what == "batch" else entry[: many // 3]
    arrays = [each.take(index, axis) for each, index in ((q, row), (k, key), (v, key), (dout, row))]
    held = list(map(engine.asarray, arrays))
    out, res = cuattn.attention_forward(*held[:3], causal=True)
    grads = cuattn.attention_backward(res, held[3])
    oracle = {"band": Band(-9, 0), "softmax_scale": 8**-0.5}
    want_out, want_lse = expected_forward(q, k, v, **oracle)
    assert_accepted("out", engine.asnumpy(out), repeated(want_out, axis, row))
    assert_accepted("lse", engine.asnumpy(res.lse), repeated(want_lse, axis // 2, row))
    stored = engine.asnumpy(out).take(np.arange(q.shape[axis]), axis)
    wanted = expected_backward(q, k, v, stored, dout, None, **oracle)
    for name, want, index in zip("qkv", wanted, (row, key, key), strict=True):
        got = engine.asnumpy(getattr(grads, f"d{name}"))
        assert_accepted(f"d{name}", got, repeated(want, axis, index))


def test_bc23_a_large_batch_of_single_tokens_is_exact(engine):
    """Dao-AILab/flash-attention#2260 and #1500: out is v, dv is dout, the others nearly 0."""
    entry = np.arange(8300) % 7
    heads, dim = (2, 16) if engine.name == "numpy" else (16, 128)
    q, k, v, dout = draw(*[(7, 1, heads, dim)] * 4, dtype="bfloat16")
    held = [engine.asarray(each[entry]) for each in (q, k, v, dout)]
    out, res = cuattn.attention_forward(*held[:3])
    grads = cuattn.attention_backward(res, held[3])
    got = [engine.asnumpy(each) for each in (grads.dq, grads.dk, grads.dv)]
    assert same_bits(engine.asnumpy(out), v[entry])
    assert same_bits(got[2], dout[entry])
    oracle = {"band": Band(-1, 1), "softmax_scale": dim**-0.5}
    wanted = expected_backward(q, k, v, v, dout, None, **oracle)
    for name, each, want in zip(("dq", "dk"), got, wanted, strict=False):
        assert_accepted(name, each, repeated(want, 0, entry))


# Grouped heads -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("heads", "dim_v"), [((6, 2), 32), ((12, 3), 24), ((8, 1), 32), ((5, 5), 8)]
)
def test_bc31_a_key_head_gathers_the_gradients_of_its_group(engine, heads, dim_v, dtype):
    """XunhaoLai/native-sparse-attention-triton#27, marin-community/levanter#449."""
    dtype = dtype_within(engine, dtype)
    heads_q, heads_kv = heads
    q, k, v = draw(
        (2, 23, heads_q, 32), (2, 37, heads_kv, 32), (2, 37, heads_kv, dim_v), dtype=dtype
    )
    q *= np.linspace(0.5, 2, heads_q)[:, None].astype(q.dtype)  # so that no two are alike
    check_arrays(engine, *map(engine.asarray, (q, k, v)), causal=True)


@pytest.mark.parametrize("heads", [(6, 4, 4), (2, 4, 4), (3, 0, 0), (4, 2, 4)])
def test_bc32_heads_that_do_not_divide_are_refused_by_name(engine, heads):
    """Dao-AILab/flash-attention#362."""
    q, k, v = map(engine.asarray, draw(*[(1, 9, each, 16) for each in heads]))
    name = "v" if heads[1] != heads[2] else "k"
    refused(cuattn.ArgumentError, name, "heads", run=lambda: cuattn.attention(q, k, v))


@pytest.mark.parametrize("seqlen_k", [300, 1, 65])
def test_bc41_one_query_has_an_lse_in_every_head(engine, seqlen_k):
    """NVIDIA/cudnn-frontend#1083."""
    asked = problem(engine, "bfloat16", 1, (1, seqlen_k), (8, 2), (128, 128), **CAUSAL)
    with new_memory_is_nan(engine):
        check_both(engine, asked)


# Odd sizes -----------------------------------------------------------------------------------

ODD = (*range(1, 18), 31, 32, 33, 47, 63, 64, 65, 95, 127, 128, 129, 191, 192, 193, 255, 256, 257)


def test_bc51_every_length_is_right_and_the_second_call_the_same(engine):
    """jax-ml/jax#23819 and #27224, 66RING/tiny-flash-attention#12; BC-80 without a mask."""
    pairs = [*zip(ODD, ODD, strict=True), *zip(ODD[::3], ODD[::-3], strict=True)]
    dtypes, causal = itertools.cycle(engine.dtypes), itertools.cycle((False, True, True))
    for lengths, dtype, options in zip(pairs, dtypes, causal, strict=False):
        options = CAUSAL if options else {}
        arrays = qkv(*lengths, heads_kv=1, head_dim=32, dtype=dtype)
        with new_memory_is_nan(engine):
            out, lse, *_ = check_arrays(engine, *map(engine.asarray, arrays), **options)
            again = run(engine, *arrays, **options)
        assert all(map(same_bits, (out, lse), again))
