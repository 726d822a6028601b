"""The exceptions users meet, and the one format of their messages."""

from __future__ import annotations


class CuattnError(Exception):
    """Base of every error that cuattn raises on purpose."""


class ArgumentError(CuattnError, ValueError):
    """An argument has a wrong shape, value, layout or device."""


class DTypeError(CuattnError, TypeError):
    """An argument has a wrong type or dtype."""


class UnsupportedError(CuattnError, NotImplementedError):
    """The request is meaningful but no kernel family takes it; the message lists each refusal."""


class CompileError(CuattnError, RuntimeError):
    """A kernel did not compile.

    Attributes
    ----------
    kernel_name : str
        The readable name of the kernel, which is also its symbol.
    log : str
        The compiler's log, complete.
    """

    def __init__(self, message: str, *, kernel_name: str = "", log: str = "") -> None:
        super().__init__(message)
        self.kernel_name = kernel_name
        self.log = log


def explain_argument(name: str, got: object, expected: str, remedy: str) -> str:
    """One message: the argument's name, what it got, what was expected, what to do."""
    return f"{name}: got {shown(got)}; expected {expected}; {remedy}"


def shown(value: object) -> str:
    """The value as text; of a huge integer, which Python may refuse to print, its size."""
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    return str(value)
