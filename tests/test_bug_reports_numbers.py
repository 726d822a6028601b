"""What others' users reported of attention kernels, as tests here: values, gradients, accuracy.

As in ``test_bug_reports.py``, by number of the report.
"""

import numpy as np
import pytest
from calls import (
    check_backward,
    draw,
    gradients,
    like_lse,
    qkv,
    run,
    same_bits,
)
from checked import CAUSAL, call, check_arrays, dtype_within, new_memory_is_nan, problem
from compare import assert_backward, assert_forward
from strategies import dtype_of

import cuattn
from cuattn.cpu import reference
from cuattn.planning.problem import Band

# Scores of any size --------------------------------------------------------------------------


def test_bc02_where_all_scores_are_equally_low_the_row_is_the_mean(engine):
    """pytorch/pytorch#109517 and #110213, without a bias: one feature hides keys, as it would."""
    dtype = dtype_within(engine, "float32", "bfloat16", "float64")
    q, k, v = qkv(141, 141, head_dim=64, dtype=dtype, batch=2)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :128, :, 0] = -3e37
    q[:, 5], k[:, :, :, 1:] = 0, k[:, :, :, 1:] / k.dtype.type(8)
    out, lse = run(engine, q, k, v, softmax_scale=1.0)
    assert_forward(out, lse, q, k, v, band=Band(-141, 141), softmax_scale=1.0)
    assert np.array_equal(np.rint(np.exp(lse[:, :, 5])), np.full((2, 2), 141))


def test_bc05_leading_tiles_of_scores_of_minus_infinity_leave_no_trace(engine):
    """pytorch/pytorch#127055, without a bias. tf32x3 promises NaN for infinite elements."""
    wanted = ("float32",) if engine.name == "numpy" else ("bfloat16", "float64")
    dtype = next((each for each in wanted if each in engine.dtypes), "float64")
    q, k, v = qkv(40, 600, head_dim=16, dtype=dtype)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :500, :, 0] = -np.inf
    out, lse = run(engine, q, k, v)
    seen = slice(500, 600)
    oracle = {"band": Band(-999, 999), "softmax_scale": 0.25}
    assert_forward(out, lse, q, k[:, seen], v[:, seen], **oracle)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("lengths", "low", "causal"),
    [
        ((1, 128), -1024, False),
        *(((n, n), -960, causal) for n in (64, 192, 320, 100) for causal in (False, True)),
    ],
)
def test_bc43_an_lse_far_below_zero_keeps_gradients_right(engine, dtype, lengths, low, causal):
    """NVIDIA/cudnn-frontend#1072 and #262, pytorch/pytorch#196678: every score near -120."""
    q, k, v = qkv(*lengths, 1, 1, 64, dtype=dtype_within(engine, dtype))
    for each in (q, k):
        each *= each.dtype.type(0.1)
    q[..., 0], k[..., 0] = 1, low
    _, lse, *grads = check_arrays(engine, *map(engine.asarray, (q, k, v)), causal=causal)
    assert lse.max() < -88.8  # exp(-lse) overflows float32
    assert all(np.isfinite(each.astype(np.float64)).all() for each in grads)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float16", 64), ("bfloat16", 64), ("float16", 128), ("bfloat16", 128)]
)
def test_bc71_errors_are_those_of_the_textbook_formula_or_less(engine, dtype, head_dim, causal):
    """Dao-AILab/flash-attention#1071, #145 and #434: twice its largest and its mean error."""
    seqlen, size = 512 if engine.name == "numpy" else 2048, 2 if causal else 1
    q, k, v = qkv(seqlen, seqlen, 1, 1, head_dim, dtype=dtype)
    q, k = q * q.dtype.type(size), k * k.dtype.type(size)
    oracle = {"band": Band(-seqlen, 0 if causal else seqlen), "softmax_scale": head_dim**-0.5}
    exact, _ = reference.forward(q, k, v, **oracle)
    error = run(engine, q, k, v, causal=causal)[0].astype(np.float64) - exact
    textbook = textbook_attention(q, k, v, **oracle).astype(np.float64) - exact
    for norm in (lambda x: np.abs(x).max(), lambda x: np.sqrt((x**2).mean())):
        assert norm(error) <= 2 * norm(textbook)


