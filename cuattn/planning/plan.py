"""The answer: which kernels run, in which order, over which grid. Pure data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cuattn.planning.device import Device
from cuattn.planning.problem import AttentionProblem, Strides

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One specialisation: everything that its translation unit is generated from."""

    name: str
    header: str
    entry: str
    config_struct: str
    config: tuple[tuple[str, int], ...]
    params_struct: str
    num_threads: int
    min_blocks: int
    smem_bytes: int
    max_spill_bytes: int = 0  # a thread's, that the kernel does not promise to be without


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel and the number of blocks it is launched with; ``note`` tells them apart in words."""

    kernel: KernelSpec
    grid: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """Who answers a problem on a device, how, and why the families before declined.

    ``launches`` run in order on one stream with the same parameter struct. ``workspace`` names the
    buffers beyond inputs and outputs, with their number of elements in the accumulator's dtype.
    """

    problem: AttentionProblem
    device: Device
    family: str
    launches: tuple[Launch, ...]
    workspace: tuple[tuple[str, int], ...]
    num_splits: int = 1  # of the keys, in a forward
    refusals: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(
        family: str,
        problem: AttentionProblem,
        device: Device,
        launches: Iterable[Launch],
        workspace: Mapping[str, int] | None = None,
        num_splits: int = 1,
    ) -> Plan:
        """A plan without the launches that have nothing to do."""
        busy = tuple(launch for launch in launches if launch.grid > 0)
        sizes = tuple((workspace or {}).items())
        return Plan(problem, device, family, busy, sizes, num_splits)

    @property
    def workspace_bytes(self) -> int:
        """Device memory beyond inputs and outputs, but for what aligns the buffers."""
        return sum(size for _, size in self.workspace) * ITEMSIZE[self.problem.accumulator]


def _tensor(strides: Strides | None) -> dict[str, Any]:
    batch, seqlen, head, dim = strides or (0, 0, 0, 0)
    return {
        "data": None,
        "stride_batch": batch,
        "stride_seqlen": seqlen,
        "stride_head": head,
        "stride_dim": dim,
    }


def parameters(plan: Plan) -> Mapping[str, Any]:
    """The values of FwdParams or BwdParams; every address is still null."""
    problem, layouts = plan.problem, plan.problem.layouts
    names: tuple[str, ...] = ("q", "k", "v", "out")
    values: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "lse": None}
    if problem.op == "forward":
        values |= {"part_out": None, "part_lse": None, "num_splits": plan.num_splits}
    else:
        names += ("dout", "dq", "dk", "dv")
        batch, head, seqlen = layouts.dlse or (0, 0, 0)
        values["dlse"] = {
            "data": None,
            "stride_batch": batch,
            "stride_head": head,
            "stride_seqlen": seqlen,
        }
        values |= {"delta": None, "dq_sum": None, "dout_cast": None}
        values["dq_sum_size"] = dict(plan.workspace).get("dq_sum", 0)
    values |= {name: _tensor(getattr(layouts, name)) for name in names}
    sizes = ("batch", "seqlen_q", "seqlen_k", "num_heads_q", "num_heads_kv", "head_dim")
    values["shape"] = {name: getattr(problem, name) for name in (*sizes, "head_dim_v")} | {
        "band_lower": problem.band.lower,
        "band_upper": problem.band.upper,
    }
    return values
