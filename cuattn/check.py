"""Does it compute right here? ``python -m cuattn check``: small problems against the dense formula.

Each problem runs forward and backward on one engine, and every result is judged by the one
tolerance rule (``cpu.tolerance``). The number shown is the worst error over its bound.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the dtype name "bfloat16")
import numpy as np

from cuattn import execute
from cuattn._arrays import LAYOUTS
from cuattn._typing import ACCUMULATOR, Array
from cuattn.attention import attention_backward, attention_forward, prepare
from cuattn.cpu.tolerance import compare, expected_backward, expected_forward
from cuattn.explain import both_passes
from cuattn.planning.families import FAMILIES
from cuattn.planning.options import Options
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.select import plan_for
from cuattn.precompile import build

RESULTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """One call. Sizes are (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v)."""

    title: str
    dtype: str
    sizes: tuple[int, int, int, int, int, int, int]
    options: dict[str, Any] = field(default_factory=dict)
    strides: str = "contiguous"

    def arrays(self, xp: Any) -> list[Array]:
        """q, k, v and dout on the engine's side, in the layout and strides of the problem."""
        batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v = self.sizes
        shapes = (
            (batch, seqlen_q, heads_q, dim),
            (batch, seqlen_k, heads_kv, dim),
            (batch, seqlen_k, heads_kv, dim_v),
            (batch, seqlen_q, heads_q, dim_v),
        )
        layout = LAYOUTS[self.options.get("layout", "bshd")]
        out_dtype = self.options.get("out_dtype", self.dtype)
        dtypes = (self.dtype, self.dtype, self.dtype, out_dtype)
        rng = np.random.default_rng(0)
        return [
            strided(xp, rng.standard_normal(layout.own(shape)).astype(dtype), self.strides)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]


def strided(xp: Any, array: Array, kind: str) -> Array:
    """Copy to ``xp``'s side, into memory that is laid out in another way."""
    # why as integers: a copy of bits needs nothing of a library's bfloat16
    bits = xp.asarray(array.view(f"u{array.itemsize}"))
    if kind == "transposed":
        view = xp.empty(bits.shape[::-1], bits.dtype).T
    elif kind == "sliced":
        nan = np.iinfo(bits.dtype).max  # every bit set is a NaN of every dtype
        around = xp.full([2 * length + 1 for length in bits.shape], nan, bits.dtype)
        view = around[tuple(slice(1, 2 * length + 1, 2) for length in bits.shape)]
    elif kind == "reversed":
        view = xp.empty(bits.shape, bits.dtype)[tuple(slice(None, None, -1) for _ in bits.shape)]
    elif kind == "broadcast":
        return xp.broadcast_to(bits[:1], bits.shape).view(array.dtype)
    else:
        return bits.view(array.dtype)
    view[...] = bits
    return view.view(array.dtype)


def problems() -> Iterator[Problem]:
    """About fifty problems: every dtype, and each thing that can go wrong in one of them."""
    causal = {"causal": True}
    last: dict[str, Any] = {"causal": True, "align": "bottom_right"}
    ahead: dict[str, Any] = {"causal": True, "q_offset": 9}
    for dtype in ACCUMULATOR:
        yield Problem("one tile", dtype, (1, 16, 16, 1, 1, 16, 16))
        yield Problem("many tiles", dtype, (1, 200, 200, 2, 2, 64, 64))
        yield Problem("many tiles", dtype, (1, 200, 200, 2, 2, 64, 64), causal)
        yield Problem("ragged", dtype, (2, 67, 131, 2, 2, 40, 24), last)
        yield Problem("ragged", dtype, (2, 131, 67, 2, 2, 40, 24), last)  # rows that see no key
        yield Problem("grouped heads", dtype, (2, 33, 65, 6, 2, 32, 32))
        yield Problem("odd head dims", dtype, (1, 50, 50, 2, 1, 33, 7), causal)
        yield Problem("wide head dims", dtype, (1, 40, 40, 1, 1, 264, 136), causal)
    for dtype in ("float16", "bfloat16"):
        yield Problem("float32 out", dtype, (1, 70, 70, 2, 2, 64, 64), {"out_dtype": "float32"})
    for strides in ("transposed", "sliced", "reversed", "broadcast"):
        yield Problem(strides, "float32", (2, 37, 37, 2, 2, 16, 16), causal, strides)
    for sizes in ((0, 8, 8, 2, 2, 8, 8), (1, 0, 8, 2, 2, 8, 8), (1, 8, 0, 2, 2, 8, 8)):
        yield Problem("zero size", "float32", sizes)
    yield Problem("bhsd", "float32", (2, 37, 37, 2, 2, 16, 16), {"layout": "bhsd"})
    yield Problem("positions", "float32", (1, 60, 90, 2, 2, 16, 16), ahead)
    yield Problem("scale", "float32", (1, 60, 60, 2, 2, 16, 16), {"softmax_scale": -0.5})
    for dtype in ACCUMULATOR:  # enough blocks for the large tiles of a large device
        yield Problem("many heads", dtype, (140, 16, 16, 1, 1, 16, 16), causal)


