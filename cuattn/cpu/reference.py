"""The dense formula: the definition of correctness that every engine and kernel is held to.

For one head, with S = softmax_scale * q k^T over the visible pairs (row i, key j):

    P = softmax(S) by rows     out = P v           lse = ln(sum over j of exp(S))
    dv = P^T dout              dP = dout v^T       delta = rowsum(dout * out)
    dS = P * (dP - delta + dlse)
    dq = softmax_scale * dS k  dk = softmax_scale * dS^T q

An invisible pair contributes no term at all, which a product with 0 would not say of NaN or Inf:
every sum over pairs goes through ``visible_product``. Memory is seqlen_q x seqlen_k, of one head.
Arrays are in the axes (batch, seqlen, heads, dim), lse and dlse in (batch, heads_q, seqlen_q).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuattn.planning.problem import Band

Array = NDArray[Any]
#: a b^T for two matrices: sums over their columns, which are head dims or positions.
Product = Callable[[Array, Array], Array]


def product(a: Array, b: Array) -> Array:
    """``a b^T``, summed in whatever order the library finds fastest."""
    return a @ b.T


def visible_pairs(band: Band, seqlen_q: int, seqlen_k: int) -> NDArray[np.bool_]:
    """Which key (column) each row sees: the element rule of the band, spelled out."""
    distance = np.arange(seqlen_k) - np.arange(seqlen_q)[:, None]
    return (band.lower <= distance) & (distance <= band.upper)


def visible_product(
    a: Array, b: Array, visible: NDArray[np.bool_], product: Product = product
) -> Array:
    """``a @ b`` whose sum over j holds only the terms with ``visible[i, j]``."""
    if np.isfinite(b).all():
        return product(np.where(visible, a, a.dtype.type(0)), b.T)
    rows = [product(row[None, seen], b[seen].T) for row, seen in zip(a, visible, strict=True)]
    return np.concatenate(rows) if rows else np.zeros((0, b.shape[1]), b.dtype)


class Weights(NamedTuple):
    """The softmax of one head before it is normalised: P = W / l."""

    W: Array
    l: Array  # (rows, 1)  # noqa: E741 - the field's name
    lse: Array
    visible: NDArray[np.bool_]  # no pair of a row whose every score is -inf: it sees no key

    def normalised(self, sums: Array) -> Array:
        """Sums over W, or W itself, divided by l; 0 in a row that sees no key."""
        with np.errstate(all="ignore"):
            return sums / np.where(self.l == 0, 1, self.l)


def softmax_rows(
    q: Array,
    k: Array,
    visible: NDArray[np.bool_],
    softmax_scale: float,
    product: Product = product,
) -> Weights:
    """The weights and lse of one head. A row without visible keys has l = 0 and lse = -inf.

    A NaN or +inf score makes the row NaN; a -inf score is a key that is not seen.
    """
    with np.errstate(all="ignore"):
        scores = product(q, k) * q.dtype.type(softmax_scale)
        scores = np.where(visible, scores, -np.inf)
        m = scores.max(axis=1, keepdims=True, initial=-np.inf)
        W = np.exp(scores - np.where(np.isneginf(m), 0, m))
        l = W.sum(axis=1, keepdims=True)  # noqa: E741 - the field's name
        return Weights(W, l, (m + np.log(l))[:, 0], visible & ~np.isneginf(m))


def query_heads(num_heads_q: int, num_heads_kv: int) -> Iterator[tuple[int, int]]:
    """Every query head with the key head it reads."""
    for head in range(num_heads_q):
        yield head, head // (num_heads_q // num_heads_kv)


def _rounded(a: Array, operand_dtype: DTypeLike | None) -> Array:
    """What a product reads of ``a`` where its operands are stored in ``operand_dtype``."""
    if operand_dtype is None or a.dtype == operand_dtype:
        return a
    with np.errstate(over="ignore", invalid="ignore"):
        return a.astype(operand_dtype).astype(a.dtype)


def forward(
    q: Array,
    k: Array,
    v: Array,
    *,
    band: Band,
    softmax_scale: float,
    dtype: DTypeLike = np.float64,
    operand_dtype: DTypeLike | None = None,
    product: Product = product,
) -> tuple[Array, Array]:
    """Dense attention, everything computed in ``dtype``.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
    dtype : dtype
        float32, float64 or longdouble.
    operand_dtype : dtype, optional
        Round P to this dtype before it enters a product, as tensor cores do.
    product : callable, optional
        How sums over head dims and positions are taken.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v), ``dtype``
    lse : array, shape (batch, heads_q, seqlen_q), ``dtype``
    """
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    batch, seqlen_q, num_heads_q, _ = q.shape
    seqlen_k, num_heads_kv, head_dim_v = v.shape[1:]
    visible = visible_pairs(band, seqlen_q, seqlen_k)
    out = np.zeros((batch, seqlen_q, num_heads_q, head_dim_v), q.dtype)
    lse = np.full((batch, num_heads_q, seqlen_q), -np.inf, q.dtype)
    for b in range(batch):
        for h, h_kv in query_heads(num_heads_q, num_heads_kv):
            weights = softmax_rows(q[b, :, h], k[b, :, h_kv], visible, softmax_scale, product)
            W = _rounded(weights.W, operand_dtype)
            o = visible_product(W, v[b, :, h_kv], weights.visible, product)
            out[b, :, h], lse[b, h] = weights.normalised(o), weights.lse
    return out, lse


def backward(
    q: Array,
    k: Array,
    v: Array,
    dout: Array | None,
    dlse: Array | None,
    *,
    band: Band,
    softmax_scale: float,
    dtype: DTypeLike = np.float64,
    operand_dtype: DTypeLike | None = None,
    product: Product = product,
    out: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of sum(out * dout) + sum(lse * dlse), everything computed in ``dtype``.

    Parameters
    ----------
    q, k, v
        As in ``forward``.
    dout : array, shape (batch, seqlen_q, heads_q, head_dim_v), or None for 0
    dlse : array, shape (batch, heads_q, seqlen_q), or None for 0
    operand_dtype : dtype, optional
        Round P, dS and dout to this dtype before they enter a product, as tensor cores do.
    product : callable, optional
        How sums over head dims and positions are taken.
    out : array, shape of dout, optional
        The out that delta is taken from, where a stored, rounded one is modelled.

    Returns
    -------
    dq, dk, dv : arrays, shapes of q, k, v, ``dtype``
        A key head's gradients are summed over its group of query heads. Rows that see no key
        neither receive nor give a gradient, whatever is in q, dout and dlse there.
    """
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    batch, seqlen_q, num_heads_q, _ = q.shape
    seqlen_k, num_heads_kv, head_dim_v = v.shape[1:]
    shape = (batch, seqlen_q, num_heads_q, head_dim_v)
    dout = np.zeros(shape, q.dtype) if dout is None else dout.astype(dtype)
    dout = _rounded(dout, operand_dtype)
    dlse = np.zeros((batch, num_heads_q, seqlen_q), q.dtype) if dlse is None else dlse.astype(dtype)
    visible = visible_pairs(band, seqlen_q, seqlen_k)
    scale = q.dtype.type(softmax_scale)
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b in range(batch):
        for h, h_kv in query_heads(num_heads_q, num_heads_kv):
            q_head, k_head, v_head = q[b, :, h], k[b, :, h_kv], v[b, :, h_kv]
            dout_head = dout[b, :, h]
            weights = softmax_rows(q_head, k_head, visible, softmax_scale, product)
            P, seen = weights.normalised(weights.W), weights.visible
            with np.errstate(all="ignore"):
                exact = visible_product(P, v_head, seen) if out is None else None
                out_head = exact if out is None else out[b, :, h].astype(dtype)
                delta = (dout_head * out_head).sum(axis=1)
                dP = product(dout_head, v_head)
                dS = P * (dP - delta[:, None] + dlse[b, h][:, None])
                P, dS = _rounded(P, operand_dtype), _rounded(dS, operand_dtype)
                dq[b, :, h] = scale * visible_product(dS, k_head, seen, product)
                dk[b, :, h_kv] += scale * visible_product(dS.T, q_head, seen.T, product)
                dv[b, :, h_kv] += visible_product(P.T, dout_head, seen.T, product)
    return dq, dk, dv
