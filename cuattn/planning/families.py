"""Every kernel family, in the order in which they are tried.

A family is tried when every one before it declined; ``explain`` shows the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator

from cuattn.planning.device import Device
from cuattn.planning.family import Family, output_dtypes, prepare_spec
from cuattn.planning.plan import KernelSpec
from cuattn.planning.simt import DMMA, SIMT, TF32X3
from cuattn.planning.sm80 import SM80

FAMILIES: tuple[Family, ...] = (SM80, TF32X3, DMMA, SIMT)


def every_spec(device: Device) -> Iterator[KernelSpec]:
    """Every specialisation of every family on a device: what the tests compile."""
    for dtype, out_dtype in output_dtypes():
        yield prepare_spec(dtype, out_dtype)
    for family in FAMILIES:
        yield from family.every_spec(device)
