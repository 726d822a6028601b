"""The single NVRTC call: a unit and options in, a cubin and its resource report out.

Everything is given in memory, so nothing is looked up on the user's disk but NVRTC itself, which
comes with CuPy and needs no GPU.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

from cuattn.errors import CompileError
from cuattn.jit.source import Unit

#: Compute capabilities whose kernels may use the instructions of that very chip.
_ARCHITECTURE_SPECIFIC = frozenset({90})


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """Every choice that changes the machine code.

    float32 means float32 accuracy, so denormals stay and division and square root are correctly
    rounded; there is no switch for less. Nor is there one for unoptimised code: after one unit with
    -G, NVRTC 13.5 spends more registers on every further unit of the process, and kernels spill.

    Attributes
    ----------
    arch : str
        The target, as ``"sm_90a"``.
    lineinfo : bool
        Map instructions to source lines, for profilers and compute-sanitizer; same speed.
    fmad : bool
        Contract a * b + c into one rounding.
    """

    arch: str
    lineinfo: bool = False
    fmad: bool = True

    def flags(self) -> tuple[str, ...]:
        """The options as NVRTC takes them."""
        flags = [
            f"-arch={self.arch}",
            "-std=c++20",
            "-ftz=false",
            "-prec-div=true",
            "-prec-sqrt=true",
            f"-fmad={str(self.fmad).lower()}",
            "--ptxas-options=-v",
        ]
        if self.lineinfo:
            flags.append("-lineinfo")
        return tuple(flags)


def debugging() -> bool:
    """Whether CUATTN_DEBUG asks for line information and a synchronisation after every launch."""
    return os.environ.get("CUATTN_DEBUG", "0") not in ("", "0")


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, and what the assembler reported about it.

    Attributes
    ----------
    cubin : bytes
        An ELF image for exactly one target.
    log : str
        The compiler's log, complete.
    registers : int
        Registers of a thread.
    spill_store_bytes, spill_load_bytes, stack_bytes : int
        Local memory of a thread; zero in a kernel that keeps its state in registers.
    smem_bytes : int
        Static shared memory of a block; the dynamic part is the caller's choice.
    """

    cubin: bytes
    log: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    smem_bytes: int


@cache
def _nvrtc() -> ModuleType:
    """CuPy's binding, with NVRTC loaded."""
    remedy = (
        'pip install "cupy-cuda13x[ctk]" (or "cupy-cuda12x[ctk]" for a CUDA 12 driver) brings CuPy '
        "and NVRTC; kernels are compiled without a GPU too"
    )
    try:
        nvrtc = import_module("cupy_backends.cuda.libs.nvrtc")
    except ImportError as error:
        raise CompileError(f"CuPy: not importable ({error}); {remedy}") from error
    try:
        nvrtc.getVersion()
    # why so wide: where the library is missing, CuPy's loader raises RuntimeError, OSError or
    # AssertionError, by version and platform
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            remedy = "CuPy uses that place: set CUPY_CACHE_DIR to a folder that can be written"
        raise CompileError(f"NVRTC: does not load ({error}); {remedy}") from error
    return nvrtc


def nvrtc_version() -> tuple[int, int]:
    """(major, minor) of the NVRTC that CuPy loads.

    Raises
    ------
    CompileError
        CuPy or NVRTC is missing; the message says what to install.
    """
    version: tuple[int, int] = _nvrtc().getVersion()
    return version


def _target(capability: int) -> str:
    return f"sm_{capability}{'a' if capability in _ARCHITECTURE_SPECIFIC else ''}"


def supported_archs() -> tuple[str, ...]:
    """Every target that this NVRTC compiles for, ascending, as ``("sm_75", ..., "sm_90a", ...)``.

    Raises
    ------
    CompileError
        CuPy or NVRTC is missing.
    """
    return tuple(_target(capability) for capability in sorted(_nvrtc().getSupportedArchs()))