def judge(problem: Problem, xp: Any) -> dict[str, float]:
    """Run a problem; the worst error over its bound, of every result (at most 1 is right)."""
    q, k, v, dout = problem.arrays(xp)
    out, res = attention_forward(q, k, v, **problem.options)
    grads = attention_backward(res, dout)
    forward = res.call.problem
    band, scale = forward.band, forward.softmax_scale
    view = res.call.layout.view
    q, k, v, dout = map(view, problem.arrays(np))
    out, dq, dk, dv = (view(_host(array)) for array in (out, grads.dq, grads.dk, grads.dv))
    actual = out, _host(res.lse), dq, dk, dv
    to_zero = rounds_to_zero(forward, xp)
    meaning: dict[str, Any] = {"band": band, "softmax_scale": scale, "rounds_to_zero": to_zero}
    expected = (
        *expected_forward(q, k, v, **meaning, out_dtype=out.dtype),
        *expected_backward(q, k, v, out, dout, None, **meaning),
    )
    pairs = zip(RESULTS, actual, expected, strict=True)
    return {name: compare(array, wanted).ratio for name, array, wanted in pairs}


def rounds_to_zero(problem: AttentionProblem, xp: Any) -> bool:
    """Whether the family that answers on the current device does so with its sums."""
    if xp is np:
        return False
    chosen = plan_for(problem, execute.cuda_device(xp.cuda.Device().id)).family
    return next(family.rounds_to_zero for family in FAMILIES if family.name == chosen)


def _host(array: Array) -> Any:
    """A NumPy array of the same values."""
    return array if isinstance(array, np.ndarray) else array.get()


def cuda_or_why() -> str:
    """Why this process has no CUDA device, or an empty string where it has one."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy is not importable ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy finds no usable driver or device ({error})"
    return "" if count else "CuPy finds no device"


def check(engine: str | None = None) -> int:
    """Run every problem, print a table, and return the number of those that went wrong.

    Parameters
    ----------
    engine : {"numpy", "cuda"}, optional
        The engine to ask; CUDA where there is a device, else the CPU engine.
    """
    trouble = "" if engine == "numpy" else cuda_or_why()
    if engine == "cuda" and trouble:
        print(f"engine cuda: {trouble}; `python -m cuattn info` says what to do", file=sys.stderr)
        return 1
    if engine == "numpy" or trouble:
        xp: Any = np
        print("engine numpy" + (f": {trouble}" if trouble else ""))
    else:
        xp = _prepared_cupy()
    print(f"{'problem':21} {'dtype':9} {'batch x q x k x heads x dims':28}" + _columns(RESULTS))
    begin, asked, wrong = time.perf_counter(), 0, 0
    for problem in problems():
        asked += 1
        print(_name(problem), end="", flush=True)
        try:
            ratios = judge(problem, xp)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next problem says more
            wrong += 1
            print(f"  {type(error).__name__}: {error}")
            continue
        right = max(ratios.values()) <= 1
        wrong += not right
        print(_columns(f"{ratios[name]:.2f}" for name in RESULTS) + ("" if right else "  WRONG"))
    seconds = time.perf_counter() - begin
    print(f"{asked - wrong} of {asked} right in {seconds:.1f} s (worst error over its bound: <= 1)")
    return wrong


def _prepared_cupy() -> Any:
    """CuPy, once the kernels that the problems choose are compiled, side by side."""
    import cupy

    device_id = cupy.cuda.Device().id
    device = execute.cuda_device(device_id)
    name = cupy.cuda.runtime.getDeviceProperties(device_id)["name"].decode()
    print(f"engine cuda: {name}, {device.arch}")
    begin, specs = time.perf_counter(), []
    for problem in problems():
        q, k, v, _ = problem.arrays(np)
        for asked in both_passes(prepare(q, k, v, None, Options(**problem.options))):
            specs += [launch.kernel for launch in plan_for(asked, device).launches]
    count = sum(1 for _ in build(specs, device.arch))
    print(f"{count} kernels ready in {time.perf_counter() - begin:.1f} s")
    return cupy


def _name(problem: Problem) -> str:
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v = problem.sizes
    title = problem.title + (" causal" if problem.options.get("causal") else "")
    sizes = f"{batch} x {seqlen_q} x {seqlen_k} x {heads_q}/{heads_kv} x {dim}/{dim_v}"
    return f"{title:21} {problem.dtype:9} {sizes:28}"


def _columns(texts: Iterable[str]) -> str:
    return "".join(f"{text:>6}" for text in texts)
