"""``python -m cuattn``: this machine, does it compute right and how fast, compile ahead of time."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import cuattn
from cuattn import execute
from cuattn._typing import ACCUMULATOR
from cuattn.abi.structs import DType
from cuattn.bench import half
from cuattn.check import check, cuda_or_why
from cuattn.errors import ArgumentError, CuattnError
from cuattn.jit.cache import default_directory
from cuattn.jit.compile import nvrtc_version, supported_archs
from cuattn.planning.device import KNOWN, Device, known_device
from cuattn.planning.families import every_spec
from cuattn.planning.plan import KernelSpec
from cuattn.precompile import build, default_specs

VARIABLES = ("CUATTN_CACHE_DIR", "CUATTN_DEBUG")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code, 0 where all is well."""
    parser = argparse.ArgumentParser(
        prog="cuattn",
        description="Exact attention: this machine, a check, a benchmark, the kernel cache.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("info", help="say what is installed and which engine runs")
    checking = commands.add_parser("check", help="compare small problems with the dense formula")
    checking.add_argument("--engine", choices=("numpy", "cuda"), help="CUDA if there is a device")
    benching = commands.add_parser(
        "bench", help="time 16-bit attention beside the peers that are installed, and draw it"
    )
    half.add_options(benching)
    compiling = commands.add_parser("compile", help="fill the kernel cache; needs no GPU")
    compiling.add_argument(
        "--arch",
        nargs="+",
        type=_target,
        metavar="TARGET",
        default=[],
        help='such as "sm_90a"; the devices of this machine by default',
    )
    compiling.add_argument(
        "--dtype", nargs="+", choices=tuple(ACCUMULATOR), default=list(ACCUMULATOR)
    )
    compiling.add_argument(
        "--all",
        action="store_true",
        help="also the kernels of out_dtype and of single gradients (wrt)",
    )
    compiling.add_argument(
        "--jobs", type=_positive, help="kernels at a time; one a core by default"
    )
    arguments = parser.parse_args(argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except CuattnError as error:
        print(f"cuattn: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read the lines has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "info":
        return info()
    if arguments.command == "check":
        return 1 if check(arguments.engine) else 0
    if arguments.command == "bench":
        return half.main(arguments)
    return compile_kernels(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number of 1 or more")
    return int(text)


def _target(text: str) -> Device:
    try:
        return known_device(text)
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None


def info() -> int:
    """Print what is here and what is missing; never fails."""
    for label, text in _facts():
        print(f"{label:17} {text}")
    return 0


def _facts() -> Iterator[tuple[str, str]]:
    yield "cuattn", f"{cuattn.__version__} in {Path(cuattn.__file__).parent}"
    yield "Python", platform.python_version()
    yield "NumPy", np.__version__
    try:
        import cupy

        yield "CuPy", cupy.__version__
    except ImportError as error:
        yield "CuPy", f'missing ({error}); pip install "cupy-cuda13x[ctk]", or cupy-cuda12x'
    try:
        version = ".".join(map(str, nvrtc_version()))
        targets = [arch for arch in supported_archs() if arch in KNOWN]
        yield "NVRTC", f"{version}, compiles for {' '.join(targets)}"
    except CuattnError as error:
        yield "NVRTC", f"missing: {error}"
    trouble = cuda_or_why()
    if trouble:
        yield "devices", f"none: {trouble}"
        yield "", "with a GPU in the machine, install its driver and a CuPy for that driver"
        yield "engine", "NumPy arrays: the CPU engine; CuPy arrays: none"
    else:
        yield from _device_facts()
        yield "engine", "NumPy arrays: the CPU engine; CuPy arrays: CUDA kernels"
    yield from _record_facts(Path(cuattn.__file__).parents[1] / "tests" / "gpu_record.json")
    yield "kernel cache", _cache_text(default_directory())
    for name in VARIABLES:
        yield name, os.environ.get(name, "not set")


def _record_facts(path: Path) -> Iterator[tuple[str, str]]:
    """Of a checkout, the last run of its GPU tests, and whether the sources have moved on since."""
    if path.is_file():
        record = json.loads(path.read_text(encoding="utf-8"))
        text = f"{len(record['outcomes'])} tests on {record['device']}, NVRTC {record['nvrtc']}"
        pending = record.get("pending")
        if pending:
            text += f"; pending since {pending['date']}: {pending['reason']}"
        yield "GPU record", text


def _device_facts() -> Iterator[tuple[str, str]]:
    import cupy

    runtime = cupy.cuda.runtime
    driver = runtime.driverGetVersion()
    yield "driver", f"CUDA {driver // 1000}.{driver % 1000 // 10}"
    for device_id in range(runtime.getDeviceCount()):
        properties = runtime.getDeviceProperties(device_id)
        name, memory = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
        try:
            device = execute.cuda_device(device_id)
            text = f"{name}, {device.arch}, {device.num_sms} SMs, {memory:.1f} GiB"
        except CuattnError as error:
            text = f"{name}: {error}"
        yield f"device {device_id}", text


def _cache_text(directory: Path | None) -> str:
    if directory is None:
        return "in memory only: no home folder; set CUATTN_CACHE_DIR"
    try:
        sizes = [cubin.stat().st_size for cubin in directory.glob("*/*/kernel.cubin")]
    except OSError as error:
        return f"in memory only: {error}"
    return f"{directory}: {len(sizes):,} kernels, {sum(sizes):,} bytes"


def compile_kernels(arguments: argparse.Namespace) -> int:
    """Fill the cache for targets, a line for each kernel."""
    all_stored = True
    for device in dict.fromkeys(arguments.arch) or _own_devices():
        wanted = {DType.of(name) for name in arguments.dtype}
        found = every_spec(device) if arguments.all else default_specs(device)
        specs = [spec for spec in found if dict(spec.config)["dtype"] in wanted]
        all_stored &= _compile(device, specs, arguments.jobs)
    return 0 if all_stored else 1


def _own_devices() -> Iterator[Device]:
    trouble = cuda_or_why()
    if trouble:
        raise ArgumentError(f"{trouble}; name a target, for example --arch sm_90a")
    import cupy

    devices = map(execute.cuda_device, range(cupy.cuda.runtime.getDeviceCount()))
    yield from {device.arch: device for device in devices}.values()


def _compile(device: Device, specs: list[KernelSpec], jobs: int | None) -> bool:
    """Whether the disk now holds every kernel."""
    print(f"{device.arch}: {len(specs)} kernels")
    print(f"{'kernel':48}{'registers':>10}{'spills':>8}{'seconds':>9}")
    begin = time.perf_counter()
    num_stored = 0
    for each in build(specs, device.arch, jobs):
        compiled, num_stored = each.compiled, num_stored + each.stored
        spills = compiled.spill_store_bytes + compiled.spill_load_bytes
        print(
            f"{each.spec.name:48}{compiled.registers:10}{spills:8}{each.seconds:9.2f}", flush=True
        )
    where, seconds = default_directory() or "no folder", time.perf_counter() - begin
    print(f"{num_stored} of {len(specs)} kernels in {where} after {seconds:.1f} s")
    return num_stored == len(specs)


if __name__ == "__main__":
    raise SystemExit(main())