def arch_for_device(major: int, minor: int) -> str:
    """The target whose code a device of this compute capability runs, as ``"sm_90a"``.

    Raises
    ------
    CompileError
        This NVRTC is too new or too old for the device; the message says which to install.
    """
    return _choose_arch(major, minor, tuple(_nvrtc().getSupportedArchs()), nvrtc_version())


def _choose_arch(
    major: int, minor: int, supported: tuple[int, ...], version: tuple[int, int]
) -> str:
    # why: code for X.y also runs on X.z with z >= y, never on another major version
    fitting = [arch for arch in supported if arch // 10 == major and arch % 10 <= minor]
    if fitting:
        return _target(max(fitting))
    have = f"sm_{major}{minor}: NVRTC {version[0]}.{version[1]} compiles for sm_{min(supported)}"
    if major * 10 + minor < min(supported):
        remedy = 'the device is older: install "cupy-cuda12x[ctk]", whose NVRTC still knows it'
        if version[0] < 13:
            remedy = "the device is older than every CUDA version that cuattn supports"
    else:
        remedy = "the device is newer: install a newer CuPy and NVRTC"
    raise CompileError(f"{have} to sm_{max(supported)}; {remedy}")


def compile_unit(unit: Unit, options: CompileOptions) -> Compiled:
    """Compile one unit for one target; needs NVRTC and no GPU.

    Raises
    ------
    CompileError
        NVRTC is missing, or refuses the unit; the error carries the kernel's name and the log.
    """
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(
        unit.text,
        f"{unit.name}.cu",
        [text.encode() for text in unit.headers.values()],
        [path.encode() for path in unit.headers],
    )
    try:
        try:
            nvrtc.compileProgram(program, options.flags() + _without_driver_cache())
        except nvrtc.NVRTCError as error:
            log = _log(nvrtc, program)
            raise CompileError(
                _explain(unit, options, error, log), kernel_name=unit.name, log=log
            ) from error
        log = _log(nvrtc, program)
        # why: the binding drops the last byte, which it takes for a terminator; in an ELF image it
        # is the zero high byte of a header field
        cubin = nvrtc.getCUBIN(program) + b"\0"
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(cubin, log, **_resources(unit, log))


def _without_driver_cache() -> tuple[str, ...]:
    """The flag that has every unit assembled anew, in our cache's name.

    Where there is a driver, NVRTC takes machine code from the driver's own cache and then reports
    neither registers nor spills. The flag came with 12.9.
    """
    return ("--no-cache",) if nvrtc_version() >= (12, 9) else ()


def _log(nvrtc: ModuleType, program: int) -> str:
    log: str = nvrtc.getProgramLog(program)
    return log.rstrip("\0\n") + "\n"


def _explain(unit: Unit, options: CompileOptions, error: Exception, log: str) -> str:
    first = next((line for line in log.splitlines() if "error" in line), str(error))
    major, minor = nvrtc_version()
    return (
        f"{unit.name}: NVRTC {major}.{minor} refused it for {options.arch}: {first.strip()}; "
        "the complete log is this error's .log. A shipped kernel that does not compile is a bug "
        "of cuattn: report the name, the NVRTC version and the log"
    )


def _resources(unit: Unit, log: str) -> dict[str, int]:
    """Read the assembler's report on the unit's kernel."""
    report = log.partition(f"Function properties for {unit.name}\n")[2]
    frame = re.search(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
    )
    used = re.search(r"Used (\d+) registers.*", report)
    if frame is None or used is None:
        raise CompileError(
            f"{unit.name}: the log holds no resource report; it is in this error's .log",
            kernel_name=unit.name,
            log=log,
        )
    smem = re.search(r"(\d+) bytes smem", used.group())
    stack, stores, loads = map(int, frame.groups())
    return {
        "registers": int(used.group(1)),
        "spill_store_bytes": stores,
        "spill_load_bytes": loads,
        "stack_bytes": stack,
        "smem_bytes": int(smem.group(1)) if smem else 0,
    }
