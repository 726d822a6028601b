"""Exact attention on arrays: what the user calls, one way down to the engine.

Checks are remembered per look of a call (shapes, strides, dtypes, devices, options), so a repeated
one only looks its ``ForwardCall`` up, makes its results, and hands all to ``cuattn.execute``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from cuattn import execute
from cuattn._arrays import check_destination, on_device, spec_of
from cuattn._foreign import taken, taken_to_write, was_written
from cuattn._typing import Array
from cuattn.errors import DTypeError, explain_argument
from cuattn.planning.options import (
    NOT_GIVEN,
    Options,
    check_flag,
    explains_keywords,
    options_of,
)
from cuattn.planning.validate import ForwardCall, backward_call, forward_call, names_in
from cuattn.residuals import Gradients, Residuals

P = ParamSpec("P")
T = TypeVar("T")


def prepare(
    q: Array, k: Array, v: Array, out: Array | None, options: tuple[Any, ...]
) -> ForwardCall:
    """Check a forward call of arrays that were taken, without running it.

    ``options`` are the values of ``Options``.
    """
    call = forward_call(
        spec_of(q), spec_of(k), spec_of(v), None if out is None else spec_of(out), *options
    )
    if out is not None:
        check_destination("out", out, {"q": q, "k": k, "v": v})
    return call


#: The fields of Residuals; lse is None where it is not kept.
_Kept = tuple[Array, Array, Array, Array, Array | None, ForwardCall]


def _forward(
    q: Array, k: Array, v: Array, out: Array | None, options: tuple[Any, ...], *, keep_lse: bool
) -> tuple[Array, _Kept]:
    """The result, which is the very object given as out, and what a backward needs."""
    q, k, v = taken("q", q), taken("k", k), taken("v", v)
    given = out
    if out is not None:
        out = taken_to_write("out", out)
    call = prepare(q, k, v, out, options)
    with on_device(call.device):
        lse = None
        if out is None and keep_lse:
            out, lse = call.new_out_and_lse()
        elif out is None:
            (out,) = call.new_out()
        elif keep_lse:
            (lse,) = call.new_lse()
        execute.forward(call.problem, call.layout, q, k, v, out, lse)
    if given is None:
        given = out
    elif given is not out:
        was_written(given)
    return given, (q, k, v, out, lse, call)


@explains_keywords
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    align: str | None = None,
    q_offset: int = NOT_GIVEN,
    k_offset: int = NOT_GIVEN,
    mask: Any = None,
    bias: Array | None = None,
    alibi_slopes: Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    score_mod: Any = None,
    arrays: Any = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    softmax_scale: float | None = None,
    layout: str = "bshd",
    precision: str | None = None,
    out_dtype: Any = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    out: Array | None = None,
) -> Any:
    """Exact softmax attention, ``softmax(softmax_scale * q k^T) v``, without storing the scores.

    Parameters
    ----------
    q : array, shape (batch, seqlen_q, heads_q, head_dim)
        NumPy, CuPy, or of another library, which then shares its memory without a copy (DLPack or
        ``__cuda_array_interface__``); float16, bfloat16, float32 or float64; any strides.
    k : array, shape (batch, seqlen_k, heads_kv, head_dim)
        heads_q is a multiple of heads_kv: query head h reads key head
        ``h // (heads_q // heads_kv)``. Place and dtype of ``q``, as for ``v``.
    v : array, shape (batch, seqlen_k, heads_kv, head_dim_v)
        Values; head_dim_v may differ from head_dim.
    causal : bool
        Row i sees key j only where ``k_offset + j <= q_offset + i``.
    align : {"bottom_right", "top_left"}, optional
        Where seqlen_q and seqlen_k differ: the last row sees the last key (as FlashAttention), or
        the first row sees the first key only (as torch SDPA). Instead of the offsets.
    q_offset, k_offset : int
        Positions of the first row and of the first key.
    softmax_scale : float, optional
        Factor of the scores, 0 or any real, also negative, of a magnitude that the sums hold;
        ``1 / sqrt(head_dim)`` by default.
    layout : {"bshd", "bhsd", "shd", "hsd", "bsd", "sd"}
        The axes of q, k, v and out: b batch, s sequence, h heads, d dim.
    out_dtype : dtype, optional
        "float32" keeps the result of 16-bit inputs unrounded; the dtype of ``q`` by default.
    deterministic : bool, optional
        Whether the same inputs give the same bits in the backward (the forward always does); None
        is True where it costs under 5 %.
    return_lse : bool
        Return ``lse`` too.
    out : array, optional
        Where to write the result: its exact shape and dtype, any strides that do not overlap, no
        memory of an input; an array of another library is written in place. Untouched on an
        error.
    seed : int, optional
        Without effect: dropout is not available in this version.
    window, mask, bias, alibi_slopes, softcap, sinks, score_mod, arrays, dropout_p, precision
        Not available in this version: each raises UnsupportedError when used.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        In the layout and place of ``q``: NumPy for host memory, CuPy for a device's; the object
        given as ``out`` if any. A row that sees no key is 0; a row with a NaN score is NaN.
    lse : array, shape (batch, heads_q, seqlen_q) less the axes left out, only if ``return_lse``
        float32 (float64 for float64): the natural log of the sum of ``exp(score)`` over the keys
        that the row sees, -inf where it sees none.

    Raises
    ------
    ArgumentError
        A shape, stride, value, layout or device does not fit; the message names the argument.
    DTypeError
        A type or dtype does not fit, or host and device arrays are mixed.
    UnsupportedError
        An option this version lacks, or no kernel family takes the problem.

    Notes
    -----
    Memory is linear in the sequence. CuPy work is enqueued on the current stream of the arrays'
    device, without synchronising.

    References
    ----------
    Milakov and Gimelshein 2018 (online softmax), Dao et al. 2022 and Dao 2023 (tiling and
    recomputation); the algebra is in ``cuattn.states``.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = rng.standard_normal((3, 2, 128, 4, 64), dtype=np.float32)
    >>> out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    ((2, 128, 4, 64), (2, 4, 128))
    >>> bool(np.array_equal(out[:, 0], v[:, 0]))
    True
    """
    check_flag("return_lse", return_lse)
    options = (
        causal,
        window,
        align,
        q_offset,
        k_offset,
        mask,
        bias,
        alibi_slopes,
        softcap,
        sinks,
        score_mod,
        arrays,
        dropout_p,
        seed,
        softmax_scale,
        layout,
        precision,
        out_dtype,
        deterministic,
    )
    out, kept = _forward(q, k, v, out, options, keep_lse=bool(return_lse))
    return (out, kept[4]) if return_lse else out


def takes_options(function: Callable[P, T]) -> Callable[P, T]:
    """Show the options of ``attention`` in the signature instead of ``**options``."""
    own = inspect.signature(function).parameters
    named = inspect.signature(attention).parameters
    shown = [named[name] for name in named if name in own or name in Options._fields]
    shown += [own[name] for name in own if name not in named and name != "options"]
    function.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return function


@takes_options
def attention_forward(
    q: Array, k: Array, v: Array, *, out: Array | None = None, **options: Any
) -> tuple[Array, Residuals]:
    """Compute ``attention``, and keep what its backward needs.

    Parameters
    ----------
    q, k, v, out : array
        As in ``attention``: (batch, seqlen, heads, head_dim) or another layout.
    **options
        As in ``attention``, but ``return_lse``: the residuals hold lse.

    Returns
    -------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
    residuals : Residuals
        References to q, k, v, out and lse (``residuals.lse``); do not change them in place before
        the backward.

    Raises
    ------
    ArgumentError, DTypeError, UnsupportedError
        As in ``attention``.

    References
    ----------
    Dao et al. 2022: a backward needs out and lse, not the scores.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 3, 1, 2), np.float32)
    >>> out, residuals = cuattn.attention_forward(q, k, v)
    >>> residuals.lse.shape
    (1, 1, 3)
    """
    out, kept = _forward(q, k, v, out, options_of("attention_forward", options), keep_lse=True)
    return out, Residuals(*kept)


def attention_backward(
    res: Residuals,
    dout: Array | None = None,
    dlse: Array | None = None,
    *,
    wrt: Iterable[str] | None = None,
) -> Gradients:
    """Gradients of ``sum(out * dout) + sum(lse * dlse)`` with respect to the inputs.

    Parameters
    ----------
    res : Residuals
        What ``attention_forward`` returned.
    dout : array, optional
        Shape and dtype of ``out``, any strides (also a broadcast view); None is 0.
    dlse : array, optional
        Shape and dtype of ``lse``, any strides; None is 0.
    wrt : collection of {"q", "k", "v"}, optional
        The inputs to differentiate; all of them by default.

    Returns
    -------
    gradients : Gradients
        dq, dk, dv with the shape and dtype of q, k, v; None where not asked. A key head's gradient
        is the sum over its group of query heads. A row that sees no key has dq 0 and contributes
        nothing to dk and dv.

    Raises
    ------
    ArgumentError, DTypeError
        dout, dlse or wrt does not fit; the message names the argument.

    References
    ----------
    Dao et al. 2022, appendix B: the scores are recomputed tile by tile from q, k and lse.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 3, 1, 2), np.float32)
    >>> out, residuals = cuattn.attention_forward(q, k, v)
    >>> gradients = cuattn.attention_backward(residuals, np.ones_like(out))
    >>> gradients.dq.shape, gradients.dbias
    ((1, 3, 1, 2), None)
    """
    if not isinstance(res, Residuals):
        expected = "Residuals"
        remedy = "pass the second result of attention_forward first, and then dout"
        raise DTypeError(explain_argument("res", type(res).__name__, expected, remedy))
    call = res.call
    if dout is not None:
        dout = taken("dout", dout)
    if dlse is not None:
        dlse = taken("dlse", dlse)
    backward = backward_call(
        call,
        None if dout is None else spec_of(dout),
        None if dlse is None else spec_of(dlse),
        names_in(wrt),
    )
    with on_device(call.device):
        gradients = backward.new_gradients()
        execute.backward(
            backward.problem,
            call.layout,
            *(res.q, res.k, res.v, res.out, res.lse, dout, dlse),
            *gradients,
        )
    return Gradients(*gradients)


@takes_options
def attention_vjp(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    **options: Any,
) -> tuple[Any, Callable[..., Gradients]]:
    """Compute ``attention``, and return the function that pulls gradients back through it.

    Parameters
    ----------
    q, k, v, out : array
        As in ``attention``: (batch, seqlen, heads, head_dim) or another layout.
    return_lse : bool
        Return lse too, beside out.
    **options
        As in ``attention``.

    Returns
    -------
    out : array, or the pair (out, lse) if ``return_lse``
    vjp : callable
        ``vjp(dout, dlse=None, wrt=None) -> Gradients``, any number of times. It reads q, k, v, out
        and lse, those you hold: change none of them in place before its last call.

    Raises
    ------
    ArgumentError, DTypeError, UnsupportedError
        As in ``attention``.

    References
    ----------
    As ``attention_backward``.

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 3, 1, 2), np.float32)
    >>> out, vjp = cuattn.attention_vjp(q, k, v, causal=True)
    >>> vjp(np.ones_like(out)).dk.shape
    (1, 3, 1, 2)
    """
    check_flag("return_lse", return_lse)
    out, kept = _forward(q, k, v, out, options_of("attention_vjp", options), keep_lse=True)
    res = Residuals(*kept)

    def vjp(
        dout: Array | None, dlse: Array | None = None, wrt: Iterable[str] | None = None
    ) -> Gradients:
        return attention_backward(res, dout, dlse, wrt=wrt)

    return ((out, res.lse) if return_lse else out), vjp
