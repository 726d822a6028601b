"""The one tolerance rule: how far a result may be from the exact one, derived and never hand-set.

Per (batch, head, block of at most 128 rows), with everything taken over the block:

    max|x - ref| <= max(2 * max|low - ref|, max(luck)) + 4 * eps * max(sum of |terms|) + max(unit)

ref   the dense formula in float64 (longdouble for float64 inputs)
low   the dense formula as a good kernel rounds it: q k^T, softmax and every sum in the accumulator
      dtype, sums in their order as a thread takes them (a library's many partial sums are more
      exact than any kernel's), weights, dS and dout rounded to the inputs' dtype, the result not
      yet rounded; its backward reads the same stored, rounded out as the one that is
      judged, so |low - ref| splits into low's own part (twice) and the part that the stored out
      brings along (once)
luck  low is one draw of the roundings to 16 bits, and one in which the largest weight of a row, 1,
      is exact. Where few elements decide it may be a lucky one. Four standard deviations of the sum
      of these roundings, each evenly spread over half a unit to either side, or all of them in one
      direction where that is less. Of many elements the largest |low - ref| is more than half that.
      A unit is never less than that of the dtype's smallest normal number
unit  half of one in the last place of the result's own dtype, to which it is rounded once
eps   of the accumulator dtype; twice that where sums are rounded towards zero, as tensor cores
      round them: there the error of one addition is a whole unit in the last place, not half
terms what the result is a sum of, in magnitude, and what the errors of the scores add to it. A
      score is a sum of A = softmax_scale * |q| |k|^T, lse = m + ln(l) of
      L = 1 + |lse| + rowsum(P A). Let a be a quarter of A, and b one of A + L, for weights that
      are recomputed from lse.
      out: P (1 + a) |v| + rowsum(P a) |out|. dv: (P (1 + b))^T |dout|. dq, dk:
      softmax_scale * |dS| |k|, |dS|^T |q|, where |dS| stands for
      P (|dout| |v|^T + rowsum(|dout| |out|) + |dlse| + b |dP - delta + dlse|)

The scores' errors are in low too, but where few rows or head dims are compared, or one large score
decides, low may be lucky. Sums of many equal terms are outside of the rule: their roundings are
equal too, so that errors grow with the number of terms and not with its root.

Non-finite values must be the same non-finite values in the same places, judged after rounding the
reference to the result's dtype; they are then left out of every maximum.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuattn._typing import ACCUMULATOR
from cuattn.cpu import reference
from cuattn.planning.problem import Band

Array = NDArray[Any]

#: What the error of a score counts beside a term: d roundings of either sign add up to far less
#: than d of them. With 1, no sum in whatever order came near a third of the bound (measured).
SCORE_SHARE = 0.25

#: Standard deviations that are granted: one element in 16,000 of a correct kernel is further off.
LUCK = 4.0

#: Rows that share one maximum: few enough that a fault in late rows cannot hide behind early ones.
BLOCK_ROWS = 128


@dataclass(frozen=True, eq=False)
class Expected:
    """What one result must be.

    Attributes
    ----------
    value : array
        The reference, unrounded.
    bound : array, broadcastable to ``value``
        The largest |x - value| allowed, equal within a block.
    dtype : dtype
        The dtype the result is stored in.
    """

    value: Array
    bound: Array
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class Comparison:
    """How a result compares.

    Attributes
    ----------
    ratio : float
        Largest error over its bound; at most 1 is accepted. inf where a NaN or Inf is misplaced.
    error, bound : float
        Of the element that gave ``ratio``.
    index : tuple of int
        Where that element is.
    """

    ratio: float
    error: float
    bound: float
    index: tuple[int, ...]

    @property
    def accepted(self) -> bool:
        return self.ratio <= 1.0


def compare(actual: Array, expected: Expected) -> Comparison:
    """Judge a result, NumPy array of the reference's shape, by the rule."""
    with np.errstate(over="ignore", invalid="ignore"):
        stored = expected.value.astype(expected.dtype).astype(expected.value.dtype)
        x = actual.astype(expected.value.dtype)
        error = np.abs(x - expected.value)
    finite = np.isfinite(stored)
    same = np.where(finite, np.isfinite(x), (x == stored) | (np.isnan(x) & np.isnan(stored)))
    error = np.where(same, np.where(finite, error, 0.0), np.inf)
    if error.size == 0:
        return Comparison(0.0, 0.0, 0.0, ())
    bound = np.broadcast_to(expected.bound, error.shape)
    ratio = np.divide(error, bound, out=np.full_like(error, np.inf), where=bound > 0)
    ratio[error == 0] = 0.0
    worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
    index = tuple(int(i) for i in worst)
    return Comparison(float(ratio[index]), float(error[index]), float(bound[index]), index)


