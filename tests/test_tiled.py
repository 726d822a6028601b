"""What is particular to the CPU engine: tiles, batches, threads, memory, strides."""

from __future__ import annotations

import tracemalloc
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
import pytest
from compare import assert_backward, assert_forward
from cpu_calls import backward, check, forward, problem_of, random

import cuattn
from cuattn.cpu import heads, tiled
from cuattn.planning.problem import Band

Array = np.ndarray[Any, Any]
BANDS = {
    "dense": Band(-999, 999),
    "causal": Band(-999, 0),
    "bottom right": Band(-999, -30),
    "window": Band(-40, 12),
    "window off the end": Band(90, 130),
    "nothing": Band(500, 900),
}


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_many_tiles_obey_the_rule(dtype: str, band: Band) -> None:
    q, k, v, dout = random(
        (2, 130, 4, 20), (2, 150, 2, 20), (2, 150, 2, 9), (2, 130, 4, 9), dtype=dtype
    )
    (dlse,) = random((2, 4, 130), dtype="float64" if dtype == "float64" else "float32")
    check(q, k, v, band, dout, dlse)


@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_zero_size_axes(shape: tuple[int, int, int]) -> None:
    batch, seqlen_q, seqlen_k = shape
    q, k, v, dout = random(
        (batch, seqlen_q, 2, 8),
        (batch, seqlen_k, 1, 8),
        (batch, seqlen_k, 1, 4),
        (batch, seqlen_q, 2, 4),
    )
    check(q, k, v, Band(-999, 999), dout, None)


def test_zero_heads() -> None:
    q, k, v = random((2, 5, 0, 8), (2, 5, 0, 8), (2, 5, 0, 8))
    forward(q, k, v, Band(-9, 9))
    backward(q, k, v, Band(-9, 9), None, None)


@pytest.mark.usefixtures("small_tiles")
def test_absent_tiles_are_not_read() -> None:
    """Windowed: NaN in keys that only absent tiles hold reaches nothing."""
    q, k, v, dout = random(*[(1, 96, 2, 16)] * 4)
    band = Band(0, 999)  # row i sees keys from i on: the first query tiles see all, the last few
    clean = forward(q, k, v, band)
    k[:, :10], v[:, :10] = np.nan, np.inf
    out, lse = forward(q, k, v, band)
    late = slice(64, None)  # query tile 2 begins at row 64: its first key tile is 48..95
    assert np.array_equal(out[:, late], clean[0][:, late])
    assert np.array_equal(lse[:, :, late], clean[1][:, :, late])
    dq, _, _ = backward(q, k, v, band, dout, None)
    assert dq is not None
    assert np.isfinite(dq[:, late]).all()


def test_empty_rows_and_unseen_keys_spoil_nothing() -> None:
    q, k, v, dout = random((1, 20, 1, 8), (1, 30, 1, 8), (1, 30, 1, 8), (1, 20, 1, 8))
    band = Band(-15, -6)  # rows 0..5 see nothing, keys 14.. are seen by nothing
    (dlse,) = random((1, 1, 20))
    clean = (*forward(q, k, v, band), *backward(q, k, v, band, dout, dlse))
    q[:, :6], dout[:, :6], dlse[:, :, :6] = np.nan, np.inf, np.nan
    k[:, 14:], v[:, 14:] = np.inf, np.nan
    spoiled = (*forward(q, k, v, band), *backward(q, k, v, band, dout, dlse))
    for before, after in zip(clean, spoiled, strict=True):
        assert np.array_equal(before, after)


def test_nan_scores_make_their_rows_nan_without_warnings() -> None:
    q, k, v, dout = random(*[(1, 12, 1, 8)] * 4)
    q[0, 3, 0, 0] = np.nan
    q[0, 5] = np.inf
    with np.errstate(all="raise"):
        out, lse = forward(q, k, v, Band(-99, 99))
        dq, dk, _ = backward(q, k, v, Band(-99, 99), dout, None)
    bad = np.isin(np.arange(12), (3, 5))
    assert np.isnan(out[0, bad]).all()
    assert np.isnan(lse[0, 0, bad]).all()
    assert np.isfinite(out[0, ~bad]).all()
    assert dq is not None
    assert dk is not None
    assert np.isfinite(dq[0, ~bad]).all()
    assert np.isnan(dk).all()


@pytest.mark.parametrize("offset", [-600.0, 600.0])
def test_scores_far_from_zero_neither_overflow_nor_vanish(offset: float) -> None:
    q, k, v, dout = random(*[(1, 40, 1, 8)] * 4)
    q[..., 0], k[..., 0] = 10, offset / 2
    check(q, k, v, Band(-99, 0), dout, None)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("step", [-100.0, -3.0, 3.0, 100.0])
