"""Many random problems in one process: results stay right, and memory stays where it is.

    PYTHONPATH=. python tests/long_run.py --count 20000 --seed 0 --check-every 20

Every result must be finite; of every so many the oracle decides, in processes of its own. Memory of
the process, of CuPy's pool and of the device (which nobody else may use) must not grow after the
first quarter. The last line is the outcome as JSON; the exit status is 0 where all is well.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import ctypes
import dataclasses
import functools
import itertools
import json
import multiprocessing
import operator
import os
import random
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import compare
import numpy as np
from engines import CUDA_ENGINES, CudaEngine, NumpyEngine, family_of
from strategies import (
    DTYPES,
    HEAD_DIMS,
    LARGE_HEAD_DIMS,
    LAYOUTS,
    MAX_WORK,
    SEQLENS,
    STRIDES,
    Problem,
    dtype_of,
)

import cuattn
from cuattn import execute, precompile
from cuattn.cpu import tolerance
from cuattn.jit import replay
from cuattn.planning.families import FAMILIES, every_spec
from cuattn.planning.select import plan_for

#: So many calls one after another have the same shapes, strides and options, with other numbers.
ALIKE = 4
#: So many calls one after another run on one engine.
PHASE = 400
ENGINES = ("planned", *(name for name in CUDA_ENGINES if name not in ("tf32x3", "dmma", "sm80")))
LONG = (190, 300, 515, 1100)
#: What may be there more after the first half, in bytes: far less than one result of every call.
#: In the pool nothing stays; a heap has gaps, and some kernels are loaded late.
MAY_GROW = {"process": 64 << 20, "pool": 1 << 20, "device": 64 << 20}
RESULTS = ("out", "lse", "dq", "dk", "dv")
#: How often memory is looked at.
SAMPLES = 40
ROUNDS_TO_ZERO = {family.name for family in FAMILIES if family.rounds_to_zero}


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem as it is called, from its number."""

    problem: Problem
    deterministic: bool | None
    wrt: tuple[str, ...] | None

    @staticmethod
    def of(seed: int, index: int, dtypes: tuple[str, ...]) -> Case:
        rng = random.Random(f"{seed} {index // ALIKE}")
        deterministic = rng.choice((None, None, True, False))
        wrt = rng.choice((None, None, None, ("q",), ("k", "v"), ("v",)))
        return Case(_problem(rng, dtypes, data_seed=index), deterministic, wrt)


