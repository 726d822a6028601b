"""One state: attention over a set of keys is a small value, and values of disjoint sets merge.

For one query row, what was seen of the keys is ``(m, l, o)``::

    m   the running maximum of the scores s             identity  (-inf, 0, 0)
    l   the sum of exp(s - m)
    o   the sum of exp(s - m) times the key's value     out = o / l      lse = m + ln(l)

Two states over disjoint sets of keys merge to the state over their union::

    m = max(m1, m2)
    l = l1 exp(m1 - m) + l2 exp(m2 - m)
    o = o1 exp(m1 - m) + o2 exp(m2 - m)

This is associative and commutative and has an identity, so keys may be split anyhow: into tiles of
one kernel, lanes of a warp, blocks of the GPU, steps of a ring.

``(out, lse)`` is the same state written as ``(m, l, o) = (lse, 1, out)``; merging it is what this
file does on whole arrays. A part weighs ``w = exp(lse_i - lse)``, and with it

    out = sum of w_i out_i                     dout_i = w_i dout
    lse = ln(sum of exp(lse_i))                dlse_i = w_i (dout . (out_i - out) + dlse)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cuattn._arrays import (
    ArraySpec,
    Layout,
    check_dtype,
    check_like,
    check_together,
    layout_for,
    on_device,
    parse_dtype,
    plain,
    spec_of,
)
from cuattn._foreign import taken
from cuattn._typing import ACCUMULATOR, Array
from cuattn.errors import ArgumentError, DTypeError, explain_argument

Part = tuple[Array, Array]
#: dout, dlse=None -> one (dout_i, dlse_i) per part.
MergeVjp = Callable[..., list[Part]]


def merge_states(
    parts: Iterable[Part], *, layout: str = "bshd", out_dtype: Any = None
) -> tuple[Array, Array]:
    """Merge attention over disjoint sets of keys into attention over their union.

    Parameters
    ----------
    parts : iterable of (out, lse)
        Results of ``attention(..., return_lse=True)`` for the same queries.
        out has shape (batch, seqlen_q, heads_q, head_dim_v), lse (batch, heads_q, seqlen_q) less
        the axes left out, float32 (float64 for float64). All parts agree in shape, dtype and place.
    layout : {"bshd", "bhsd", "shd", "hsd", "bsd", "sd"}
        The axes of each out.
    out_dtype : dtype, optional
        The dtype of the merged out: any whose lse has the dtype of the given ones; that of the
        parts by default. Parts of 16 bits were rounded already: merge float32 parts where that
        matters.

    Returns
    -------
    out : array
        New memory, C-contiguous or not. A part without keys, (0, -inf), changes nothing: what is
        left comes back bit for bit, as does a single part.
    lse : array
        -inf where every part has -inf (out is 0 there); NaN where one is NaN.

    Raises
    ------
    ArgumentError
        No part, or shapes, layout or devices that do not fit.
    DTypeError
        A dtype does not fit, or host and device arrays are mixed.

    References
    ----------
    Milakov and Gimelshein 2018, section 3.1: the operation and its associativity.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 1, 64, 2, 16))
    >>> first = cuattn.attention(q, k[:, :40], v[:, :40], return_lse=True)
    >>> rest = cuattn.attention(q, k[:, 40:], v[:, 40:], return_lse=True)
    >>> out, lse = cuattn.merge_states([first, rest])
    >>> bool(np.allclose(out, cuattn.attention(q, k, v)))
    True
    """
    merge = _Merge(parts, layout, out_dtype)
    return merge.result()


def merge_states_vjp(
    parts: Iterable[Part], *, layout: str = "bshd", out_dtype: Any = None
) -> tuple[tuple[Array, Array], MergeVjp]:
    """Merge as ``merge_states``, and return the function that pulls gradients back to the parts.

    Parameters
    ----------
    parts, layout, out_dtype
        As in ``merge_states``; do not change the arrays in place before the vjp.

    Returns
    -------
    out, lse : pair of arrays
        The merged state.
    vjp : callable
        ``vjp(dout, dlse=None) -> [(dout_i, dlse_i), ...]``, one pair per part, with the part's
        shapes and dtypes. dout has out's shape and dtype, dlse lse's; None is 0. Rows that saw no
        key in a part give it 0.

    Raises
    ------
    ArgumentError, DTypeError
        As in ``merge_states``.

    References
    ----------
    Derived in the head of this file.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> part = np.ones((1, 2, 1, 4)), np.zeros((1, 1, 2))
    >>> (out, lse), vjp = cuattn.merge_states_vjp([part, part])
    >>> vjp(np.ones_like(out))[0][0][0, :, 0, 0]
    array([0.5, 0.5])
    """
    merge = _Merge(parts, layout, out_dtype)
    return merge.result(), merge.vjp


def merge_weights(lses: Sequence[Array]) -> tuple[list[Array], Array]:
    """Each part's share of every row, and the merged lse.

    Parameters
    ----------
    lses : sequence of arrays of one shape and dtype
        At least one.

    Returns
    -------
    weights : list of arrays
        They sum to 1; 0 for a part with lse -inf. Parts with +inf share the row.
    lse : array
    """
    xp = _namespace(lses[0])
    with np.errstate(invalid="ignore", divide="ignore"):
        peak = lses[0]
        for lse in lses[1:]:
            peak = xp.maximum(peak, lse)
        # Where lse is the peak the mass is 1, also where both are infinite.
        masses = [xp.where(lse == peak, lse.dtype.type(1), xp.exp(lse - peak)) for lse in lses]
        total = masses[0]
        for mass in masses[1:]:
            total = total + mass
        merged = xp.where(total == 1, peak, peak + xp.log(total))  # -0.0 + 0.0 would be 0.0
        absent = (xp.isneginf(lse) for lse in lses)
        return [
            xp.where(gone, mass.dtype.type(0), mass / total)
            for gone, mass in zip(absent, masses, strict=True)
        ], merged


class _Merge:
    """One merge: its checked parts, its weights, and both directions."""

    def __init__(self, parts: Iterable[Part], layout: str, out_dtype: Any) -> None:
        self.parts = _pairs(parts)
        self.layout = _check_parts(self.parts, layout)
        out, lse = self.parts[0]
        self.device = spec_of(out).device
        allowed = [each for each, wide in ACCUMULATOR.items() if lse.dtype == wide]
        self.dtype = np.dtype(parse_dtype("out_dtype", out_dtype, out.dtype.name, allowed))
        with on_device(self.device), np.errstate(all="ignore"):
            self.weights, self.lse = merge_weights([plain(lse) for _, lse in self.parts])
            self.out = self._weighted_sum()

    def result(self) -> tuple[Array, Array]:
        """Out and lse in new memory; a single part as it is, whatever its bits."""
        single = len(self.parts) == 1
        out, lse = map(plain, self.parts[0]) if single else (self.out, self.lse)
        with on_device(self.device), np.errstate(all="ignore"):
            return out.astype(self.dtype), lse.copy()

    def vjp(self, dout: Array | None, dlse: Array | None = None) -> list[Part]:
        """Gradients of every part's out and lse."""
        place = spec_of(self.parts[0][0])
        dout = None if dout is None else taken("dout", dout)
        dlse = None if dlse is None else taken("dlse", dlse)
        _check_part("dout", dout, place, self.out.shape, self.dtype)
        _check_part("dlse", dlse, place, self.lse.shape, self.lse.dtype)
        with on_device(self.device), np.errstate(all="ignore"):
            return [
                self._part_gradient(part, weight, dout, dlse)
                for (part, _), weight in zip(self.parts, self.weights, strict=True)
            ]

    def _weighted_sum(self) -> Array:
        """Out, in lse's dtype. An absent part adds -0.0, the only number that changes no other."""
        xp, total = _namespace(self.lse), None
        for (out, _), weight in zip(self.parts, self.weights, strict=True):
            share = self.layout.per_row(weight)
            term = xp.where(
                share == 0, weight.dtype.type(-0.0), share * plain(out).astype(weight.dtype)
            )
            total = term if total is None else total + term
        empty = self.layout.per_row(xp.isneginf(self.lse))
        return xp.where(empty, self.lse.dtype.type(0), total)

    def _part_gradient(
        self, part: Array, weight: Array, dout: Array | None, dlse: Array | None
    ) -> Part:
        xp, wide = _namespace(weight), weight.dtype
        share, absent = self.layout.per_row(weight), weight == 0
        dpart, inner = xp.zeros(part.shape, part.dtype), xp.zeros_like(weight)
        if dout is not None:
            dout = plain(dout).astype(wide)
            dpart = xp.where(share == 0, wide.type(0), share * dout).astype(part.dtype)
            along = (dout * (plain(part).astype(wide) - self.out)).sum(axis=-1)
            inner = self.layout.as_lse(along)
        if dlse is not None:
            inner = inner + plain(dlse)
        return dpart, xp.where(absent, wide.type(0), weight * inner)


