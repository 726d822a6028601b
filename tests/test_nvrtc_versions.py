"""Kernels fit with the NVRTC of CUDA 12 too: CuPy brings one version, and users have either."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import struct
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import metadata
from typing import Any
from unittest import mock

import needs
import pytest
from nvrtc_by_ctypes import Nvrtc, library_of

from cuattn.abi.structs import Product
from cuattn.errors import CompileError
from cuattn.execute import unit_of
from cuattn.jit import compile as compiling
from cuattn.jit.compile import (
    Compiled,
    CompileOptions,
    compile_unit,
    nvrtc_version,
    supported_archs,
)
from cuattn.jit.source import Unit
from cuattn.planning.device import Device, known_device
from cuattn.planning.families import every_spec
from cuattn.planning.plan import KernelSpec
from cuattn.precompile import default_specs

LIBRARY = "nvidia-cuda-nvrtc-cu12", "libnvrtc.so.12"
#: Compiled for this target: one tile of every kernel and width. For the others: those that take
#: all the registers there are.
MAIN = "sm_90a"
OTHERS = ("sm_80", "sm_86", "sm_100", "sm_120")
#: Kernels that promise to keep all in registers, and do with NVRTC 13: the bytes of a thread that
#: NVRTC 12.9 keeps elsewhere, in float16 as in bfloat16.
SPILLS_OF_12 = {
    ("sm_80", "cuattn_bwd_kv_tf32x3_f32_m32n128d64_dkdv"): 48,
    ("sm_100", "cuattn_fwd_sm80_f16_m128n64d32"): 12,
    ("sm_100", "cuattn_fwd_sm80_f16_m128n64d96"): 20,
    ("sm_120", "cuattn_fwd_sm80_f16_m128n64d32"): 24,
}
#: Registers of a thread that a block of so many threads can have at most.
REGISTER_FILE = 65536


@functools.cache
def cuda_12() -> Nvrtc:
    """The NVRTC of the wheel, loaded once."""
    # CuPy's loader takes an NVRTC that the process has already, of whatever version: it goes first.
    needs.nvrtc()
    return Nvrtc(library_of(*LIBRARY))


@pytest.fixture
def nvrtc_12(monkeypatch):
    """What every compilation of a test calls; skip without the wheel, but fail under CI=true."""
    try:
        nvrtc = cuda_12()
    except (metadata.PackageNotFoundError, FileNotFoundError) as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must have {LIBRARY[0]}: {error}")
        pytest.skip(str(error))
    with monkeypatch.context() as patch:
        patch.setattr(compiling, "_nvrtc", lambda: nvrtc)
        yield nvrtc


def one_of_each(device: Device) -> list[KernelSpec]:
    """The first tile, which is the largest, of every default kernel, accumulator and width."""
    chosen: dict[object, KernelSpec] = {}
    for spec in default_specs(device):
        config = dict(spec.config)
        if "_f16" not in spec.name:  # bfloat16 differs by one instruction
            parts = (config.get(name) for name in ("product", "block_d"))
            chosen.setdefault((spec.entry, "_f64" in spec.name, *map(str, parts)), spec)
    return list(chosen.values())


def sample_of(arch: str) -> list[KernelSpec]:
    """What is compiled for a target; with CUATTN_EVERY_KERNEL=1, for minutes, all there is."""
    device = known_device(arch)
    if os.environ.get("CUATTN_EVERY_KERNEL"):
        return list(every_spec(device) if arch == MAIN else default_specs(device))
    specs = one_of_each(device)
    return specs if arch == MAIN else [spec for spec in specs if is_near_to_spilling(spec)]


def is_near_to_spilling(spec: KernelSpec) -> bool:
    """Forwards that promise to keep several blocks on an SM; gradients summed by tensor cores."""
    config = dict(spec.config)
    if config.get("product") == Product.Mma:
        return spec.entry.endswith("bwd_kv_simt")
    return spec.entry.endswith("fwd_sm80") and config["block_d"] in (32, 96)


def fits(arch: str, spec: KernelSpec, its: Compiled) -> bool:
    """Whether a kernel keeps its promise; where it may spill, only for want of registers."""
    spilled = max(its.spill_store_bytes, its.spill_load_bytes)
    may_spill = SPILLS_OF_12.get((arch, spec.name.replace("bf16", "f16")), spec.max_spill_bytes)
    most = REGISTER_FILE // (spec.num_threads * spec.min_blocks) // 8 * 8
    all_taken = -(-its.registers // 8) * 8 >= min(most, 256)
    fitting = its.registers * spec.num_threads <= REGISTER_FILE
    return fitting and spilled <= may_spill and (all_taken or not spilled)


@pytest.mark.parametrize("arch", [MAIN, *OTHERS])
def test_every_kernel_fits_with_nvrtc_12(nvrtc_12, arch):
    """As with the NVRTC of CuPy, of which test_compile says it."""
    assert nvrtc_version() == (12, 9)
    specs = sample_of(arch)
    assert specs
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        images = pool.map(lambda spec: compile_unit(unit_of(spec), CompileOptions(arch)), specs)
        broken = [
            f"{spec.name} on {arch}: {its.log}"
            for spec, its in zip(specs, images, strict=True)
            if not fits(arch, spec, its)
        ]
    assert not broken, "\n".join(broken)


def test_the_sample_has_every_kernel_of_every_family():
    entries = {spec.entry for spec in default_specs(known_device(MAIN))}
    assert {spec.entry for spec in sample_of(MAIN)} == entries
    for arch in OTHERS:
        assert {"kernel::fwd_sm80", "kernel::bwd_kv_simt"} <= {
            spec.entry for spec in sample_of(arch)
        }


PROBE = Unit("probe", 'extern "C" __global__ void probe(float* x) { x[0] += 1; }', {}, 1)


def image_of(nvrtc: Any) -> bytes:
    with mock.patch.object(compiling, "_nvrtc", lambda: nvrtc):
        return compile_unit(PROBE, CompileOptions(MAIN)).cubin


@pytest.mark.parametrize("changes", [{"lineinfo": True}, {"fmad": False}])
def test_nvrtc_12_takes_every_target_and_option(nvrtc_12, changes):
    assert {MAIN, *OTHERS} <= set(supported_archs())
    assert compile_unit(PROBE, CompileOptions(MAIN, **changes)).cubin[:4] == b"\x7fELF"


def test_the_image_has_the_bytes_that_its_head_speaks_of(nvrtc_12):
    """The last of which CuPy's binding drops, and compile_unit adds."""
    image = image_of(nvrtc_12)
    (programs,) = struct.unpack_from("<Q", image, 32)
    size, count = struct.unpack_from("<HH", image, 54)
    assert len(image) == programs + size * count


def test_nvrtc_12_refuses_as_the_other_does(nvrtc_12):
    with pytest.raises(CompileError, match=r"broken: NVRTC 12\.9 refused it") as caught:
        compile_unit(Unit("broken", "nonsense", {}, 1), CompileOptions(MAIN))
    assert "nonsense" in caught.value.log


def alone(of_wheel: bool) -> bytes:
    """In a process that loads only one of them."""
    return image_of(Nvrtc(library_of(*LIBRARY)) if of_wheel else compiling._nvrtc())


def test_two_versions_in_one_process_stay_apart(nvrtc_12):
    """What a unit becomes does not depend on which NVRTC the process has loaded beside it."""
    theirs = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        expected = list(processes.map(alone, (True, False)))
    assert expected == [image_of(nvrtc_12), image_of(theirs)]
    are_one = theirs.getVersion() == nvrtc_12.getVersion()
    assert (expected[0] == expected[1]) == are_one
