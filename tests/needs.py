"""What a test needs of the machine: skip without it, but fail where CI promises it."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest
from emulator import build

from cuattn.errors import CompileError
from cuattn.jit.compile import nvrtc_version


def nvrtc() -> None:
    """Skip the calling test where CuPy or NVRTC is missing; fail there under CI=true."""
    try:
        nvrtc_version()
    except CompileError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have NVRTC: {error}")
        pytest.skip(str(error))


def cxx() -> None:
    """Skip the calling test where no C++20 compiler is found; fail there under CI=true."""
    if build.compiler() is None:
        _missing(f"the emulator needs a C++20 compiler: {build.REMEDY}")


def sanitizers(environment: dict[str, str] | None) -> None:
    """The same where the compiler has no sanitizers that a process can load."""
    cxx()
    if environment is None:
        _missing("the compiler has no address sanitizer that a process can load: use g++")


def _missing(message: str) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must have it: {message}")
    pytest.skip(message)


def library(name: str) -> ModuleType:
    """The module of an extra for tests; skip where it is missing, fail there under CI=true."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have {name}: {error}")
        pytest.skip(str(error))


def gpus(count: int) -> ModuleType:
    """CuPy; skip the calling test where there are fewer devices."""
    try:
        cupy = importlib.import_module("cupy")
        found = cupy.cuda.runtime.getDeviceCount()
    except Exception:  # noqa: BLE001 - no CuPy, no driver and no device all mean none
        found = 0
    if found < count:
        pytest.skip(f"needs {count} GPUs")
    return cupy