def _block_max(a: Array, row_axis: int, other_axis: int | None) -> Array:
    """Largest finite value of each block of rows (and of all of the other axis), at every row."""
    a = np.where(np.isfinite(a), a, 0)
    if other_axis is not None:
        a = a.max(axis=other_axis, keepdims=True, initial=0)
    starts = np.arange(0, a.shape[row_axis], BLOCK_ROWS)
    if starts.size == 0:
        return a
    peaks = np.maximum.reduceat(a, starts, axis=row_axis)
    return np.repeat(peaks, BLOCK_ROWS, axis=row_axis).take(
        np.arange(a.shape[row_axis]), axis=row_axis
    )


def _expected(
    value: Array,
    low: Array,
    terms: Array,
    dtype: DTypeLike,
    eps: float,
    *,
    luck: Array | float = 0.0,
    from_stored: Array | None = None,
) -> Expected:
    """The rule. 4-D arrays have their rows in axis 1, lse in its last.

    ``from_stored`` is the exact result of rounded intermediates that were given: nothing that
    reads them can be nearer to ``value``, and low is only responsible for what it adds.
    """
    row_axis, other_axis = (1, 3) if value.ndim == 4 else (2, None)
    attainable = value if from_stored is None else from_stored
    with np.errstate(over="ignore", invalid="ignore"):
        low_error = np.abs(low.astype(value.dtype) - attainable)
        inherited_error = np.abs(attainable - value)
        rounded_once = half_unit(dtype) * np.maximum(np.abs(value), smallest_normal(dtype))
    lucky = _block_max(np.broadcast_to(luck, value.shape), row_axis, other_axis)
    bound = np.maximum(2 * _block_max(low_error, row_axis, other_axis), lucky)
    bound += _block_max(rounded_once, row_axis, other_axis)
    bound += _block_max(inherited_error, row_axis, other_axis)
    bound += 4 * eps * _block_max(terms, row_axis, other_axis)
    return Expected(value, bound, np.dtype(dtype))


def _finfo(dtype: DTypeLike) -> Any:
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def half_unit(dtype: DTypeLike) -> float:
    """The largest relative error of rounding to a 16-bit dtype, 0 of a wider one."""
    return float(_finfo(dtype).eps) / 2 if np.dtype(dtype).itemsize == 2 else 0.0


def smallest_normal(dtype: DTypeLike) -> float:
    """Below it, rounding errs by as much as at it."""
    return float(_finfo(dtype).smallest_normal) if np.dtype(dtype).itemsize == 2 else 0.0


def luck_of(dtype: DTypeLike, magnitudes: Array, squares: Array) -> Array:
    """What the roundings to a 16-bit dtype of the terms of a sum may come to.

    ``magnitudes`` and ``squares`` are the sums of |term| and of term^2 over what is rounded.
    """
    half = half_unit(dtype)
    return np.minimum(LUCK * half * np.sqrt(squares / 3), half * magnitudes)


def in_order(a: Array, b: Array) -> Array:
    """``a b^T`` with one rounding after the other, from the first head dim to the last."""
    total = np.zeros((len(a), len(b)), a.dtype)
    for left, right in zip(a.T, b.T, strict=True):
        total += np.multiply.outer(left, right)
    return total


