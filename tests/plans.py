"""Plans of the problems of tests/record.py, on devices that need not be there."""

import re
from dataclasses import replace

import record

from cuattn.planning.device import KNOWN, known_device
from cuattn.planning.select import plan_for

H200 = known_device("sm_90a")
DEVICES = list(KNOWN.values())
OPS = ("forward", "backward")

#: (batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v)
LARGE = (2, 4096, 4096, 16, 16, 64, 64)
SMALL = (1, 8, 8, 1, 1, 64, 64)


def plan(op="forward", dtype="float32", device=H200, shape=LARGE, **how):
    """The plan of a problem with these changes."""
    return plan_for(record.problem(op, dtype, shape=shape, **how), device)


def kernels(of):
    """The names without their tile."""
    return [re.sub(r"_m\d+n\d+d\d+", "", launch.kernel.name) for launch in of.launches]


def deterministic(asked):
    """The same problem, whose gradients must repeat their bits."""
    return replace(asked, deterministic=True)
