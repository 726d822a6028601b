"""What passes between a forward and its backward, and what the backward gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cuattn._arrays import spec_of
from cuattn._foreign import taken
from cuattn._typing import Array
from cuattn.errors import DTypeError, explain_argument
from cuattn.planning.validate import ForwardCall, moved_call


@dataclass(frozen=True, slots=True, eq=False)
class Residuals:
    """What a backward needs of its forward: references, not copies.

    Do not change any of these arrays in place before the backward: it would differentiate
    another function, silently. For other arrays there is ``rebuild``, which checks them.

    Attributes
    ----------
    q, k, v : array
        The inputs: those given, or the memory of another library's as NumPy or CuPy arrays.
    out : array
        The result.
    lse : array, shape (batch, heads_q, seqlen_q) less the axes left out
        Natural log of the sum of exponentials of every row.
    call : ForwardCall
        The checked call, which holds no array.
    """

    q: Array = field(repr=False)
    k: Array = field(repr=False)
    v: Array = field(repr=False)
    out: Array = field(repr=False)
    lse: Array = field(repr=False)
    call: ForwardCall = field(repr=False)

    @staticmethod
    def rebuild(
        call: ForwardCall, q: Array, k: Array, v: Array, out: Array, lse: Array
    ) -> Residuals:
        """Residuals of a call whose arrays were kept elsewhere, as frameworks keep them.

        Parameters
        ----------
        call : ForwardCall
            ``residuals.call`` of what ``attention_forward`` returned.
        q, k, v, out, lse : array
            The elements of those residuals, in the same or other memory: shapes, dtypes and device
            as there. Strides may differ, but those of lse, which is C-contiguous.

        Returns
        -------
        residuals : Residuals
            For ``attention_backward``.

        Raises
        ------
        ArgumentError, DTypeError
            An array does not fit; the message names it.
        """
        if not isinstance(call, ForwardCall):
            expected, remedy = "a ForwardCall", "pass residuals.call"
            raise DTypeError(explain_argument("call", type(call).__name__, expected, remedy))
        q, k, v, out = taken("q", q), taken("k", k), taken("v", v), taken("out", out)
        lse = taken("lse", lse)
        moved = moved_call(call, *map(spec_of, (q, k, v, out, lse)))
        return Residuals(q, k, v, out, lse, moved)

    def __reduce__(self) -> tuple[Callable[..., Residuals], tuple[Any, ...]]:
        # Copies have other strides than the arrays they are of.
        return Residuals.rebuild, (self.call, self.q, self.k, self.v, self.out, self.lse)


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
