"""From a problem and a device to a plan: the first family that accepts, and why others declined."""

from __future__ import annotations

from dataclasses import replace

from cuattn.errors import UnsupportedError
from cuattn.planning.device import Device
from cuattn.planning.families import FAMILIES
from cuattn.planning.plan import Plan
from cuattn.planning.problem import AttentionProblem


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
            return replace(family.plan(problem, device), refusals=tuple(refusals))
        refusals.append((family.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals)
    raise UnsupportedError(f"no kernel family takes this {problem.op} on {device.arch}: {reasons}")