def textbook_attention(q, k, v, band, softmax_scale):
    """One head, scores and sums in float32, the weights rounded as the result is."""
    wide = np.float32
    scores = q[0, :, 0].astype(wide) @ k[0, :, 0].astype(wide).T * wide(softmax_scale)
    scores[~reference.visible_pairs(band, *scores.shape)] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = (weights / weights.sum(axis=1, keepdims=True)).astype(q.dtype).astype(wide)
    return (weights @ v[0, :, 0].astype(wide)).astype(q.dtype)[None, :, None]


# lse -----------------------------------------------------------------------------------------


def test_bc38_lse_is_the_natural_log_in_its_own_shape_and_dtype(engine):
    """pytorch/pytorch#181645 and #187899, Dao-AILab/flash-attention#876; every dtype."""
    for dtype in engine.dtypes:
        q, k, v = qkv(30, 45, 4, 2, 64, dtype=dtype, batch=2)
        _, lse = run(engine, q, k, v)
        assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert lse.shape == (2, 4, 30)
        assert_forward(None, lse, q, k, v, band=Band(-99, 99), softmax_scale=0.125)
        # In base 2 it would be a third larger or smaller: beyond any rounding.
        scores = np.einsum("bihd,bjhd->bhij", *(x.astype(float) for x in (q, k.repeat(2, 2)))) / 8
        assert np.array_equal(np.rint(lse), np.rint(np.log(np.exp(scores).sum(-1))))


