"""The options of a call: their names, defaults and meaning, before any array is looked at."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from cuattn._arrays import listed
from cuattn.errors import ArgumentError, DTypeError, UnsupportedError, explain_argument
from cuattn.planning.problem import Band

P = ParamSpec("P")
T = TypeVar("T")


class _NotGiven(int):
    """The offset 0 of a caller who gave none, and so leaves the choice to ``align``."""

    def __repr__(self) -> str:
        return "0"


NOT_GIVEN = _NotGiven(0)


class Options(NamedTuple):
    """Every option of a forward call but ``out``, with its default; design: section 2."""

    causal: bool = False
    window: Any = None
    align: str | None = None
    q_offset: int = NOT_GIVEN
    k_offset: int = NOT_GIVEN
    mask: Any = None
    bias: Any = None
    alibi_slopes: Any = None
    softcap: float | None = None
    sinks: Any = None
    score_mod: Any = None
    arrays: Any = None
    dropout_p: float = 0.0
    seed: Any = None
    softmax_scale: float | None = None
    layout: str = "bshd"
    precision: str | None = None
    out_dtype: Any = None
    deterministic: bool | None = None


#: Options whose only value so far is None.
UNSUPPORTED = (
    "window",
    "mask",
    "bias",
    "alibi_slopes",
    "softcap",
    "sinks",
    "score_mod",
    "arrays",
    "precision",
)


#: What options are called elsewhere, and what to do about it here.
_ELSEWHERE = {
    "is_causal": "causal=",
    "scale": "softmax_scale=",
    "sm_scale": "softmax_scale=",
    "attn_mask": "mask= (not available yet; leave None out)",
    "key_padding_mask": "mask= (not available yet)",
    "attn_bias": "bias= (not available yet)",
    "window_size": "window= (not available yet)",
    "logit_cap": "softcap= (not available yet)",
    "wrt": "it to vjp or attention_backward",
    "dout": "it to vjp or attention_backward",
    "dtype": "arrays of that dtype, or out_dtype=",
    "arch": "device=, where there is one",
    "enable_gqa": "nothing: k and v may have fewer heads than q",
    "query": "q",
    "key": "k",
    "value": "v",
}


def _unknown_option(function: str, name: str, known: Iterable[str]) -> TypeError:
    """Python's own error for a keyword that does not exist, with what may have been meant."""
    near = difflib.get_close_matches(name, known, 1, cutoff=0.75)
    meant = _ELSEWHERE.get(name) or (f"{near[0]}=" if near else "")
    hint = f"; pass {meant}" if meant else ""
    if name == "return_lse" and function == "attention_forward":
        hint = "; lse is in the residuals"
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def explains_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Have Python's error for an unknown keyword say what may have been meant."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError:
            for name in kwargs:
                if name not in known:
                    raise _unknown_option(function.__name__, name, known) from None
            raise

    return call


def options_of(function: str, given: dict[str, Any]) -> Options:
    """The options given by name, or Python's own error for one that does not exist."""
    for name in given:
        if name not in Options._fields:
            raise _unknown_option(function, name, Options._fields)
    return Options(**given)


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    if not isinstance(value, (bool, np.bool)):
        raise DTypeError(explain_argument(name, repr(value), "True or False", "pass a bool"))


def check_options(options: Options) -> None:
    """Types of the options that act, and the refusal of those that do not act yet."""
    for name in ("causal", "deterministic"):
        value = getattr(options, name)
        if not isinstance(value, (bool, np.bool)) and (name == "causal" or value is not None):
            expected = "True or False" if name == "causal" else "None, True or False"
            raise DTypeError(explain_argument(name, _typed(value), expected, "pass a bool"))
    for name in UNSUPPORTED:
        if getattr(options, name) is not None:
            raise UnsupportedError(
                f"{name}: this version of cuattn does not have this option yet; leave it out"
            )
    if options.seed is not None:
        seed = _integer("seed", options.seed)
        if not 0 <= seed < 2**64:
            remedy = "pass seed % 2**64"
            raise ArgumentError(explain_argument("seed", seed, "0 <= seed < 2**64", remedy))
    dropout_p = _real("dropout_p", options.dropout_p)
    if not 0.0 <= dropout_p < 1.0:
        remedy = "pass the fraction to drop"
        raise ArgumentError(explain_argument("dropout_p", dropout_p, "0 <= dropout_p < 1", remedy))
    if dropout_p:
        raise UnsupportedError(
            "dropout_p: this version of cuattn does not have this option yet; leave it at 0"
        )