def _namespace(array: Array) -> Any:
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def _pairs(parts: Iterable[Part]) -> list[Part]:
    """The parts as a list of pairs, at least one."""
    expected = "a non-empty list of (out, lse) pairs"
    remedy = "pass results of attention(..., return_lse=True), a single one in a list too"
    # An array of two can be unpacked like a pair, and is none.
    try:
        items = list(parts)
        pairs = [(out, lse) for out, lse in items]
    except (TypeError, ValueError):
        items = None
    if items is None or any(hasattr(item, "shape") for item in items):
        got = f"{type(parts).__name__}, whose items are no pairs"
        raise DTypeError(explain_argument("parts", got, expected, remedy))
    if not pairs:
        raise ArgumentError(explain_argument("parts", "an empty list", expected, remedy))
    return [
        (taken(f"parts[{i}][0]", out), taken(f"parts[{i}][1]", lse))
        for i, (out, lse) in enumerate(pairs)
    ]


def _check_parts(parts: list[Part], layout: str) -> Layout:
    """All parts against the first, and the first lse against its out."""
    first_out, first_lse = parts[0]
    out, lse = spec_of(first_out), spec_of(first_lse)
    wide = ACCUMULATOR[check_dtype("parts[0][0]", out)]
    known = layout_for(layout, "parts[0][0]", out.shape)
    batch, seqlen, heads, _ = known.canonical(out.shape, 1)
    lse_shape = known.own_lse((batch, heads, seqlen))
    _check_part("parts[0][0]", first_out, out, out.shape, out.dtype)
    _check_part("parts[0][1]", first_lse, out, lse_shape, np.dtype(wide))
    for i, (each_out, each_lse) in enumerate(parts[1:], 1):
        _check_part(f"parts[{i}][0]", each_out, out, out.shape, out.dtype)
        _check_part(f"parts[{i}][1]", each_lse, out, lse.shape, lse.dtype)
    return known


def _check_part(
    name: str, array: Array | None, place: ArraySpec, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    """An array (None is fine) of exactly that shape and dtype, in the place of the first part."""
    if array is None:
        return
    spec = spec_of(array)
    check_together(name, spec, "parts[0][0]", place)
    check_like(name, spec, shape, dtype, "", "merge parts of the same queries, in one layout")