def _problem(rng: random.Random, dtypes: tuple[str, ...], data_seed: int) -> Problem:
    dtype, layout = rng.choice(dtypes), rng.choice(LAYOUTS)
    dims = LARGE_HEAD_DIMS if rng.random() < 0.04 else (*HEAD_DIMS, 96, 192)
    head_dim = rng.choice(dims)
    head_dim_v = head_dim if rng.random() < 0.7 else rng.choice(dims)
    seqlen_q, seqlen_k = (rng.choice(LONG if rng.random() < 0.1 else SEQLENS) for _ in range(2))
    if rng.random() < 0.5:
        seqlen_k = seqlen_q
    if rng.random() < 0.02:
        seqlen_q, seqlen_k = rng.choice(((0, seqlen_k), (seqlen_q, 0)))
    work = max(1, seqlen_q * seqlen_k) * max(head_dim, head_dim_v)
    room = max(1, MAX_WORK // (4 if dtype == "float64" else 1) // work)
    heads_kv = rng.randint(1, min(3, room)) if "h" in layout else 1
    group_size = rng.randint(1, min(3, max(1, room // heads_kv))) if "h" in layout else 1
    heads = heads_kv * group_size
    batch = rng.randint(1, min(3, max(1, room // heads))) if "b" in layout else 1
    return Problem(
        *(dtype, layout, batch, seqlen_q, seqlen_k, heads_kv, group_size, head_dim, head_dim_v),
        **_positions(rng, seqlen_q, seqlen_k),
        softmax_scale=rng.choice((None, None, 0.25, 0.0, -0.5)),
        out_dtype=rng.choice((None, None, "float32")) if dtype != "float64" else None,
        strides=tuple(rng.choice(STRIDES) for _ in range(4)),
        use_dout=rng.random() < 0.9,
        use_dlse=rng.random() < 0.5,
        seed=data_seed,
    )


def _positions(rng: random.Random, seqlen_q: int, seqlen_k: int) -> dict[str, object]:
    how = rng.choice(("full", "full", "plain", "align", "offset"))
    if how == "full":
        return {}
    if how == "align":
        return {"causal": True, "align": rng.choice(("bottom_right", "top_left"))}
    if how == "plain" and seqlen_q == seqlen_k:
        return {"causal": True}
    k_offset = rng.choice((None, 0, 7, -(10**12)))
    reach = rng.randint(-seqlen_q - 2, seqlen_k + 2)
    return {"causal": True, "q_offset": (k_offset or 0) + reach, "k_offset": k_offset}


def compute(engine: object, case: Case) -> tuple[list[object], cuattn.Residuals]:
    """What is tested: out, lse and gradients, where the engine keeps them."""
    asarray = engine.asarray
    out, res = cuattn.attention_forward(
        *map(asarray, case.problem.arrays()),
        **case.problem.options,
        deterministic=case.deterministic,
    )
    dout, dlse = (each if each is None else asarray(each) for each in case.problem.cotangents())
    grads = cuattn.attention_backward(res, dout, dlse, wrt=case.wrt)
    return [out, res.lse, grads.dq, grads.dk, grads.dv], res


def has_non_finite(array: object, *, may_be_empty: bool = False) -> object:
    """By the bits, as dtypes are many: an exponent of ones; the -inf of a row without keys may be.

    0-d, where the array is: nothing waits for it.
    """
    bits = array.dtype.itemsize * 8
    digits = {2: 10, 4: 23, 8: 52}[array.dtype.itemsize] if array.dtype.name != "bfloat16" else 7
    unsigned = np.dtype(f"uint{bits}").type
    ones = unsigned((1 << (bits - 1)) - (1 << digits))
    words = array.view(unsigned)
    found = (words & ones) == ones
    if may_be_empty:
        found &= words != unsigned(ones | (1 << (bits - 1)))
    return found.any()


def judge(
    case: Case, results: list[np.ndarray | None], rounds_to_zero: bool
) -> tuple[dict[str, float], str]:
    """The worst error of each result over its bound, and what is wrong with the first bad one."""
    problem = case.problem
    q, k, v = map(problem.canonical, problem.arrays())
    dout, dlse = problem.cotangents()
    out, lse, *grads = results
    out, lse = problem.canonical(out), problem.canonical_lse(lse)
    grads = [None if each is None else problem.canonical(each) for each in grads]
    how = problem.oracle | {"rounds_to_zero": rounds_to_zero}
    dtype = dtype_of(problem.out_dtype or problem.dtype)
    dout = None if dout is None else problem.canonical(dout)
    dlse = None if dlse is None else problem.canonical_lse(dlse)
    expected = tolerance.expected_forward(q, k, v, **how, out_dtype=dtype)
    expected += tolerance.expected_backward(q, k, v, out, dout, dlse, **how)
    ratios, wrong = {}, ""
    for name, actual, wanted in zip(RESULTS, (out, lse, *grads), expected, strict=True):
        if actual is None:
            continue
        try:
            compare.assert_accepted(name, actual, wanted)
            ratios[name] = tolerance.compare(actual, wanted).ratio
        except AssertionError as error:
            wrong = wrong or str(error)
    return ratios, wrong


class Memory:
    """What is in use, between calls, when nothing of them is held."""

    def __init__(self, xp: ModuleType) -> None:
        self.cupy = None if xp is np else xp
        self.samples: list[dict[str, int]] = []

    def take(self) -> dict[str, int]:
        """After giving back what is kept only to be used again."""
        sample = {}
        if self.cupy is not None:
            pool = self.cupy.get_default_memory_pool()
            self.cupy.cuda.Device().synchronize()
            sample["pool"] = pool.used_bytes()
            pool.free_all_blocks()
            self.cupy.get_default_pinned_memory_pool().free_all_blocks()  # of copies to the device
            free, total = self.cupy.cuda.runtime.memGetInfo()
            sample["device"] = total - free
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if trim is not None:
            trim(ctypes.c_size_t(0))
        resident = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        sample["process"] = resident * resource.getpagesize()
        self.samples.append(sample)
        return sample

    def growth(self) -> dict[str, int]:
        """From the most of the first half, which loads and allocates all, to the last quarter's."""
        half, quarter = (max(1, len(self.samples) // parts) for parts in (2, 4))
        return {
            name: int(statistics.median(each[name] for each in self.samples[-quarter:]))
            - max(each[name] for each in self.samples[:half])
            for name in self.samples[0]
        }


class Run:
    """All calls, and what was seen of them."""

    def __init__(self, options: argparse.Namespace, pool: Executor) -> None:
        self.options, self.pool = options, pool
        self.calls: collections.Counter[str] = collections.Counter()
        self.worst: dict[str, tuple[float, int]] = {}
        self.failures: list[str] = []
        self.checked = 0
        self.pending: collections.deque[tuple[int, Case, Future]] = collections.deque()
        self.flags: list[tuple[int, Case, object]] = []
        self.memory: Memory | None = None

    def all(self) -> None:
        """Call after call, until the last or the first that is wrong."""
        first, count = self.options.first, self.options.count
        every = max(1, count // SAMPLES)
        begin = time.perf_counter()
        for phase, indices in itertools.groupby(range(first, first + count), lambda i: i // PHASE):
            with engine_of(self.options.engine, phase) as engine:
                self.memory = self.memory or Memory(engine.xp)
                for index in indices:
                    self.one(engine, index)
                    if (index - first + 1) % every == 0:
                        self.read_flags()
                        self.collect(most=self.options.workers)
                        rate = (index - first + 1) / (time.perf_counter() - begin)
                        sample = {
                            name: f"{n / 2**20:.1f}" for name, n in self.memory.take().items()
                        }
                        print(f"{index + 1}: {rate:.0f}/s, MiB {sample}", flush=True)
                    if self.failures:
                        return
        self.read_flags()
        self.collect(most=0)
        self.failures += [
            f"{name} memory grew by {grown} bytes"
            for name, grown in self.memory.growth().items()
            if grown > MAY_GROW[name]
        ]

    def one(self, engine: object, index: int) -> None:
        """One problem, both passes; nothing of it is held on return but where it is checked."""
        case = Case.of(self.options.seed, index, engine.dtypes)
        results, res = compute(engine, case)
        family = family_that_took(res)
        self.calls[f"{family}/{case.problem.dtype}"] += 1
        found = [
            has_non_finite(each, may_be_empty=name == "lse")
            for name, each in zip(RESULTS, results, strict=True)
            if each is not None
        ]
        self.flags.append((index, case, functools.reduce(operator.or_, found)))
        every = self.options.check_every
        # Not the first of so many each time: that is always the first of those that are alike.
        if index % every == 7 * (index // every) % every:
            held = [None if each is None else engine.asnumpy(each) for each in results]
            self.collect(most=2 * self.options.workers)
            its = self.pool.submit(judge, case, held, family in ROUNDS_TO_ZERO)
            self.pending.append((index, case, its))

    def read_flags(self) -> None:
        """Whether any result since the last time was NaN or infinite."""
        for index, case, flag in self.flags:
            if bool(flag):
                self.fail(index, case, "a result is not finite")
        self.flags.clear()

    def collect(self, most: int) -> None:
        """What the oracle says, until it has no more than so many to judge."""
        while len(self.pending) > most:
            index, case, its = self.pending.popleft()
            ratios, wrong = its.result()
            self.checked += 1
            for name, ratio in ratios.items():
                self.worst[name] = max(self.worst.get(name, (0.0, 0)), (round(ratio, 4), index))
            if wrong:
                self.fail(index, case, wrong)

    def fail(self, index: int, case: Case, what: str) -> None:
        again = f"--engine {self.options.engine} --seed {self.options.seed} --first {index}"
        self.failures.append(f"{what}: {case}; again: {again} --count 1 --check-every 1")


@contextlib.contextmanager
def engine_of(kind: str, phase: int) -> Iterator[object]:
    """The engine of a phase; on a device the families as planned, then those that others hide."""
    name = "numpy" if kind == "numpy" else ENGINES[phase % len(ENGINES)]
    if name == "numpy":
        yield NumpyEngine()
    elif name == "planned":
        yield CudaEngine(SimpleNamespace(name=name, dtypes=DTYPES))
    else:
        with family_of(name) as family:
            yield CudaEngine(family)


def family_that_took(res: cuattn.Residuals) -> str:
    if isinstance(res.q, np.ndarray):
        return "numpy"
    return plan_for(res.call.problem, execute.cuda_device(res.q.data.device_id)).family


def compile_all() -> None:
    """Fill the cache with every kernel, on all cores: one by one takes longer than the calls."""
    import cupy

    device, begin = execute.cuda_device(cupy.cuda.Device().id), time.perf_counter()
    built = list(precompile.build(every_spec(device), device.arch))
    print(f"{len(built)} kernels in {time.perf_counter() - begin:.0f} s", flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engine", choices=("cuda", "numpy"), default="cuda")
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first problem")
    parser.add_argument("--check-every", type=int, default=20)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    begin = time.perf_counter()
    if options.engine == "cuda" and options.count > PHASE:
        compile_all()
    spawn = multiprocessing.get_context("spawn")
    # One BLAS thread in each process, and graphs within the few calls that are alike.
    with (
        mock.patch.dict(os.environ, {"OPENBLAS_NUM_THREADS": "1"}),
        mock.patch.object(replay, "AFTER_CALLS", 1),
        ProcessPoolExecutor(options.workers, spawn) as pool,
    ):
        run = Run(options, pool)
        run.all()
    if options.engine == "cuda" and options.count >= PHASE * len(ENGINES):
        called = {name.split("/")[0] for name in run.calls}
        lacking = {each.name for each in FAMILIES if not each.lacking(execute.cuda_device(0))}
        run.failures += [f"no problem of {name}" for name in sorted(lacking - called)]
    for failure in run.failures:
        print("FAILED", failure)
    outcome = {
        "engine": options.engine,
        "seed": options.seed,
        "calls": dict(sorted(run.calls.items())),
        "checked": run.checked,
        "worst": {name: run.worst[name] for name in RESULTS if name in run.worst},
        "grown": run.memory.growth() if run.memory and run.memory.samples else {},
        "seconds": round(time.perf_counter() - begin, 1),
        "failures": len(run.failures),
    }
    print(json.dumps(outcome))
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
