"""Hypothesis strategies for attention problems: plain data that builds its own arrays.

A ``Problem`` prints short and shrinks well; arrays are drawn from its seed. Sizes sit on both sides
of tile edges, and stay small enough for the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

from cuattn.planning.problem import Band

DTYPES = ("float16", "bfloat16", "float32", "float64")
LAYOUTS = ("bshd", "bhsd", "shd", "hsd", "bsd", "sd")
STRIDES = ("contiguous", "transposed", "sliced", "reversed", "broadcast")

SEQLENS = (1, 2, 5, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
# One kernel is compiled per head_dim, so these are a list and not a range.
HEAD_DIMS = (1, 3, 8, 16, 33, 64, 80, 128)
LARGE_HEAD_DIMS = (256, 264, 320)

#: Products of seqlen_q, seqlen_k, head_dim and heads that the oracle gets through quickly.
MAX_WORK = 3_000_000


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def to_canonical(array: np.ndarray, letters: str, axes: str = "bshd") -> np.ndarray:
    """The array in all of ``axes``, those it lacks with length 1."""
    array = array.transpose([letters.index(axis) for axis in axes if axis in letters])
    return array[tuple(slice(None) if axis in letters else None for axis in axes)]


#: Equal rows of a sequence that is "broadcast": see cuattn.cpu.tolerance on sums of equal terms.
MOST_EQUAL = 16


def with_strides(array: np.ndarray, kind: str, letters: str = "") -> np.ndarray:
    """The same values (the first slice's for "broadcast") in another memory layout.

    Around a sliced array lies NaN, so that a read past an edge shows.
    """
    if kind == "transposed":
        return np.ascontiguousarray(array.T).T
    if kind == "sliced":
        around = np.full([2 * n + 1 for n in array.shape], np.nan, array.dtype)
        view = around[tuple(slice(1, 2 * n + 1, 2) for n in array.shape)]
        view[...] = array
        return view
    if kind == "reversed":
        backwards = tuple(slice(None, None, -1) for _ in array.shape)
        return np.ascontiguousarray(array[backwards])[backwards]
    few = not letters.startswith("s") or len(array) <= MOST_EQUAL
    if kind == "broadcast" and array.ndim and array.shape[0] and few:
        return np.broadcast_to(array[:1], array.shape)
    return array


@dataclass(frozen=True)
class Problem:
    """One call: sizes, options and how its arrays lie in memory. None is an option not given."""

    dtype: str
    layout: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_kv: int
    group_size: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    align: str | None = None
    q_offset: int | None = None
    k_offset: int | None = None
    softmax_scale: float | None = None
    out_dtype: str | None = None
    strides: tuple[str, str, str, str] = ("contiguous",) * 4
    use_dout: bool = True
    use_dlse: bool = True
    seed: int = 0

    def within(self, dtypes: Sequence[str]) -> Problem:
        """The same problem in a dtype that an engine takes."""
        if self.dtype in dtypes:
            return self
        return replace(self, dtype=dtypes[0], out_dtype=None)

    @property
    def options(self) -> dict[str, Any]:
        """What to pass to ``attention``."""
        names = ("causal", "align", "q_offset", "k_offset", "softmax_scale", "out_dtype", "layout")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def oracle(self) -> dict[str, Any]:
        """What to pass to the oracle: the meaning of the options, worked out once more."""
        upper = (self.q_offset or 0) - (self.k_offset or 0)
        if self.align == "bottom_right":
            upper = self.seqlen_k - self.seqlen_q
        scale = 1 / math.sqrt(self.head_dim) if self.softmax_scale is None else self.softmax_scale
        far = self.seqlen_q + self.seqlen_k
        return {"band": Band(-far, upper if self.causal else far), "softmax_scale": float(scale)}

    def shape(self, seqlen: int, heads: int, dim: int) -> tuple[int, ...]:
        sizes = {"b": self.batch, "s": seqlen, "h": heads, "d": dim}
        return tuple(sizes[axis] for axis in self.layout)

    @property
    def heads_q(self) -> int:
        return self.heads_kv * self.group_size

    @property
    def lse_letters(self) -> str:
        return "".join(axis for axis in "bhs" if axis in self.layout)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v, in the caller's layout and strides."""
        rng = np.random.default_rng(self.seed)
        shapes = (
            self.shape(self.seqlen_q, self.heads_q, self.head_dim),
            self.shape(self.seqlen_k, self.heads_kv, self.head_dim),
            self.shape(self.seqlen_k, self.heads_kv, self.head_dim_v),
        )
        q, k, v = (
            with_strides(rng.standard_normal(shape).astype(dtype_of(self.dtype)), kind, self.layout)
            for shape, kind in zip(shapes, self.strides, strict=False)
        )
        return q, k, v

    def cotangents(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """dout and dlse, in the caller's layout and strides."""
        rng = np.random.default_rng(self.seed + 1)
        dout = rng.standard_normal(self.shape(self.seqlen_q, self.heads_q, self.head_dim_v))
        sizes = {"b": self.batch, "h": self.heads_q, "s": self.seqlen_q}
        dlse = rng.standard_normal([sizes[axis] for axis in self.lse_letters])
        out_dtype = dtype_of(self.out_dtype or self.dtype)
        lse_dtype = np.float64 if self.dtype == "float64" else np.float32
        kind = self.strides[3]
        return (
            with_strides(dout.astype(out_dtype), kind, self.layout) if self.use_dout else None,
            with_strides(dlse.astype(lse_dtype), kind, self.lse_letters) if self.use_dlse else None,
        )

    def canonical(self, array: np.ndarray) -> np.ndarray:
        return to_canonical(array, self.layout)

    def canonical_lse(self, array: np.ndarray) -> np.ndarray:
        return to_canonical(array, self.lse_letters, "bhs")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Any problem that this version takes."""
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    large = draw(st.integers(0, 24)) == 24
    head_dim = draw(st.sampled_from(LARGE_HEAD_DIMS if large else HEAD_DIMS))
    head_dim_v = draw(st.one_of(st.just(head_dim), st.just(head_dim), st.sampled_from(HEAD_DIMS)))
    seqlen_q, seqlen_k = draw(_lengths())
    # float64 is compared in extended precision, which has no fast product.
    work = MAX_WORK // (4 if dtype == "float64" else 1)
    most = max(1, work // max(1, seqlen_q * seqlen_k * max(head_dim, head_dim_v)))
    heads_kv = draw(st.integers(1, min(3, most))) if "h" in layout else 1
    group_size = draw(st.integers(1, max(1, min(3, most // heads_kv)))) if "h" in layout else 1
    most_batch = max(1, min(3, most // (heads_kv * group_size)))
    batch = draw(st.integers(1, most_batch)) if "b" in layout else 1
    return Problem(
        dtype=dtype,
        layout=layout,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_kv=heads_kv,
        group_size=group_size,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        softmax_scale=draw(st.sampled_from((None, None, 0.25, 1.0, 0.0, -0.5, np.float32(0.1)))),
        out_dtype=draw(
            st.sampled_from((None, None, dtype, "float32" if dtype != "float64" else None))
        ),
        strides=draw(st.tuples(*[st.sampled_from(STRIDES)] * 4)),
        use_dout=draw(st.integers(0, 7)) != 0,
        use_dlse=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
        **draw(_positions(seqlen_q, seqlen_k)),
    )


@st.composite
def _lengths(draw: st.DrawFn) -> tuple[int, int]:
    """(seqlen_q, seqlen_k): equal, unrelated, or (seldom) empty."""
    seqlen_q = draw(st.sampled_from(SEQLENS))
    seqlen_k = draw(st.one_of(st.just(seqlen_q), st.sampled_from(SEQLENS)))
    empty = draw(st.integers(0, 31))
    return (0 if empty == 31 else seqlen_q), (0 if empty == 30 else seqlen_k)


@st.composite
def _positions(draw: st.DrawFn, seqlen_q: int, seqlen_k: int) -> dict[str, Any]:
    """Nothing, or causal with whatever the lengths demand."""
    if draw(st.booleans()):
        return {}
    how = draw(st.sampled_from(("plain", "align", "offset")))
    if how == "offset" or (how == "plain" and seqlen_q != seqlen_k):
        k_offset = draw(st.sampled_from((None, 0, 7, -(10**12))))
        reach = draw(st.integers(-seqlen_q - 2, seqlen_k + 2))
        return {"causal": True, "q_offset": (k_offset or 0) + reach, "k_offset": k_offset}
    if how == "align":
        return {"causal": True, "align": draw(st.sampled_from(("bottom_right", "top_left")))}
    return {"causal": True}
