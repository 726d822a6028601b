"""The reference against a spelled-out loop and finite differences: what all else rests on."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cuattn.cpu import reference
from cuattn.planning.problem import Band

SHAPES = {
    "dense": (5, 7, 2, 2, Band(-99, 99)),
    "gqa": (4, 6, 4, 2, Band(-99, 99)),
    "causal, top left": (5, 7, 2, 1, Band(-99, 0)),
    "causal, bottom right": (5, 8, 2, 1, Band(-99, 3)),
    "window with empty rows": (9, 4, 2, 1, Band(-1, 1)),
    "nothing visible": (3, 3, 1, 1, Band(5, 9)),
}


def arrays(name: str, seed: int = 0) -> tuple[tuple[np.ndarray, ...], Band]:
    seqlen_q, seqlen_k, heads_q, heads_kv, band = SHAPES[name]
    rng = np.random.default_rng(seed)
    q, k = (
        rng.standard_normal((2, seqlen_q, heads_q, 3)),
        rng.standard_normal((2, seqlen_k, heads_kv, 3)),
    )
    v = rng.standard_normal((2, seqlen_k, heads_kv, 4))
    dout = rng.standard_normal((2, seqlen_q, heads_q, 4))
    dlse = rng.standard_normal((2, heads_q, seqlen_q))
    return (q, k, v, dout, dlse), band


def spelled_out(q, k, v, band, scale):
    """The definition with no matrix at all."""
    batch, seqlen_q, heads_q, dim = q.shape
    group_size = heads_q // k.shape[2]
    out = np.zeros((batch, seqlen_q, heads_q, v.shape[3]))
    lse = np.full((batch, heads_q, seqlen_q), -math.inf)
    for b in range(batch):
        for h in range(heads_q):
            for i in range(seqlen_q):
                weights = {}
                for j in range(k.shape[1]):
                    if band.lower <= j - i <= band.upper:
                        score = sum(q[b, i, h, d] * k[b, j, h // group_size, d] for d in range(dim))
                        weights[j] = math.exp(scale * score)
                if weights:
                    total = sum(weights.values())
                    lse[b, h, i] = math.log(total)
                    for j, weight in weights.items():
                        out[b, i, h] += weight / total * v[b, j, h // group_size]
    return out, lse


@pytest.mark.parametrize("name", SHAPES)
def test_forward_is_the_spelled_out_loop(name: str) -> None:
    (q, k, v, _, _), band = arrays(name)
    out, lse = reference.forward(q, k, v, band=band, softmax_scale=0.7)
    want_out, want_lse = spelled_out(q, k, v, band, 0.7)
    np.testing.assert_allclose(out, want_out, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_finite_differences(name: str) -> None:
    (q, k, v, dout, dlse), band = arrays(name)

    def loss(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> float:
        out, lse = reference.forward(q, k, v, band=band, softmax_scale=0.7)
        return float((out * dout).sum() + (np.where(np.isfinite(lse), lse, 0) * dlse).sum())

    gradients = reference.backward(q, k, v, dout, dlse, band=band, softmax_scale=0.7)
    step = 1e-6
    for place, gradient in enumerate(gradients):
        numeric = np.zeros_like(gradient)
        for index in np.ndindex(gradient.shape):
            ends = []
            for sign in (1, -1):
                moved = [q.copy(), k.copy(), v.copy()]
                moved[place][index] += sign * step
                ends.append(loss(*moved))
            numeric[index] = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-8)


def test_cotangents_are_optional_and_add_up() -> None:
    (q, k, v, dout, dlse), band = arrays("gqa")
    both = reference.backward(q, k, v, dout, dlse, band=band, softmax_scale=0.7)
    first = reference.backward(q, k, v, dout, None, band=band, softmax_scale=0.7)
    second = reference.backward(q, k, v, None, dlse, band=band, softmax_scale=0.7)
    for whole, one, other in zip(both, first, second, strict=True):
        np.testing.assert_allclose(whole, one + other, rtol=1e-12, atol=1e-14)


def test_empty_rows_give_zero_and_spoil_nothing() -> None:
    (q, k, v, dout, dlse), band = arrays("window with empty rows")
    clean = reference.backward(q, k, v, dout, dlse, band=band, softmax_scale=0.7)
    q[:, 6:], dout[:, 6:], dlse[:, :, 6:] = np.nan, np.inf, np.nan
    out, lse = reference.forward(q, k, v, band=band, softmax_scale=0.7)
    assert not out[:, 6:].any()
    assert np.isneginf(lse[:, :, 6:]).all()
    spoiled = reference.backward(q, k, v, dout, dlse, band=band, softmax_scale=0.7)
    assert not spoiled[0][:, 6:].any()
    for before, after in zip(clean, spoiled, strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-12, atol=1e-14)


def test_nan_score_makes_its_row_nan_and_no_other() -> None:
    (q, k, v, _, _), band = arrays("causal, top left")
    k[0, 3, 0, 1] = np.nan
    v[1, 4, 0, 2] = np.inf
    out, lse = reference.forward(q, k, v, band=band, softmax_scale=0.7)
    assert np.isnan(out[0, 3:]).all()
    assert np.isnan(lse[0, :, 3:]).all()
    assert np.isfinite(out[0, :3]).all()
    assert np.isfinite(out[1, :4]).all()
    assert np.isinf(out[1, 4, :, 2]).all()


def test_longdouble_is_computed_in_longdouble() -> None:
    (q, k, v, _, _), band = arrays("dense")
    out, _ = reference.forward(q, k, v, band=band, softmax_scale=0.7, dtype=np.longdouble)
    assert out.dtype == np.longdouble
    double, _ = reference.forward(q, k, v, band=band, softmax_scale=0.7)
    difference = np.abs(out - double).max()
    assert 0 < difference < 1e-15
