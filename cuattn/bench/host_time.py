"""Host time of a repeated call: ``python -m cuattn.bench.host_time [--json PATH]``.

Microseconds a call, without waiting for the device inside a burst: the least of many bursts, for
whatever else the machine does can only add to it, and for the total the median too. A total is of
calls with the same arrays, "in turn" of calls with two sets of them, as the layers of a model have.
The parts come from leaving work out: without the engine (nothing is launched), and the allocations
alone; what is left of the first is the launch (with the workspace of a backward), of the second
cuattn's own Python. Beside them stands what the device needs, from replays of a graph of calls:
where that is more, the host is ahead and its time does not show. Where there is no device, NumPy
arrays without an engine show the Python part.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest import mock

import numpy as np

import cuattn
from cuattn import execute
from cuattn._arrays import NewArrays
from cuattn.bench.report import parser, write
from cuattn.bench.timing import rounds
from cuattn.bench.workloads import normal
from cuattn.check import cuda_or_why

#: (batch, seqlen, heads, head_dim): a 16-bit backward is one kernel whose tile holds all keys, one
#: whose two loops run side by side, and three kernels.
SHAPES = (1, 64, 4, 64), (1, 256, 4, 64), (4, 512, 16, 64)
DTYPES = "bfloat16", "float32"
#: Calls of a burst: fewer than a stream takes before its host waits.
CALLS, REPEATS = 50, 60


def _microseconds(xp: Any, function: Callable[[], object]) -> tuple[float, float]:
    """Per call, the least and the median burst; the device catches up between bursts."""
    catch_up = (lambda: None) if xp is np else xp.cuda.Device().synchronize
    (seconds,) = rounds(function, calls=CALLS, repeats=REPEATS, between=catch_up)
    return 1e6 * min(seconds), 1e6 * statistics.median(seconds)


def _device_microseconds(xp: Any, function: Callable[[], object]) -> float:
    """Per call, the least burst of a graph that holds a tenth of its calls."""
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(CALLS // 10):
            function()  # so that the kernels are loaded, and this stream has memory
        stream.synchronize()
        stream.begin_capture()
        for _ in range(CALLS // 10):
            function()
        graph = stream.end_capture()
        (seconds,) = rounds(graph.launch, cupy=xp, calls=10, repeats=REPEATS)
    return 1e6 * min(seconds) / (CALLS // 10)


def _calls(q: Any, k: Any, v: Any, dout: Any) -> dict[str, Callable[[], None]]:
    """What is timed, on these arrays."""
    _, res = cuattn.attention_forward(q, k, v)

    def forward() -> None:
        cuattn.attention(q, k, v)

    def backward() -> None:
        cuattn.attention_backward(res, dout)

    def both() -> None:
        _, its = cuattn.attention_forward(q, k, v)
        cuattn.attention_backward(its, dout)

    return {"forward": forward, "backward": backward, "forward+backward": both}


def _in_turn(*functions: Callable[[], None]) -> Callable[[], None]:
    turn = itertools.cycle(functions)
    return lambda: next(turn)()


def measure(xp: Any, dtype: str, shape: tuple[int, ...] = SHAPES[0]) -> list[dict[str, Any]]:
    """One row for the forward, one for the backward, one for both."""
    q, k, v, dout = normal(xp, 4, shape, dtype)
    device = None if xp is np else q.device.id
    out, res = cuattn.attention_forward(q, k, v)
    calls, others = _calls(q, k, v, dout), _calls(*normal(xp, 4, shape, dtype))

    def new(*arrays: Any) -> NewArrays:
        return NewArrays.of(device, *((array.shape, array.dtype) for array in arrays))

    new_forward, new_backward = new(out, res.lse), new(q, k, v)

    def new_both() -> None:
        new_forward()
        new_backward()

    rows = []
    allocations: tuple[Callable[[], object], ...] = new(out), new_backward, new_both
    for name, allocate in zip(calls, allocations, strict=True):
        call = calls[name]
        with no_engine():
            without, _ = _microseconds(xp, call)
        allocation, _ = _microseconds(xp, allocate)
        row: dict[str, Any] = {"dtype": dtype, "seqlen": shape[1], "pass": name}
        row |= {"allocation": allocation, "own": without - allocation}
        if xp is not np:
            row["total"], row["median"] = _microseconds(xp, call)
            row["in turn"], row["its median"] = _microseconds(xp, _in_turn(call, others[name]))
            row["launch"] = row["total"] - without
            row["device"] = _device_microseconds(xp, call)
        rows.append(row)
    return rows


@contextlib.contextmanager
def no_engine() -> Iterator[None]:
    """Everything but the engine: calls are checked, outputs allocated and left as they are."""

    def nothing(*_: object) -> None:
        pass

    with (
        mock.patch.object(execute, "forward", nothing),
        mock.patch.object(execute, "backward", nothing),
    ):
        yield


def main() -> int:
    """Print the parts of every row."""
    arguments = parser(__doc__).parse_args()
    trouble = cuda_or_why()
    if trouble:
        print(f"NumPy arrays, no engine: {trouble}")
    xp = np if trouble else import_module("cupy")
    rows = [row for dtype in DTYPES for shape in SHAPES for row in measure(xp, dtype, shape)]
    for row in rows:
        parts = ", ".join(f"{part} {row[part]:.1f}" for part in list(row)[3:])
        print(f"{row['dtype']:8} {row['seqlen']:5} {row['pass']:17} us a call: {parts}")
    write(arguments.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
