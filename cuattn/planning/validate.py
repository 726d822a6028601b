"""Arguments become an AttentionProblem, or an error that names the argument.

Pure: it reads ``ArraySpec`` and option values, never an array, so every rule is testable with
shapes alone, and one result serves every later call that looks the same.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from cuattn._arrays import (
    DTYPE_NAMES,
    ArraySpec,
    Layout,
    NewArrays,
    check_dtype,
    check_like,
    check_together,
    layout_for,
    listed,
    normal,
    overlaps_itself,
    parse_dtype,
)
from cuattn._foreign import NEW_OUT
from cuattn._typing import ACCUMULATOR
from cuattn.errors import ArgumentError, CuattnError, DTypeError, explain_argument
from cuattn.planning.options import Options, check_options, read_band, read_scale
from cuattn.planning.problem import AttentionProblem, Layouts, Strides

T = TypeVar("T")

#: Looks of a call that are remembered; the least recently used is forgotten.
REMEMBERED = 1024

#: Row and key indices, also one tile past the end, fit 32 bits.
MAX_SEQLEN = 2**30 - 4096

#: Input names that have a gradient; those that this version takes come first.
GIVEN_INPUTS = ("q", "k", "v")
COTANGENT = "broadcast it to that shape, or pass None for zero"
DIFFERENTIABLE = (*GIVEN_INPUTS, "bias", "alibi_slopes", "sinks")


def remembered(check: Callable[..., T]) -> Callable[..., T]:
    """Keep results of a pure check by the values and types of its arguments; errors are not kept.

    Types count, so 1, True and 1.0 are three different options.
    """
    lookup = functools.lru_cache(maxsize=REMEMBERED, typed=True)(check)

    @functools.wraps(check)
    def call(*arguments: Any) -> T:
        try:
            return lookup(*arguments)
        except CuattnError:
            raise
        except (TypeError, ValueError):  # an argument without a hash: an error to explain
            return check(*arguments)

    return call


@dataclass(frozen=True, slots=True, eq=False)
class ForwardCall:
    """A checked call: the problem, and what to make for it in the caller's layout."""

    problem: AttentionProblem
    layout: Layout
    device: int | None
    q: ArraySpec
    k: ArraySpec
    v: ArraySpec
    out_shape: tuple[int, ...]
    out_dtype: np.dtype[Any]
    lse_shape: tuple[int, ...]
    lse_dtype: np.dtype[Any]
    new_out: NewArrays
    new_lse: NewArrays
    new_out_and_lse: NewArrays

    @property
    def like_out(self) -> ArraySpec:
        """An array like out, in C order."""
        return contiguous(self.out_shape, self.out_dtype)._replace(device=self.device)

    @property
    def like_lse(self) -> ArraySpec:
        """An array like lse, in C order."""
        return contiguous(self.lse_shape, self.lse_dtype)._replace(device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class BackwardCall:
    """A checked backward: the problem, and the gradients to make for it: dq, dk and dv."""

    problem: AttentionProblem
    new_gradients: NewArrays


@remembered
def forward_call(
    q: ArraySpec, k: ArraySpec, v: ArraySpec, out: ArraySpec | None, *values: Any
) -> ForwardCall:
    """Check a forward call; ``values`` are those of ``Options``, in its order."""
    options = Options(*values)
    dtype = check_dtype("q", q)
    check_together("q", q, "q", q)
    for name, spec in (("k", k), ("v", v)):
        check_together(name, spec, "q", q)
        check_dtype(name, spec)
        check_like(name, spec, spec.shape, q.dtype, " like q", "")
    layout = layout_for(options.layout, "q", q.shape)
    batch, seqlen_q, heads_q, head_dim = layout.canonical(q.shape, 1)
    seqlen_k, heads_kv, head_dim_v = _check_shapes(layout, q, k, v)
    check_options(options)
    allowed = {dtype, ACCUMULATOR[dtype]}
    out_name = parse_dtype("out_dtype", options.out_dtype, dtype, allowed)
    out_dtype, lse_dtype = np.dtype(out_name), np.dtype(ACCUMULATOR[dtype])
    out_shape = layout.own((batch, seqlen_q, heads_q, head_dim_v))
    if out is not None:
        check_out(out, q, out_shape, out_dtype)
    problem = AttentionProblem(
        op="forward",
        dtype=dtype,
        out_dtype=out_name,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads_q=heads_q,
        num_heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        band=read_band(options, seqlen_q, seqlen_k),
        softmax_scale=read_scale(options.softmax_scale, head_dim, ACCUMULATOR[dtype]),
        deterministic=options.deterministic,
        layouts=Layouts(
            q=_strides(layout, q),
            k=_strides(layout, k),
            v=_strides(layout, v),
            out=_strides(layout, out or contiguous(out_shape, out_dtype)),
        ),
    )
    lse_shape = layout.own_lse((batch, heads_q, seqlen_q))
    its_out, its_lse = (out_shape, out_dtype), (lse_shape, lse_dtype)
    return ForwardCall(
        problem,
        layout,
        q.device,
        *(q, k, v),
        *its_out,
        *its_lse,
        new_out=NewArrays.of(q.device, its_out),
        new_lse=NewArrays.of(q.device, its_lse),
        new_out_and_lse=NewArrays.of(q.device, its_out, its_lse),
    )


@remembered
def moved_call(
    call: ForwardCall, q: ArraySpec, k: ArraySpec, v: ArraySpec, out: ArraySpec, lse: ArraySpec
) -> ForwardCall:
    """The same call of arrays that may have other strides, all but lse."""
    given = {"q": (q, call.q), "k": (k, call.k), "v": (v, call.v)}
    given |= {"out": (out, call.like_out), "lse": (lse, call.like_lse)}
    for name, (spec, like) in given.items():
        check_together(name, spec, "the residuals'", like)
        check_like(name, spec, like.shape, like.dtype, " as in the residuals", "pass what was kept")
    if normal(lse) != normal(call.like_lse):
        remedy = "pass numpy.ascontiguousarray(lse), or CuPy's"
        raise ArgumentError(explain_argument("lse", f"strides {lse.strides}", "C order", remedy))
    layout = call.layout
    layouts = Layouts(
        _strides(layout, q), _strides(layout, k), _strides(layout, v), _strides(layout, out)
    )
    if layouts == call.problem.layouts:
        return call
    return replace(call, problem=replace(call.problem, layouts=layouts), q=q, k=k, v=v)


@remembered
def backward_call(
    call: ForwardCall, dout: ArraySpec | None, dlse: ArraySpec | None, wrt: frozenset[str] | None
) -> BackwardCall:
    """Check a backward call, which asks for the gradients of the inputs named in ``wrt``."""
    layout, layouts = call.layout, call.problem.layouts
    if dout is not None:
        check_together("dout", dout, "q", call.q)
        check_like("dout", dout, call.out_shape, call.out_dtype, " like out", COTANGENT)
        layouts = replace(layouts, dout=_strides(layout, dout))
    if dlse is not None:
        check_together("dlse", dlse, "q", call.q)
        check_like("dlse", dlse, call.lse_shape, call.lse_dtype, " like lse", COTANGENT)
        batch, heads, seqlen = layout.canonical_lse(_in_elements(dlse), 0)
        layouts = replace(layouts, dlse=(batch, heads, seqlen))
    names = GIVEN_INPUTS if wrt is None else _check_wrt(wrt)
    asked = [
        (getattr(call, name).shape, call.q.dtype) if name in names else None
        for name in GIVEN_INPUTS
    ]
    dq, dk, dv = (each and _strides(layout, contiguous(*each)) for each in asked)
    layouts = replace(layouts, dq=dq, dk=dk, dv=dv)
    return BackwardCall(
        replace(call.problem, op="backward", wrt=names, layouts=layouts),
        NewArrays.of(call.device, *asked),
    )


def names_in(wrt: Iterable[str] | None) -> frozenset[str] | None:
    """``wrt`` as a set that may be remembered."""
    if wrt is None:
        return None
    if isinstance(wrt, Iterable) and not isinstance(wrt, (str, bytes)):
        with contextlib.suppress(TypeError, ValueError):  # a name that has no hash
            return frozenset(wrt)
    expected = "None or a collection of argument names"
    remedy = f"pass a set, for example {{'q'}}, out of {listed(map(repr, GIVEN_INPUTS))}"
    raise DTypeError(explain_argument("wrt", repr(wrt), expected, remedy))


def _check_wrt(wrt: frozenset[str]) -> tuple[str, ...]:
    allowed = listed(map(repr, GIVEN_INPUTS))
    if not wrt:
        remedy = "pass None for all of them"
        raise ArgumentError(explain_argument("wrt", "no name", f"some of {allowed}", remedy))
    for name in sorted(wrt, key=repr):
        if name not in GIVEN_INPUTS:
            why = " (an input not given)" if name in DIFFERENTIABLE else ""
            remedy = "name arguments of the forward call, or pass None for all of them"
            got = f"{name!r}{why}"
            raise ArgumentError(explain_argument("wrt", got, f"some of {allowed}", remedy))
    return tuple(name for name in GIVEN_INPUTS if name in wrt)


# Shapes and dtypes ---------------------------------------------------------------------------


def _check_shapes(layout: Layout, q: ArraySpec, k: ArraySpec, v: ArraySpec) -> tuple[int, int, int]:
    """Compare the axes of q, k and v; returns (seqlen_k, heads_kv, head_dim_v)."""
    for name, spec in (("k", k), ("v", v)):
        if len(spec.shape) != len(q.shape):
            expected = f"{len(q.shape)} axes ({layout.letters}) like q"
            remedy = "give q, k and v the same axes; heads_kv may be smaller than heads_q"
            raise ArgumentError(explain_argument(name, f"shape {spec.shape}", expected, remedy))
    batch, seqlen_q, heads_q, head_dim = layout.canonical(q.shape, 1)
    batch_k, seqlen_k, heads_kv, head_dim_k = layout.canonical(k.shape, 1)
    batch_v, seqlen_v, heads_v, head_dim_v = layout.canonical(v.shape, 1)

    def require(holds: bool, name: str, spec: ArraySpec, expected: str, remedy: str) -> None:
        if not holds:
            got = f"shape {spec.shape} with layout={layout.letters!r}"
            raise ArgumentError(explain_argument(name, got, expected, remedy))

    require(batch_k == batch, "k", k, f"batch {batch} like q", "broadcast k over the batch")
    require(batch_v == batch, "v", v, f"batch {batch} like q", "broadcast v over the batch")
    require(head_dim >= 1, "q", q, "head_dim of at least 1", "pass at least one feature")
    require(head_dim_k == head_dim, "k", k, f"head_dim {head_dim} like q", "check the layout")
    require(seqlen_v == seqlen_k, "v", v, f"seqlen_k {seqlen_k} like k", "give each key a value")
    require(heads_v == heads_kv, "v", v, f"{heads_kv} heads like k", "give each key head a value")
    require(head_dim_v >= 1, "v", v, "head_dim_v of at least 1", "pass at least one feature")
    multiple = heads_q == 0 if heads_kv == 0 else heads_q % heads_kv == 0
    expected = f"a number of heads that divides the {heads_q} heads of q"
    require(multiple, "k", k, expected, "repeat heads of k and v, or check the layout")
    longest = f"a sequence below {MAX_SEQLEN}"
    require(seqlen_q < MAX_SEQLEN, "q", q, longest, "split q into pieces")
    require(seqlen_k < MAX_SEQLEN, "k", k, longest, "split k and v and use merge_states")
    return seqlen_k, heads_kv, head_dim_v


def check_out(out: ArraySpec, q: ArraySpec, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Where a result may be written: exact shape and dtype, and no element twice."""
    check_together("out", out, "q", q)
    if out.dtype != dtype and out.dtype == ACCUMULATOR[DTYPE_NAMES[q.dtype]]:
        remedy = f"pass out_dtype='{out.dtype}' too, for a result that is not rounded"
        raise DTypeError(
            explain_argument("out", f"dtype {out.dtype}", f"dtype {dtype} like q", remedy)
        )
    check_like("out", out, shape, out.dtype, "", NEW_OUT)
    if out.dtype != dtype:  # a conversion would take the result and be dropped
        raise DTypeError(
            explain_argument("out", f"dtype {out.dtype}", f"dtype {dtype} like q", NEW_OUT)
        )
    if overlaps_itself(out):
        got, expected = f"strides {out.strides} bytes", "elements that do not share memory"
        raise ArgumentError(explain_argument("out", got, expected, NEW_OUT))


def contiguous(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ArraySpec:
    """What ``NewArrays`` will make."""
    strides, step = [], dtype.itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return ArraySpec(shape, tuple(reversed(strides)), dtype)


def _in_elements(spec: ArraySpec) -> tuple[int, ...]:
    """Strides in elements; rounded down where a NumPy array is packed tighter than its dtype."""
    return tuple(stride // spec.dtype.itemsize for stride in spec.strides)


def _strides(layout: Layout, spec: ArraySpec) -> Strides:
    batch, seqlen, heads, dim = layout.canonical(_in_elements(spec), 0)
    return batch, seqlen, heads, dim
