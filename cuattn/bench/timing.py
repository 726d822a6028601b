"""The one timer: functions take turns, each for a burst of back-to-back calls; medians count."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

#: Calls between two events, and bursts that the median is taken of.
CALLS, REPEATS = 10, 7


def rounds(
    *functions: Callable[[], object],
    cupy: Any = None,
    calls: int = CALLS,
    repeats: int = REPEATS,
    warmups: int = 2,
    between: Callable[[], object] = lambda: None,
) -> list[list[float]]:
    """Seconds of one call of each function, round by round; every round asks all of them once.

    Parameters
    ----------
    *functions : callable
        What is compared, without arguments.
    cupy : module, optional
        Measure the device between two events on the current stream; the host's clock without it.
    calls, repeats : int
        Calls of a burst, and bursts.
    warmups : int
        Calls of each beforehand.
    between : callable
        Runs after every burst, off the clock: for a host's clock, to let the device catch up.
    """
    burst = _host_burst if cupy is None else _device_burst
    for function in functions:
        burst(cupy, function, warmups)
        between()
    seconds: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats):
        for function, own in zip(functions, seconds, strict=True):
            own.append(burst(cupy, function, calls) / calls)
            between()
    return seconds


def medians(*functions: Callable[[], object], **how: Any) -> list[float]:
    """Median seconds of one call of each function; ``how`` as in ``rounds``."""
    return [statistics.median(own) for own in rounds(*functions, **how)]


def _host_burst(_: Any, function: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter()
    for _call in range(calls):
        function()
    return time.perf_counter() - begin


def _device_burst(cupy: Any, function: Callable[[], object], calls: int) -> float:
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    for _call in range(calls):
        function()
    end.record()
    end.synchronize()
    milliseconds: float = cupy.cuda.get_elapsed_time(begin, end)
    return milliseconds / 1e3
