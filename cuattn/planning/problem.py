"""The question: one attention call as frozen, hashable data, without arrays or device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cuattn._typing import ACCUMULATOR

Op = Literal["forward", "backward"]
Strides = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Band:
    """Which keys a row sees, in the range form: key j and row i with ``lower <= j - i <= upper``.

    i and j count from the first row and key of the arrays; position offsets are folded into the
    bounds. Dense is a band that excludes nothing; causal bounds it above; a window on both sides.
    """

    lower: int
    upper: int

    @staticmethod
    def clamped(lower: int | None, upper: int | None, seqlen_q: int, seqlen_k: int) -> Band:
        """A band with the same meaning whose bounds fit 32 bits (None is open)."""
        low = -seqlen_q if lower is None else min(max(lower, -seqlen_q), seqlen_k)
        high = seqlen_k if upper is None else min(max(upper, -seqlen_q), seqlen_k)
        return Band(low, high)


@dataclass(frozen=True, slots=True)
class Layouts:
    """Strides, counted in elements, of every array in the axes (batch, seqlen, heads, dim).

    An axis of length 1 may carry any stride. lse and delta are always C-contiguous
    (batch, heads_q, seqlen_q); dlse has strides in those three axes.
    """

    q: Strides
    k: Strides
    v: Strides
    out: Strides
    dout: Strides | None = None
    dlse: tuple[int, int, int] | None = None
    dq: Strides | None = None
    dk: Strides | None = None
    dv: Strides | None = None


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """What is asked; everything that a kernel family needs to accept or decline it.

    heads_q is a multiple of heads_kv; query head h reads key head ``h // group_size``.
    ``wrt`` is empty for a forward and a subset of ("q", "k", "v") in that order for a backward.
    """

    op: Op
    dtype: str
    out_dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    band: Band
    softmax_scale: float
    deterministic: bool | None
    layouts: Layouts
    wrt: tuple[str, ...] = ()

    @property
    def accumulator(self) -> str:
        """The dtype of lse, of the running state and of every partial sum."""
        return ACCUMULATOR[self.dtype]

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads_q // self.num_heads_kv if self.num_heads_kv else 0
