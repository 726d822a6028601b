"""What every kernel family shares: how it is asked, and the kernel that computes delta.

A family says yes or why not, and lays a problem out as launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from cuattn._typing import ACCUMULATOR
from cuattn.abi.structs import DType, Wrt
from cuattn.planning.device import Device
from cuattn.planning.names import kernel_name
from cuattn.planning.plan import KernelSpec, Launch, Plan
from cuattn.planning.problem import AttentionProblem
from cuattn.planning.schedule import ceil_div

#: Of the kernel that computes delta: so many threads a row, each for some rows.
_PREPARE_THREADS, _PREPARE_LANES, _PREPARE_ROWS = 128, 8, 4
_WRT = {"q": Wrt.Dq, "k": Wrt.Dk, "v": Wrt.Dv}


class Family(Protocol):
    """What the selection asks of a family."""

    @property
    def name(self) -> str:
        """As kernel names and ``explain`` spell it."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of q, k and v, those that it takes."""

    @property
    def rounds_to_zero(self) -> bool:
        """Whether sums over head dims and positions are rounded towards zero."""

    def lacking(self, device: Device) -> str | None:
        """What the family needs that the device has not, or None."""

    def refusal(self, problem: AttentionProblem, device: Device) -> str | None:
        """Why the family cannot take the problem on the device, or None; not for its size."""

    def plan(self, problem: AttentionProblem, device: Device) -> Plan:
        """The plan of an accepted problem; without launches where there is nothing to write."""

    def every_spec(self, device: Device) -> Iterator[KernelSpec]:
        """Every specialisation that a plan can choose on a device."""


def refusal_of(
    family: Family, max_head_dim: int | None, problem: AttentionProblem, device: Device
) -> str | None:
    """Why a family of these dtypes, needs and head dims cannot take a problem, or None."""
    if problem.dtype not in family.dtypes:
        return f"needs {' or '.join(family.dtypes)}, got {problem.dtype}"
    lacking = family.lacking(device)
    if lacking is not None:
        return f"needs {lacking}, got {device.arch}"
    dims = max(problem.head_dim, problem.head_dim_v)
    if max_head_dim is not None and dims > max_head_dim:
        return f"needs head dims of at most {max_head_dim}, got {dims}"
    return None


def wrt_flags(names: tuple[str, ...]) -> Wrt:
    """The flags of inputs by name."""
    flags = Wrt(0)
    for name in names:
        flags |= _WRT[name]
    return flags


def output_dtypes() -> Iterator[tuple[str, str]]:
    """Every pair of a dtype and a dtype that out may have."""
    for dtype, accumulator in ACCUMULATOR.items():
        yield from sorted({(dtype, dtype), (dtype, accumulator)})


def num_rows(problem: AttentionProblem) -> int:
    """Query rows of all heads: the size of lse and of delta."""
    return problem.batch * problem.num_heads_q * problem.seqlen_q


def prepare_spec(dtype: str, out_dtype: str, *, casts_dout: bool = False) -> KernelSpec:
    """The kernel that computes delta, for a backward of more than one kernel."""
    return KernelSpec(
        name=kernel_name("bwd_prepare" + "_cast" * casts_dout, dtype, out_dtype),
        header="kernel/bwd_prepare.cuh",
        entry="kernel::bwd_prepare",
        config_struct="PrepareConfig",
        config=(
            ("dtype", DType.of(dtype)),
            ("out_dtype", DType.of(out_dtype)),
            ("casts_dout", int(casts_dout)),
            ("rows_per_thread", _PREPARE_ROWS),
            ("num_threads", _PREPARE_THREADS),
        ),
        params_struct="BwdParams",
        num_threads=_PREPARE_THREADS,
        min_blocks=8,
        smem_bytes=0,
    )


def prepare_launch(problem: AttentionProblem, *, casts_dout: bool = False) -> Launch:
    """The first launch of a backward."""
    spec = prepare_spec(problem.dtype, problem.out_dtype, casts_dout=casts_dout)
    rows_of_block = _PREPARE_THREADS // _PREPARE_LANES * _PREPARE_ROWS
    return Launch(spec, ceil_div(num_rows(problem), rows_of_block))