def read_band(options: Options, seqlen_q: int, seqlen_k: int) -> Band:
    """Which keys a row sees: positions are q_offset + i and k_offset + j."""
    q_offset = _integer("q_offset", options.q_offset)
    k_offset = _integer("k_offset", options.k_offset)
    given = [
        name
        for name, value in (("q_offset", options.q_offset), ("k_offset", options.k_offset))
        if value is not NOT_GIVEN
    ]
    align = options.align
    if align is not None:
        if not isinstance(align, str):
            expected = "None, 'bottom_right' or 'top_left'"
            raise DTypeError(explain_argument("align", _typed(align), expected, "pass a str"))
        if align not in ("bottom_right", "top_left"):
            expected = "None, 'bottom_right' or 'top_left'"
            remedy = "say which corner of the score matrix the causal diagonal meets"
            raise ArgumentError(explain_argument("align", repr(align), expected, remedy))
        if given:
            got = f"{align!r} together with {listed(given)}"
            remedy = "align sets the offsets: pass one or the other"
            raise ArgumentError(explain_argument("align", got, "align or offsets", remedy))
        if align == "bottom_right":
            q_offset = seqlen_k - seqlen_q
    if not options.causal:
        if align is not None and seqlen_q != seqlen_k:
            remedy = "pass causal=True or drop align"
            expected = "an option that reads positions"
            raise ArgumentError(explain_argument("align", repr(align), expected, remedy))
        for name, value in (("q_offset", q_offset), ("k_offset", k_offset)):
            if value and align is None:
                remedy = f"pass causal=True or drop {name}"
                expected = "an option that reads positions"
                raise ArgumentError(explain_argument(name, value, expected, remedy))
        return Band.clamped(None, None, seqlen_q, seqlen_k)
    if seqlen_q != seqlen_k and align is None and not given:
        raise ArgumentError(
            explain_argument(
                "causal",
                f"seqlen_q {seqlen_q} and seqlen_k {seqlen_k} without positions",
                "align or q_offset/k_offset where the lengths differ",
                "pass align='bottom_right' (as FlashAttention), align='top_left' (as torch SDPA), "
                "q_offset= and, for a piece of a longer key space, k_offset=, where they begin; or "
                "check the layout",
            )
        )
    return Band.clamped(None, q_offset - k_offset, seqlen_q, seqlen_k)


def read_scale(asked: Any, head_dim: int, accumulator: str) -> float:
    """The factor of the scores: any finite real that the accumulator can hold."""
    if asked is None:
        return 1.0 / math.sqrt(head_dim)
    scale = _real("softmax_scale", asked)
    limits = np.finfo(accumulator)
    # Half of the largest number leaves room for a rounding; below the smallest normal one, the
    # scale itself would be rounded coarsely, or to 0.
    smallest, largest = float(limits.tiny), float(limits.max) / 2
    if not (scale == 0 or smallest <= abs(scale) < largest):
        remedy = "pass None for 1 / sqrt(head_dim)"
        expected = (
            f"0, or a magnitude from {smallest:.3g} to {largest:.3g}, as scores in {accumulator} "
            "allow"
        )
        raise ArgumentError(explain_argument("softmax_scale", asked, expected, remedy))
    return scale


def _typed(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"


def _integer(name: str, value: Any) -> int:
    """A Python or NumPy integer of any size; a bool is none."""
    if isinstance(value, numbers.Integral) and not isinstance(value, (bool, np.bool)):
        return int(value)
    raise DTypeError(explain_argument(name, _typed(value), "an integer", f"pass int({name})"))


def _real(name: str, value: Any) -> float:
    """A Python or NumPy real number; a bool is none."""
    if isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    raise DTypeError(explain_argument(name, _typed(value), "a real number", f"pass float({name})"))