def _precisions(q: Array, rounds_to_zero: bool) -> tuple[np.dtype[Any], np.dtype[Any], float]:
    """Accumulator dtype, reference dtype and the accumulator's eps for these inputs."""
    accumulator = np.dtype(ACCUMULATOR[q.dtype.name])
    exact = np.dtype(np.longdouble if accumulator == np.float64 else np.float64)
    return accumulator, exact, float(np.finfo(accumulator).eps) * (2 if rounds_to_zero else 1)


def expected_forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    band: Band,
    softmax_scale: float,
    out_dtype: DTypeLike | None = None,
    rounds_to_zero: bool = False,
) -> tuple[Expected, Expected]:
    """What out and lse must be.

    Parameters
    ----------
    q, k, v : arrays in the axes (batch, seqlen, heads, dim), of one of the four dtypes
    out_dtype : dtype, optional
        The dtype of out, q's by default.
    rounds_to_zero : bool
        Whether the engine's sums do.

    Returns
    -------
    out, lse : Expected
    """
    accumulator, exact, eps = _precisions(q, rounds_to_zero)
    stored = q.dtype if out_dtype is None else out_dtype
    out, lse = reference.forward(q, k, v, band=band, softmax_scale=softmax_scale, dtype=exact)
    low_out, low_lse = reference.forward(
        q,
        k,
        v,
        band=band,
        softmax_scale=softmax_scale,
        dtype=accumulator,
        operand_dtype=q.dtype,
        product=in_order,
    )
    out_terms, lse_terms, luck = np.zeros_like(out), np.zeros_like(lse), np.zeros_like(out)
    tiny = smallest_normal(q.dtype)
    abs_v = np.abs(v.astype(exact))
    for b, h, h_kv, head in _heads(q.astype(exact), k.astype(exact), band, softmax_scale):
        with np.errstate(all="ignore"):
            lse_terms[b, h] = head.lse_terms
            P = head.P * (1 + SCORE_SHARE * head.A)
            from_scores = SCORE_SHARE * head.PA[:, None] * np.abs(out[b, :, h])
            terms = reference.visible_product(P, abs_v[b, :, h_kv], head.visible)
            out_terms[b, :, h] = terms + from_scores
            # Rounded before they are divided by l: the largest weight of a row is 1/2 or more.
            largest = head.P.max(axis=1, keepdims=True, initial=0)
            rounded = np.maximum(head.P, 2 * tiny * largest)
            magnitudes, squares = (
                reference.visible_product(rounded**n, abs_v[b, :, h_kv] ** n, head.visible)
                for n in (1, 2)
            )
            luck[b, :, h] = luck_of(q.dtype, magnitudes, squares)
    return (
        _expected(out, low_out, out_terms, stored, eps, luck=luck),
        _expected(lse, low_lse, lse_terms, accumulator, eps),
    )


def expected_backward(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array | None,
    dlse: Array | None,
    *,
    band: Band,
    softmax_scale: float,
    rounds_to_zero: bool = False,
) -> tuple[Expected, Expected, Expected]:
    """What dq, dk and dv must be.

    Parameters
    ----------
    q, k, v, dout, dlse
        As in ``reference.backward``.
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        The out that the backward was given. It is rounded, and delta inherits that: ``low`` reads
        it too, the reference does not.
    rounds_to_zero : bool
        Whether the engine's sums do.

    Returns
    -------
    dq, dk, dv : Expected
        Stored in the dtype of q, k, v.
    """
    accumulator, exact, eps = _precisions(q, rounds_to_zero)
    dtype = q.dtype
    gradients = functools.partial(
        reference.backward, q, k, v, dout, dlse, band=band, softmax_scale=softmax_scale
    )
    values = gradients(dtype=exact)
    inherited = gradients(dtype=exact, out=out)
    lows = gradients(dtype=accumulator, operand_dtype=dtype, product=in_order, out=out)
    terms, lucks = _gradient_terms(q, k, v, out.astype(exact), dout, dlse, band, softmax_scale)
    dq, dk, dv = (
        _expected(value, low, term, dtype, eps, luck=luck, from_stored=stored)
        for value, low, term, stored, luck in zip(
            values, lows, terms, inherited, lucks, strict=True
        )
    )
    return dq, dk, dv


