"""Many kernels compiled at once, through the cache: for ``cuattn compile``, ``check``, ``explain``.

NVRTC works without the interpreter's lock and is safe to call from threads, so each core builds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from cuattn.abi.structs import Wrt
from cuattn.execute import unit_of
from cuattn.jit.cache import default_cache
from cuattn.jit.compile import Compiled, CompileOptions, debugging
from cuattn.planning.device import Device
from cuattn.planning.families import every_spec
from cuattn.planning.plan import KernelSpec


@dataclass(frozen=True, slots=True)
class Built:
    """A kernel of the cache, and how long the cache took to give it."""

    spec: KernelSpec
    compiled: Compiled
    seconds: float


def is_default(spec: KernelSpec) -> bool:
    """Whether a call without options needs it: out in the inputs' dtype, every gradient."""
    config = dict(spec.config)
    wanted = (Wrt(0), Wrt.Dq, Wrt.Dk | Wrt.Dv)
    return config["out_dtype"] == config["dtype"] and config.get("wrt", Wrt(0)) in wanted


def default_specs(device: Device) -> Iterator[KernelSpec]:
    """Every kernel that a call without options may need on a device, in every tile size."""
    return filter(is_default, every_spec(device))


def build(specs: Iterable[KernelSpec], arch: str, jobs: int | None = None) -> Iterator[Built]:
    """Compile what the cache lacks, each kernel once, and give all of them as they are ready.

    Raises
    ------
    CompileError
        NVRTC is missing or refuses a kernel; kernels that wait are given up.
    """
    options, cache = CompileOptions(arch, lineinfo=debugging()), default_cache()

    def one(spec: KernelSpec) -> Built:
        begin = time.perf_counter()
        compiled = cache.get(unit_of(spec), options).compiled
        return Built(spec, compiled, time.perf_counter() - begin)

    pool = ThreadPoolExecutor(jobs or os.cpu_count())
    try:
        for done in as_completed([pool.submit(one, spec) for spec in dict.fromkeys(specs)]):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)
