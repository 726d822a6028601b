"""From a problem and a device to a plan: the first family that accepts, and why others declined."""

from __future__ import annotations

from dataclasses import replace

from cuattn.errors import UnsupportedError
from cuattn.planning.device import Device
from cuattn.planning.families import FAMILIES
from cuattn.planning.plan import Plan
from cuattn.planning.problem import AttentionProblem

#: Blocks that a launch may have.
MAX_GRID = 2**31 - 1


def plan_for(problem: AttentionProblem, device: Device) -> Plan:
    """The plan of a problem on a CUDA device.

    Raises
    ------
    UnsupportedError
        No family takes the problem; the message lists each refusal.
    """
    refusals: list[tuple[str, str]] = []
    for family in FAMILIES:
        reason = family.refusal(problem, device)
        if reason is None:
            plan = family.plan(problem, device)
            reason = _too_large(plan)
            if reason is None:
                return replace(plan, refusals=tuple(refusals))
        refusals.append((family.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no kernel family takes this {problem.op} on {device.arch}: {reasons}")


def _too_large(plan: Plan) -> str | None:
    """Which launch of a plan no device takes, or None."""
    for launch in plan.launches:
        if launch.grid > MAX_GRID:
            return f"needs at most {MAX_GRID} blocks, got {launch.grid} in {launch.kernel.name}"
    return None
