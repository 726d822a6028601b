"""Calls of many kinds with known results, and what a whole cache folder looks like.

What threads, processes, devices and allocators run at once: each call gives arrays whose bits are
known, because the forward always repeats its bits and a deterministic backward does.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from calls import check_backward, check_forward, same_bits
from strategies import Problem

import cuattn

PROBLEMS = (
    Problem("float32", "bshd", 1, 33, 33, 1, 2, 16, 16, causal=True),
    Problem("float32", "hsd", 1, 17, 40, 2, 1, 33, 8, causal=True, align="bottom_right"),
    Problem("float16", "bhsd", 2, 16, 40, 1, 1, 16, 16, out_dtype="float32"),
    Problem("float16", "bshd", 1, 20, 20, 1, 1, 64, 64, strides=("transposed",) * 4),
    Problem("bfloat16", "bshd", 1, 40, 17, 1, 2, 16, 8, causal=True, q_offset=-3),
    Problem("bfloat16", "sd", 1, 65, 33, 1, 1, 80, 80, softmax_scale=-0.5),
    Problem("float64", "bshd", 1, 16, 33, 1, 1, 8, 8, strides=("sliced",) * 4),
    Problem("float64", "shd", 1, 9, 9, 2, 1, 3, 5, use_dout=False),
)

Call = Callable[[], list[Any]]


def mixed_calls(engine: Any) -> list[tuple[str, Call]]:
    """Forwards, backwards and merges of the problems in dtypes that an engine takes."""
    calls = []
    for problem in PROBLEMS:
        if problem.dtype in engine.dtypes:
            arrays = [engine.asarray(each) for each in problem.arrays()]
            given = [each and engine.asarray(each[0]) for each in _boxed(problem.cotangents())]
            calls += [
                (f"{op.__name__} of {problem}", _bound(op, problem, arrays, given))
                for op in (_forward, _backward, _merge)
            ]
    return calls


def _boxed(arrays: Any) -> list[Any]:
    return [None if each is None else (each,) for each in arrays]


def _bound(op: Any, *arguments: Any) -> Call:
    return lambda: op(*arguments)


def _forward(problem: Problem, arrays: list[Any], _given: list[Any]) -> list[Any]:
    return list(cuattn.attention(*arrays, **problem.options, return_lse=True))


def _backward(problem: Problem, arrays: list[Any], given: list[Any]) -> list[Any]:
    _, vjp = cuattn.attention_vjp(*arrays, **problem.options, deterministic=True)
    gradients = vjp(*given)
    return [gradients.dq, gradients.dk, gradients.dv]


def _merge(problem: Problem, arrays: list[Any], _given: list[Any]) -> list[Any]:
    """Of what all rows see, and of what rows see of the same keys without a mask."""
    parts = [
        cuattn.attention(*arrays, return_lse=True, **options)
        for options in (
            problem.options,
            {"layout": problem.layout, "out_dtype": problem.options.get("out_dtype")},
        )
    ]
    return list(cuattn.merge_states(parts, layout=problem.layout))


def known_results(engine: Any, calls: list[tuple[str, Call]]) -> list[list[np.ndarray]]:
    """What each call gives alone, after the oracle accepted the problems."""
    for problem in PROBLEMS:
        if problem.dtype in engine.dtypes:
            check_forward(engine, problem)
            check_backward(engine, problem, deterministic=True)
    return [on_host(engine, call()) for _, call in calls]


def on_host(engine: Any, arrays: list[Any]) -> list[np.ndarray]:
    return [engine.asnumpy(each) for each in arrays]


def wrong_calls(
    engine: Any,
    calls: list[tuple[str, Call]],
    known: list[list[np.ndarray]],
    *,
    num_threads: int,
    num_calls: int,
    around: Callable[[int], Any],
) -> list[str]:
    """What went wrong in threads that all make so many of the calls, each in its own order.

    ``around(i)`` is the context in which thread i runs.
    """
    start, wrong = threading.Barrier(num_threads), []

    def run(thread: int) -> None:
        rng, done = random.Random(thread), 0
        try:
            with around(thread):
                start.wait(timeout=60)
                for done in range(num_calls):
                    at = rng.randrange(len(calls))
                    if not all(map(same_bits, on_host(engine, calls[at][1]()), known[at])):
                        wrong.append(f"call {done} of thread {thread}: {calls[at][0]}")
        except BaseException as error:  # noqa: BLE001 - whatever it is, the test must show it
            wrong.append(f"call {done} of thread {thread}: {error!r}")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=300)
    return wrong + ["a thread hangs"] * any(thread.is_alive() for thread in threads)


def stored_kernels(directory: Path) -> list[str]:
    """Names of the kernels in a cache folder, all of whose entries are whole, and nothing else."""
    folders = sorted(directory.glob("*/*"))
    assert [each.name for each in folders if each.name.startswith(".")] == []
    names = []
    for folder in folders:
        assert {each.name for each in folder.iterdir()} == {"unit.cu", "kernel.cubin", "meta.json"}
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        cubin = (folder / "kernel.cubin").read_bytes()
        assert meta["cubin_sha256"] == hashlib.sha256(cubin).hexdigest()
        assert meta["cubin_bytes"] == len(cubin) > 0
        assert folder.name == f"{meta['name']}.{meta['key'][:16]}"
        assert meta["name"] in (folder / "unit.cu").read_text(encoding="utf-8")
        names.append(meta["name"])
    return sorted(names)
