"""What a plan needs to know of a device, as plain data: a plan for an H200 is made on a laptop."""

from __future__ import annotations

from dataclasses import dataclass

from cuattn.errors import ArgumentError, DTypeError, explain_argument


@dataclass(frozen=True, slots=True)
class Device:
    """A CUDA device, or the host for ``arch="cpu"``."""

    arch: str
    num_sms: int
    smem_per_block: int  # bytes of shared memory that one block can opt in to

    @property
    def capability(self) -> int:
        """Compute capability as one number: 90 for sm_90a."""
        return int(self.arch.removeprefix("sm_").rstrip("af"))

    @property
    def fast_float64(self) -> bool:
        """Whether float64 runs at half the rate of float32 or more: V100, A100, H100, B200."""
        return self.capability in (70, 80, 90, 100)


HOST = Device("cpu", 0, 0)

#: A usual device of every target, for plans made without one. source: CUDA C++ Programming Guide,
#: "Technical Specifications per Compute Capability" (shared memory); the number of SMs is that of
#: T4, A100, A10, Orin, RTX 4090, H200, B200, B300, Thor, RTX 5090, GB10.
KNOWN = {
    device.arch: device
    for device in (
        Device("sm_75", 40, 64 << 10),
        Device("sm_80", 108, 163 << 10),
        Device("sm_86", 72, 99 << 10),
        Device("sm_87", 16, 163 << 10),
        Device("sm_89", 128, 99 << 10),
        Device("sm_90a", 132, 227 << 10),
        Device("sm_100", 148, 227 << 10),
        Device("sm_103", 160, 227 << 10),
        Device("sm_110", 20, 227 << 10),
        Device("sm_120", 170, 99 << 10),
        Device("sm_121", 48, 99 << 10),
    )
}


def known_device(arch: object) -> Device:
    """The usual device of a target such as "sm_90a" ("sm_90" is taken for it too).

    Raises
    ------
    ArgumentError
        The target is unknown; the message lists those there are.
    DTypeError
        It is no string.
    """
    if not isinstance(arch, str):
        got, expected = f"{arch!r} of type {type(arch).__name__}", "a CUDA target"
        raise DTypeError(explain_argument("device", got, expected, 'for example "sm_90a"'))
    device = KNOWN.get(arch) or KNOWN.get(arch + "a")
    if device is None:
        expected = f"one of {', '.join(KNOWN)}"
        raise ArgumentError(explain_argument("device", repr(arch), expected, "name a target"))
    return device
