"""Many kernels compiled at once, through the cache: what the command line and ``explain`` need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from cuattn.abi.structs import Wrt
from cuattn.execute import unit_of
from cuattn.jit import cache
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
    stored: bool  # on disk


def is_default(spec: KernelSpec) -> bool:
    """Whether a call without options needs it: out in the inputs' dtype, every gradient."""
    config = dict(spec.config)
    both = Wrt.Dk | Wrt.Dv
    # Deterministic gradients of the sm80 family are an option.
    wanted = (Wrt(0), Wrt.Dq | both) if "warp_rows" in config else (Wrt(0), Wrt.Dq, both)
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
    wanted = {spec.name: spec for spec in specs}
    options = CompileOptions(arch, lineinfo=debugging())
    for unit, entry, seconds in cache.build(map(unit_of, wanted.values()), options, jobs):
        yield Built(wanted[unit.name], entry.compiled, seconds, entry.folder is not None)