def _gradient_terms(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array | None,
    dlse: Array | None,
    band: Band,
    softmax_scale: float,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array, Array]]:
    """Sum of |terms| of dq, dk and dv, and what roundings of their operands may come to."""
    dtype, rounds_dout = q.dtype, dout is not None and dout.dtype != q.dtype
    q, k, v = (a.astype(out.dtype) for a in (q, k, v))
    dout = np.zeros_like(out) if dout is None else dout.astype(out.dtype)
    dlse = np.zeros(out.shape[:1] + out.shape[2:0:-1], out.dtype) if dlse is None else dlse
    terms, magnitudes, squares = (
        (np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)) for _ in range(3)
    )
    scale, total, tiny = abs(softmax_scale), reference.visible_product, smallest_normal(dtype)
    for b, h, h_kv, head in _heads(q, k, band, softmax_scale):
        dO, V, D = dout[b, :, h], v[b, :, h_kv], dlse[b, h].astype(out.dtype)
        with np.errstate(all="ignore"):
            along = dO * out[b, :, h]
            sums = np.abs(dO) @ np.abs(V).T + (np.abs(along).sum(axis=1) + np.abs(D))[:, None]
            dP = np.abs(dO @ V.T + (D - along.sum(axis=1))[:, None])
            loose = SCORE_SHARE * (head.A + head.lse_terms[:, None])
            # P and then dS are rounded; a rounded dout stands in every product of dP and delta.
            rounded = np.maximum(head.P, tiny), np.maximum(head.P * dP, tiny)
            twice = rounded[0] * dP + rounded[1]
            spread = (rounded[0] * dP) ** 2 + rounded[1] ** 2
            if rounds_dout:
                twice = twice + head.P * sums
                spread += head.P**2 * (dO**2 @ (V**2).T + (along**2).sum(axis=1)[:, None])
            P = (
                head.P * (1 + loose),
                rounded[0] + rounds_dout * head.P,
                rounded[0] ** 2 + rounds_dout * head.P**2,
            )
            dS = head.P * (sums + loose * dP), twice, spread
            seen = head.visible
            for i, (into, power) in enumerate(((terms, 1), (magnitudes, 1), (squares, 2))):
                Q, K = np.abs(q[b, :, h]) ** power, np.abs(k[b, :, h_kv]) ** power
                into[0][b, :, h] = scale**power * total(dS[i], K, seen)
                into[1][b, :, h_kv] += scale**power * total(dS[i].T, Q, seen.T)
                into[2][b, :, h_kv] += total(P[i].T, np.abs(dO) ** power, seen.T)
    dq, dk, dv = (luck_of(dtype, *each) for each in zip(magnitudes, squares, strict=True))
    return terms, (dq, dk, dv)


class _Head(NamedTuple):
    """One query head's weights, and what they and its lse are sums of."""

    P: Array
    A: Array
    PA: Array  # rowsum(P * A)
    lse_terms: Array
    visible: NDArray[np.bool_]


def _heads(
    q: Array, k: Array, band: Band, softmax_scale: float
) -> Iterator[tuple[int, int, int, _Head]]:
    """(batch, query head, its key head, what ``_Head`` says), for all of them."""
    visible = reference.visible_pairs(band, q.shape[1], k.shape[1])
    for b in range(q.shape[0]):
        for h, h_kv in reference.query_heads(q.shape[2], k.shape[2]):
            Q, K = q[b, :, h], k[b, :, h_kv]
            weights = reference.softmax_rows(Q, K, visible, softmax_scale)
            P, seen = weights.normalised(weights.W), weights.visible
            with np.errstate(all="ignore"):
                A = np.abs(Q) @ np.abs(K).T * abs(softmax_scale)
                PA = np.where(seen, P * A, 0).sum(axis=1)
                lse_terms = 1 + np.abs(weights.lse) + PA
            yield b, h, h_kv, _Head(P, A, PA, lse_terms, seen)