def test_m_follows_scores_that_drift_along_the_keys(step: float) -> None:
    """Tile by tile the scores move by a step: m waits, is raised later, at once, or never."""
    q, k, v, dout = random(*[(1, 200, 2, 8)] * 4)
    q[..., 0], k[..., 0] = 5, (step * (np.arange(200) // heads.BLOCK_N))[:, None]
    check(q, k, v, Band(-999, 999), dout, None)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("level", [-300.0, 0.0, 300.0])
def test_a_row_whose_first_scores_are_all_inf_starts_later(level: float) -> None:
    q, k, v = random(*[(1, 200, 1, 8)] * 3)
    q[..., 0], k[..., 0] = 5, level
    k[:, : 2 * heads.BLOCK_N, :, 0] = -np.inf
    out, lse = forward(q, k, v, Band(-999, 999))
    assert_forward(out, lse, q, k, v, band=Band(-999, 999), softmax_scale=0.2)
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("size", [30.0, 1e3, 1e5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_the_backward_are_those_of_the_forward(dtype: str, size: float) -> None:
    """Where one key outweighs all others its weight is 1 to the last bit, at scores to 1e11."""
    q, k, v, dout = random(*[(1, 700, 2, 64)] * 4, dtype=dtype)
    k = q + k / 4  # each row's own key is the nearest by far
    q, k = q * q.dtype.type(size), k * k.dtype.type(size)
    band = Band(-999, 999)
    assert np.array_equal(forward(q, k, v, band)[0], v)
    assert np.array_equal(backward(q, k, v, band, dout, None)[2], dout)


@pytest.mark.parametrize("sizes", [(1e20, 1e-20), (1e-20, 1e20)])
def test_the_scale_multiplies_scores_and_not_one_of_their_factors(
    sizes: tuple[float, float],
) -> None:
    q, k, v = random(*[(1, 7, 2, 8)] * 3)
    q[...], k[...] = sizes
    outs = [cuattn.attention(q, k, v, softmax_scale=scale) for scale in (1e20, 0)]
    assert np.array_equal(*outs)  # equal scores, of 8e20 and of 0


def test_only_what_is_asked() -> None:
    q, k, v, dout = random(*[(1, 20, 2, 8)] * 4)
    whole = backward(q, k, v, Band(-99, 0), dout, None)
    for wrt in (("q",), ("k",), ("v",), ("q", "v"), ("k", "v")):
        some = backward(q, k, v, Band(-99, 0), dout, None, wrt)
        for name, full, part in zip("qkv", whole, some, strict=True):
            if name in wrt:
                assert np.array_equal(full, part)
            else:
                assert part is None


def strided(a: Array, kind: str) -> Array:
    """The same values in other memory."""
    if kind == "negative":
        return np.ascontiguousarray(a[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    if kind == "transposed":
        return np.ascontiguousarray(a.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0)
    if kind == "unaligned":
        raw = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
        raw[...] = a
        assert not raw.flags.aligned
        return raw
    assert kind == "readonly"
    copy = a.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize("kind", ["negative", "transposed", "unaligned", "readonly"])
def test_any_strides_alignment_and_writability(kind: str) -> None:
    arrays = random((2, 30, 4, 8), (2, 25, 2, 8), (2, 25, 2, 6), (2, 30, 4, 6))
    band = Band(-999, 0)
    q, k, v, dout = (strided(a, kind) for a in arrays)
    plain = (*forward(*arrays[:3], band), *backward(*arrays[:3], band, arrays[3], None))
    other = (*forward(q, k, v, band), *backward(q, k, v, band, dout, None))
    for a, b in zip(plain, other, strict=True):
        assert np.array_equal(a, b)


def test_broadcast_inputs() -> None:
    q, k, v, dout = random((1, 30, 1, 8), (1, 1, 1, 8), (1, 25, 1, 6), (1, 1, 1, 1))
    q, k, v, dout = (
        np.broadcast_to(a, shape)
        for a, shape in (
            (q, (2, 30, 4, 8)),
            (k, (2, 25, 2, 8)),
            (v, (2, 25, 2, 6)),
            (dout, (2, 30, 4, 6)),
        )
    )
    check(q, k, v, Band(-999, 999), dout, None)


def test_writes_only_its_results_and_leaves_inputs_alone() -> None:
    """Every output is every second element of a sentinel field; the others stay."""
    q, k, v, dout = random(*[(2, 30, 2, 8)] * 4)
    before = [a.copy() for a in (q, k, v, dout)]
    band = Band(-999, 0)
    problem, wrt = problem_of(q, k, v, band), problem_of(q, k, v, band, ("q", "k", "v"))
    fields = [np.full((2, 60, 4, 16), 9, np.float32) for _ in range(4)]
    out, dq, dk, dv = (field[:, ::-2, 1::2, ::2] for field in fields)
    lse = np.empty((2, 2, 30), np.float32)
    tiled.forward(problem, q, k, v, out, lse)
    tiled.backward(wrt, q, k, v, out, lse, dout, None, dq=dq, dk=dk, dv=dv)
    given = {"band": band, "softmax_scale": 0.2}
    assert_forward(out, lse, q, k, v, **given)
    assert_backward((dq, dk, dv), q, k, v, out, dout, None, **given)
    for field, written in zip(fields, (out, dq, dk, dv), strict=True):
        written[...] = 9
        assert (field == 9).all()
    for a, b in zip(before, (q, k, v, dout), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_is_linear_and_bounded(dtype: str) -> None:
    """A window keeps it quick; scores of 4096 x 4096 alone would be 64 MiB a head."""
    q, k, v, dout = random(*[(1, 4096, 8, 64)] * 4, dtype=dtype)
    band = Band(-64, 0)
    out, lse = forward(q, k, v, band)
    gradients = [np.empty_like(a) for a in (q, k, v)]
    tracemalloc.start()
    tiled.forward(problem_of(q, k, v, band), q, k, v, out, lse)
    dq, dk, dv = gradients
    wrt = problem_of(q, k, v, band, ("q", "k", "v"))
    tiled.backward(wrt, q, k, v, out, lse, dout, None, dq=dq, dk=dk, dv=dv)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