@pytest.mark.parametrize("lengths", [(33, 33), (128, 200), (70, 33)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_bc40_a_gradient_flows_in_through_lse(engine, dtype, lengths):
    """Dao-AILab/flash-attention#889 and #1137, pytorch/pytorch#136232."""
    asked = problem(engine, dtype, 2, lengths, (4, 2), (32, 32), **CAUSAL)
    check_backward(engine, asked)
    q, k, v = asked.arrays()
    dout, dlse = asked.cotangents()
    with_it, without = (
        gradients(engine, q, k, v, dout, each, deterministic=True, **CAUSAL)
        for each in (dlse, None)
    )
    assert not np.array_equal(with_it[0], without[0])
    assert not np.array_equal(with_it[1], without[1])
    assert np.array_equal(with_it[2], without[2])
    assert not with_it[0][:, : max(0, lengths[0] - lengths[1])].any()


# Same bits -----------------------------------------------------------------------------------


def test_bc49_a_deterministic_backward_repeats_its_bits_with_other_work_between(engine):
    """Dao-AILab/flash-attention#2244, #746 and #414."""
    batch, times = (2, 4) if engine.name == "numpy" else (3, 12)
    dtype = dtype_within(engine, "bfloat16")
    q, k, v = map(engine.asarray, qkv(257, 257, 6, 2, 64, dtype=dtype, batch=batch))
    (dout,) = map(engine.asarray, draw(q.shape, dtype=dtype))
    other = list(map(engine.asarray, qkv(90, 130, 2, 2, 64, dtype=dtype)))
    first = None
    for _ in range(times):
        results = call(q, k, v, dout, causal=True, deterministic=True)
        results = list(map(engine.asnumpy, results))
        first = first or results
        assert all(map(same_bits, first, results))
        with new_memory_is_nan(engine):
            call(*other, other[0])


@pytest.mark.parametrize("spoilt", [np.nan, np.inf, 6e4])
def test_bc53_a_call_does_not_depend_on_the_numbers_of_those_before(engine, spoilt):
    """flashinfer-ai/flashinfer#1046: of the same and of other shapes, forward and backward."""
    dtype = dtype_within(engine, "float16")
    q, k, v, dout = map(
        engine.asarray, draw((2, 75, 4, 64), *[(2, 90, 2, 64)] * 2, (2, 75, 4, 64), dtype=dtype)
    )
    first = list(map(engine.asnumpy, call(q, k, v, dout, deterministic=True, **CAUSAL)))
    for batch, seqlen_q, seqlen_k, dim in ((2, 75, 90, 64), (3, 130, 257, 128), (1, 1, 300, 64)):
        bad_q, bad_k = (
            engine.xp.full((batch, *shape, dim), spoilt, dtype_of(dtype))
            for shape in ((seqlen_q, 4), (seqlen_k, 2))
        )
        for deterministic in (None, True):
            call(bad_q, bad_k, bad_k, bad_q, deterministic=deterministic, **CAUSAL)
    again = list(map(engine.asnumpy, call(q, k, v, dout, deterministic=True, **CAUSAL)))
    assert all(map(same_bits, first, again))


# Merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 5])
def test_bc75_empty_parts_merge_to_an_empty_one_and_change_no_other(engine, count):
    """flashinfer-ai/flashinfer#4051, vllm-project/vllm#39148."""
    rng = np.random.default_rng(count)
    outs, lses = draw((count, 2, 40, 3, 16), (count, 2, 3, 40), dtype="float32")
    lses[rng.random(lses.shape) < 0.4] = -np.inf
    lses[:, :, :, :4], lses[1:, :, :, 4:8] = -np.inf, -np.inf  # no part, and only the first
    lses[0, :, :, 4:8] = np.abs(rng.standard_normal((2, 3, 4)))
    outs *= np.isfinite(lses).swapaxes(-1, -2)[..., None]
    parts = [tuple(map(engine.asarray, part)) for part in zip(outs, lses, strict=True)]
    out, lse = map(engine.asnumpy, cuattn.merge_states(parts))
    assert not out[:, :4].any()
    assert np.isneginf(lse[:, :, :4]).all()
    assert same_bits(out[:, 4:8], outs[0, :, 4:8])
    assert same_bits(lse[:, :, 4:8], lses[0, :, :, 4:8])
    assert np.array_equal(np.isneginf(lse), np.isneginf(lses).all(axis=0))
    assert not np.isnan(out).any()


def test_bc77_gradients_of_a_ring_of_unequal_chunks_add_up(engine):
    """huggingface/diffusers#14265, meta-pytorch/attention-gym#200: by the formula, not by vjp."""
    dtype = dtype_within(engine, "float32")
    dtype = dtype if dtype in ("float32", "float64") else "float32"  # 16 bits round every part
    q, k, v, dout = draw(
        (2, 30, 4, 32), (2, 90, 2, 32), (2, 90, 2, 32), (2, 30, 4, 32), dtype=dtype
    )
    oracle = {"band": Band(-99, 99), "softmax_scale": 32**-0.5}
    whole, whole_lse = run(engine, q, k, v)
    dq, dk, dv = 0, [], []
    for chunk in (slice(0, 17), slice(17, 64), slice(64, 90)):
        out, lse = run(engine, q, k[:, chunk], v[:, chunk])
        share = np.exp(lse - whole_lse)
        dlse = share * ((out - whole) * dout).sum(-1).swapaxes(1, 2)
        part = dout * share.swapaxes(1, 2)[..., None].astype(q.dtype)
        grads = gradients(engine, q, k[:, chunk], v[:, chunk], part, like_lse(q, dlse))
        dq = dq + grads[0]
        dk.append(grads[1])
        dv.append(grads[2])
    summed = dq, np.concatenate(dk, axis=1), np.concatenate(dv, axis=1)
    assert_backward(summed, q, k, v, whole, dout, None, **oracle)


# Decoding ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [np.nan, np.inf])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_bc81_what_lies_past_the_length_of_a_sequence_reaches_nothing(engine, seqlen_q, fill):
    """Dao-AILab/flash-attention#1745 and #2374, vllm-project/vllm#641 and #43961; BC-03, BC-37.

    A cache of sequences of unequal lengths, each attended to by its slice.
    """
    dtype, lengths = dtype_within(engine, "bfloat16"), (3, 4, 17, 64, 65)
    q, k, v = draw((5, seqlen_q, 8, 64), *[(5, 80, 2, 64)] * 2, dtype=dtype)
    for i, length in enumerate(lengths):
        k[i, length:] = v[i, length:] = fill
    held = list(map(engine.asarray, (q, k, v)))
    for i, length in enumerate(lengths):
        one = held[0][i : i + 1], *(each[i : i + 1, :length] for each in held[1:])
        with new_memory_is_nan(engine):
            check_arrays(engine, *one, causal=True)


@pytest.mark.parametrize(
    ("lengths", "heads"), [((1024, 1024), (4, 4)), ((3000, 1, 777), (8, 1)), ((1, 2000), (4, 2))]
)
def test_bc82_every_one_of_several_long_sequences_is_written(engine, lengths, heads):
    """pytorch/pytorch#194167, Dao-AILab/flash-attention#1455, vllm-project/vllm#15113."""
    dtype, longest = dtype_within(engine, "bfloat16"), max(lengths)
    q, k, v = draw(
        (len(lengths), 1, heads[0], 64), *[(len(lengths), longest, heads[1], 64)] * 2, dtype=dtype
    )
    held = list(map(engine.asarray, (q, k, v)))
    for i, length in enumerate(lengths):
        one = held[0][i : i + 1], *(each[i : i + 1, :length] for each in held[1:])
        with new_memory_is_nan(engine):
            check_arrays(engine, *one, causal=True)
    if len(set(lengths)) == 1:
        with new_memory_is_nan(engine):
            check_arrays(engine, *held, causal=True)


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("lengths", [(1, 20), (1, 1), (20, 1), (1, 4097)])
def test_bc84_a_single_query_or_a_single_key_is_right(engine, lengths, head_dim):
    """triton-lang/kernels#6, Dao-AILab/flash-attention#334."""
    # The oracle takes long for many keys, in float64 above all.
    is_long = max(lengths) > 1000
    heads, batch = ((2, 1), 1) if is_long else ((4, 2), 2)
    for dtype in engine.dtypes[: 1 if is_long and head_dim > 16 else None]:
        q, k, v = qkv(*lengths, *heads, head_dim, dtype=dtype, batch=batch)
        q, k = q * q.dtype.type(3), k * k.dtype.type(3)
        check_arrays(engine, *map(engine.asarray, (q, k, v)), causal=lengths[0] == 1)


@pytest.mark.parametrize("length", [5, 64, 65, 300])
def test_bc85_a_slice_of_a_cache_gives_what_the_whole_prefill_gives(engine, length):
    """Dao-AILab/flash-attention#1417, #1569 and #1402: queries are the last positions."""
    dtype = dtype_within(engine, "bfloat16")
    q, k, v = qkv(length, length, 4, 2, 64, dtype=dtype)
    cache = [np.full((1, 1024, 2, 64), np.nan, each.dtype) for each in (k, v)]
    for whole, part in zip(cache, (k, v), strict=True):
        whole[:, :length] = part
    held = list(map(engine.asarray, cache))
    scale = {"softmax_scale": 0.125}
    whole = run(engine, q, k, v, causal=True)
    assert_forward(*whole, q, k, v, band=Band(-length, 0), **scale)
    for chunk in (1, 2, 5):
        last = np.ascontiguousarray(q[:, length - chunk :])
        out, lse = cuattn.attention(
            *(engine.asarray(last), *(each[:, :length] for each in held)),
            **(CAUSAL | {"return_lse": True}),
        )
        band = Band(-length, length - chunk)
        assert_forward(engine.asnumpy(out), engine.asnumpy(lse), last, k, v, band=band, **scale)


def test_bc85_a_prefill_in_chunks_is_one_causal_pass(engine):
    """Chunks of every size, each at its position."""
    dtype = dtype_within(engine, "bfloat16")
    q, k, v = qkv(90, 90, 4, 2, 64, dtype=dtype)
    held, ends = list(map(engine.asarray, (q, k, v))), (1, 3, 10, 60, 61, 90)
    outs, lses = [], []
    for begin, end in zip((0, *ends), ends, strict=False):
        out, lse = cuattn.attention(
            *(held[0][:, begin:end], *(each[:, :end] for each in held[1:])),
            causal=True,
            q_offset=begin,
            return_lse=True,
        )
        outs.append(engine.asnumpy(out))
        lses.append(engine.asnumpy(lse))
    out, lse = np.concatenate(outs, axis=1), np.concatenate(lses, axis=2)
    assert_forward(out, lse, q, k, v, band=Band(-90, 0), softmax_scale=0.125)
