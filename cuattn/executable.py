"""A call made ready once and launched many times: what runs in loops and is captured in graphs.

``plan`` checks, compiles, loads and allocates; after that an ``Executable`` only compares what it
is given with what was planned, and launches.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np

from cuattn import execute
from cuattn._arrays import (
    ArraySpec,
    byte_bounds,
    check_writable,
    normal,
    on_device,
    share_memory,
    spec_of,
)
from cuattn._foreign import taken, taken_to_write, was_written
from cuattn._typing import Array
from cuattn.attention import prepare, takes_options
from cuattn.errors import ArgumentError, explain_argument
from cuattn.planning.options import check_flag, options_of
from cuattn.planning.validate import BackwardCall, ForwardCall, backward_call, names_in
from cuattn.residuals import Gradients


@takes_options
def plan(
    q: Array,
    k: Array,
    v: Array,
    *,
    return_lse: bool = False,
    out: Array | None = None,
    backward: bool = False,
    wrt: Iterable[str] | None = None,
    **options: Any,
) -> Executable:
    """Make a call of ``attention``, and its backward, ready to be launched again and again.

    Parameters
    ----------
    q, k, v : array
        As in ``attention``: (batch, seqlen, heads, head_dim) or another layout. Their looks count,
        not their elements: shapes, dtypes, strides and device are planned for.
    return_lse : bool
        Whether the executable returns lse beside out.
    out : array, optional
        What the executable writes unless it is given another; new memory by default.
    backward : bool
        Whether there will be ``run.backward``.
    wrt : collection of {"q", "k", "v"}, optional
        The inputs it differentiates; all of them by default.
    **options
        As in ``attention``.

    Returns
    -------
    run : Executable
        Compiled, loaded, with memory for its results and its workspace.

    Raises
    ------
    ArgumentError, DTypeError, UnsupportedError
        As in ``attention``.
    CompileError
        NVRTC is missing or refuses a kernel.

    Notes
    -----
    On a GPU planning waits for CuPy's current stream once. A call then neither allocates nor waits,
    so it can be captured in a CUDA graph. Unlike those of ``attention``, its results are the same
    memory at every call.

    References
    ----------
    As ``attention`` and ``attention_backward``; CUDA C++ Programming Guide, "CUDA Graphs".

    Examples
    --------
    >>> import numpy as np, cuattn
    >>> q = k = v = np.ones((1, 3, 1, 2), np.float32)
    >>> run = cuattn.plan(q, k, v, causal=True, backward=True)
    >>> out = run(q, k, v)
    >>> run.backward(np.ones_like(out)).dk.shape
    (1, 3, 1, 2)
    """
    check_flag("return_lse", return_lse)
    check_flag("backward", backward)
    if wrt is not None and not backward:
        remedy = "pass backward=True too, or drop wrt"
        raise ArgumentError(explain_argument("wrt", repr(wrt), "a plan with a backward", remedy))
    q, k, v = taken("q", q), taken("k", k), taken("v", v)
    native = None if out is None else taken_to_write("out", out)
    call = prepare(q, k, v, native, options_of("plan", options))
    with on_device(call.device):
        return Executable(call, out, native, bool(return_lse), bool(backward), names_in(wrt))


class Executable:
    """A planned call; ``plan`` makes it.

    Use it on one stream and from one thread at a time: results and workspace are the same memory at
    every call. A captured graph needs the executable, and the arrays it was given, to stay alive.

    Attributes
    ----------
    out : array, shape (batch, seqlen_q, heads_q, head_dim_v)
        What a call writes unless it is given another, in the planned layout.
    lse : array, shape (batch, heads_q, seqlen_q) less the axes left out, or None
        Likewise; None where neither lse nor a backward was planned.
    gradients : Gradients or None
        What ``backward`` writes: shapes and dtypes of q, k and v.
    """

    def __init__(
        self,
        call: ForwardCall,
        given: Array | None,
        out: Array | None,
        return_lse: bool,
        backward: bool,
        wrt: frozenset[str] | None,
    ) -> None:
        self._call, self._return_lse = call, return_lse
        #: What it writes where it is given nothing else, and the looks of all there is.
        self._own: dict[str, Array] = {}
        (self._own["out"],) = call.new_out() if out is None else (out,)
        self.out, self.lse = self._own["out"] if given is None else given, None
        if return_lse or backward:
            (self.lse,) = call.new_lse()
            self._own["lse"] = self.lse
        #: The arrays of the last forward.
        self._last: dict[str, Array] | None = None
        rows, dout = call.like_lse, call.like_out
        self._specs = {"q": call.q, "k": call.k, "v": call.v, "out": spec_of(self._own["out"])}
        self._specs |= {"lse": rows, "dout": dout, "dlse": rows}
        self.gradients: Gradients | None = None
        #: By whether dout and dlse are given.
        self._backwards: dict[tuple[bool, bool], BackwardCall] = {}
        if backward:
            for which in ((True, False), (True, True), (False, True)):
                asked = (
                    spec if is_given else None
                    for spec, is_given in zip((dout, rows), which, strict=True)
                )
                self._backwards[which] = backward_call(call, *asked, wrt)
            self.gradients = Gradients(*self._backwards[which].new_gradients())
            for name in ("dq", "dk", "dv"):
                gradient = getattr(self.gradients, name)
                if gradient is not None:
                    self._own[name], self._specs[name] = gradient, spec_of(gradient)
        self._apart: set[tuple[object, ...]] = set()
        self._bounds = {name: byte_bounds(spec) for name, spec in self._specs.items()}
        self._stream: Any = None
        self._workspace, self._zero = self._on_the_device()

    def _on_the_device(self) -> tuple[Any, Array | None]:
        """Compile, load, and allocate what all passes share: a workspace, and a zero for dout."""
        if self._call.device is None:
            return None, None
        problems = [self._call.problem, *(each.problem for each in self._backwards.values())]
        loaded = [execute.loaded_plan(each, self._call.device) for each in problems]
        size = max(each.workspace_bytes for each in loaded)
        zero = execute.zero_dout(self._call.out_dtype) if self._backwards else None
        cuda = sys.modules["cupy"].cuda
        workspace = cuda.alloc(size) if size else None
        cuda.get_current_stream().synchronize()  # the zero is there for any stream
        return workspace, zero

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        out: Array | None = None,
        lse: Array | None = None,
    ) -> Any:
        """Compute ``attention`` of arrays that look as the planned ones.

        Parameters
        ----------
        q, k, v : array
            Shapes, dtypes, strides and device as planned.
        out, lse : array, optional
            Where to write instead of its own; out like the planned one, lse C-contiguous.

        Returns
        -------
        out : array, or the pair (out, lse) if ``return_lse`` was planned
            Those given, else its own, which the next call writes again.

        Raises
        ------
        ArgumentError
            An array does not look as planned, an output overlaps another array, or the current
            stream is not the one used before.
        DTypeError
            No array.
        """
        arrays = {"q": taken("q", q), "k": taken("k", k), "v": taken("v", v)}
        for name, array in arrays.items():
            self._check_looks(name, array)
        if lse is not None and "lse" not in self._own:
            expected, remedy = "None, for none was planned", "plan with return_lse=True"
            raise ArgumentError(explain_argument("lse", "an array", expected, remedy))
        for name, given in (("out", out), ("lse", lse)):
            if given is not None:
                arrays[name] = taken_to_write(name, given)
                self._check_looks(name, arrays[name])
            elif name in self._own:
                arrays[name] = self._own[name]
            if name in arrays:
                check_writable(name, arrays[name])
        self._check_apart(("out", "lse"), arrays)
        call = self._call
        with on_device(call.device):
            self._check_stream()
            self._last = None  # an interrupted call leaves nothing to differentiate
            its = (arrays["q"], arrays["k"], arrays["v"], arrays["out"], arrays.get("lse"))
            execute.forward(call.problem, call.layout, *its, self._workspace_address())
        if self._backwards:
            self._last = arrays
        for name, given in (("out", self.out if out is None else out), ("lse", lse)):
            if given is not None and given is not arrays[name]:
                was_written(given)
        out = self.out if out is None else out
        if not self._return_lse:
            return out
        return out, (self.lse if lse is None else lse)

    def backward(self, dout: Array | None, dlse: Array | None = None) -> Gradients:
        """Gradients at the arrays of the last call, as ``attention_backward`` gives.

        Parameters
        ----------
        dout : array or None
            Shape and dtype of out, C-contiguous; None is 0.
        dlse : array, optional
            Shape and dtype of lse, C-contiguous; None is 0.

        Returns
        -------
        gradients : Gradients
            Its own arrays, with the shapes and dtypes of q, k and v; the next call writes them
            again.

        Raises
        ------
        ArgumentError
            No backward was planned, nothing was called yet, an array does not look as planned or
            overlaps a gradient, or the current stream is not the one used before.
        DTypeError
            No array.
        """
        if self.gradients is None:
            remedy = "plan with backward=True"
            raise ArgumentError(explain_argument("backward", "a call", "none in this plan", remedy))
        if self._last is None:
            got, expected = "a call before any forward", "the arrays of a forward"
            raise ArgumentError(explain_argument("backward", got, expected, "call run(q, k, v)"))
        if dout is None and dlse is None:
            expected = "dout, dlse or both"
            raise ArgumentError(explain_argument("dout", "None", expected, "pass one of them"))
        arrays = dict(self._last)
        for name, given in (("dout", dout), ("dlse", dlse)):
            if given is not None:
                arrays[name] = taken(name, given)
                self._check_looks(name, arrays[name])
        own = self._own
        self._check_apart(("dq", "dk", "dv"), arrays)
        backward, call = self._backwards[dout is not None, dlse is not None], self._call
        with on_device(call.device):
            self._check_stream()
            its = (arrays["q"], arrays["k"], arrays["v"], arrays["out"], arrays["lse"])
            cotangents = (arrays.get("dout", self._zero), arrays.get("dlse"))
            gradients = (own.get("dq"), own.get("dk"), own.get("dv"))
            given = (*its, *cotangents, *gradients, self._workspace_address())
            execute.backward(backward.problem, call.layout, *given)
        return self.gradients

    def release(self) -> None:
        """Wait for what it launched; then it may be used on another stream, or in another thread.

        A stream that is being captured cannot be waited for: end the capture first. One that every
        thread has for itself is waited for in its thread.

        Raises
        ------
        ArgumentError
            It was used on the per-thread stream of another thread.
        """
        if self._stream is not None:
            (_, thread), stream = self._stream
            if thread not in (0, threading.get_ident()):
                expected, remedy = f"thread {thread}, whose stream it is", "call release() there"
                got = f"thread {threading.get_ident()}"
                raise ArgumentError(explain_argument("thread", got, expected, remedy))
            with on_device(self._call.device):
                stream.synchronize()
        self._stream = None

    def __reduce__(self) -> NoReturn:
        # why: two would write the same memory, and neither would know
        raise TypeError("an Executable is not copied or pickled: make another plan")

    def __repr__(self) -> str:
        passes = "forward and backward" if self._backwards else "forward"
        looks = ", ".join(f"{name} {self._specs[name].shape}" for name in "qkv")
        return f"<cuattn.Executable: {passes} of {looks}, {self._call.problem.dtype}>"

    def _workspace_address(self) -> int:
        return 0 if self._workspace is None else self._workspace.ptr

    def _check_looks(self, name: str, array: Array) -> None:
        """As planned in shape, dtype, device and strides, but those that no element moves by."""
        spec, planned = spec_of(array), self._specs[name]
        if spec == planned or normal(spec) == normal(planned):
            return
        remedy = "make a plan for it"
        if name in ("dout", "dlse", "lse") and spec._replace(strides=planned.strides) == planned:
            remedy = f"pass it in C order: numpy.ascontiguousarray({name}), or CuPy's"
        got, expected = _look(spec), f"{_look(planned)}, as planned"
        raise ArgumentError(explain_argument(name, got, expected, remedy))

    def _check_apart(self, written: tuple[str, ...], arrays: dict[str, Array]) -> None:
        """What is written shares no memory with what else is there, nor with each other."""
        # Looks are as planned, so the addresses tell; those of a loop come back.
        key = (*arrays, *map(_address, arrays.values()))
        if key in self._apart:
            return
        everything = {name: self._own[name] for name in written if name in self._own} | arrays
        for name in written:
            for other in everything:
                if name != other and name in everything and self._meet(name, other, everything):
                    got, expected = f"memory that {other} uses too", "memory of its own"
                    remedy = f"pass {other}.copy(), or another array to write"
                    raise ArgumentError(explain_argument(name, got, expected, remedy))
        if len(self._apart) >= _REMEMBERED:
            self._apart.clear()
        self._apart.add(key)

    def _meet(self, one: str, other: str, arrays: dict[str, Array]) -> bool:
        (low, high), (begin, end) = self._bounds[one], self._bounds[other]
        at, where = _address(arrays[one]), _address(arrays[other])
        is_near = where + begin < at + high and at + low < where + end
        return is_near and share_memory(arrays[one], arrays[other])

    def _check_stream(self) -> None:
        """The stream of the call before, for another would write the same memory at any time."""
        if self._call.device is None:
            return
        stream = sys.modules["cupy"].cuda.get_current_stream()
        thread = threading.get_ident() if stream.ptr == _PER_THREAD else 0
        if self._stream is None:
            self._stream = (stream.ptr, thread), stream
        elif self._stream[0] != (stream.ptr, thread):
            got, expected = f"stream {stream.ptr:#x}", f"{self._stream[0][0]:#x}, used before"
            remedy = "call release() first, which waits for that one, or plan for each stream"
            raise ArgumentError(explain_argument("stream", got, expected, remedy))


#: The handle of the stream that every thread has for itself.
_PER_THREAD = 2

#: Addresses of calls that are known not to overlap.
_REMEMBERED = 256


def _address(array: Array) -> int:
    at: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return at


def _look(spec: ArraySpec) -> str:
    return f"shape {spec.shape}, dtype {spec.dtype}, strides {spec.strides} bytes, {spec.place}"
