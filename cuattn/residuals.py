"""What passes between a forward and its backward, and what the backward gives."""

from __future__ import annotations

from dataclasses import dataclass, field

from cuattn._typing import Array
from cuattn.planning.validate import ForwardCall


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """What a backward needs of its forward: references, not copies.

    Do not change any of these arrays in place before the backward: it would differentiate
    another function, silently.

    Attributes
    ----------
    q, k, v : array
        The inputs: those given, or the memory of another library's as NumPy or CuPy arrays.
    out : array
        The result.
    lse : array, shape (batch, heads_q, seqlen_q) less the axes left out
        Natural log of the sum of exponentials of every row.
    call : ForwardCall
        The checked call.
    """

    q: Array = field(repr=False)
    k: Array = field(repr=False)
    v: Array = field(repr=False)
    out: Array = field(repr=False)
    lse: Array = field(repr=False)
    call: ForwardCall


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Gradients by argument, each with its input's shape and dtype; None where not asked.

    Attributes
    ----------
    dq, dk, dv : array or None
        Of q, k and v.
    dbias, dalibi_slopes, dsinks : None
        Of options that this version lacks.
    """

    dq: Array | None = None
    dk: Array | None = None
    dv: Array | None = None
    dbias: Array | None = None
    dalibi_slopes: Array | None = None
    dsinks: Array | None = None
