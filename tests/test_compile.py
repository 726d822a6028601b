"""cuattn.jit.compile: kernels build for every target, without spills, without a GPU."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import needs
import pytest

from cuattn.errors import CompileError
from cuattn.execute import unit_of as unit_of_spec
from cuattn.jit import compile as compiling
from cuattn.jit.compile import Compiled, CompileOptions, compile_unit
from cuattn.jit.source import Unit, kernels_dir, reachable_headers
from cuattn.planning.device import known_device
from cuattn.planning.families import every_spec
from cuattn.planning.plan import KernelSpec
from cuattn.precompile import default_specs

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")

#: Registers of a thread that a block of so many threads can have at most.
REGISTER_FILE = 65536


def unit_of(text: str, name: str = "probe", num_threads: int = 128) -> Unit:
    return Unit(name, text, reachable_headers(text, kernels_dir()), num_threads)


PROBE = """\
#include "base/abi.cuh"
extern "C" __global__ void __launch_bounds__(128, 1)
probe(const __grid_constant__ cuattn::FwdParams params) {
  __shared__ float row[128];
  float* lse = static_cast<float*>(params.lse);
  row[threadIdx.x] = lse[threadIdx.x];
  __syncthreads();
  lse[threadIdx.x] = row[127 - threadIdx.x] / float(params.softmax_scale);
}
"""

SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2)
probe(float* data) {
  float held[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) held[i] = data[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) data[threadIdx.x * 128 + i] = held[i] * held[127 - i];
}
"""


@pytest.fixture(scope="session")
def fits() -> Callable[..., Compiled]:
    """Compile a unit for a target, once, and fail on a spill or on too many registers."""
    needs.nvrtc()
    done: dict[tuple[str, str], Compiled] = {}

    def check(unit: Unit, arch: str, max_spill_bytes: int = 0, min_blocks: int = 1) -> Compiled:
        compiled = done.get((unit.text, arch))
        if compiled is None:
            compiled = done[unit.text, arch] = compile_unit(unit, CompileOptions(arch))
        spilled = max(compiled.spill_store_bytes, compiled.spill_load_bytes)
        assert spilled <= max_spill_bytes, f"{unit.name} spills on {arch}: {compiled.log}"
        assert compiled.registers * unit.num_threads <= REGISTER_FILE, compiled.log
        if spilled:  # then none was left of those that are given out, eight at a time
            most = REGISTER_FILE // (unit.num_threads * min_blocks) // 8 * 8
            assert -(-compiled.registers // 8) * 8 >= min(most, 256), compiled.log
        return compiled

    return check


@pytest.mark.parametrize("arch", TARGETS)
def test_the_shared_header_builds_for_every_target(fits, arch):
    compiled = fits(unit_of(PROBE), arch)
    assert compiled.registers > 0
    assert compiled.smem_bytes == 512
    assert compiled.stack_bytes == 0


def test_a_spill_is_seen(fits):
    with pytest.raises(AssertionError, match="spills"):
        fits(unit_of(SPILLING, num_threads=1024), "sm_80")


def test_the_cubin_is_a_whole_elf_image():
    needs.nvrtc()
    cubin = compile_unit(unit_of(PROBE), CompileOptions("sm_90a")).cubin
    assert cubin[:4] == b"\x7fELF"
    (programs,) = struct.unpack_from("<Q", cubin, 32)
    (sections,) = struct.unpack_from("<Q", cubin, 40)
    size, count = struct.unpack_from("<HH", cubin, 54)
    section_size, section_count = struct.unpack_from("<HH", cubin, 58)
    assert len(cubin) >= max(programs + size * count, sections + section_size * section_count)
    assert b"probe" in cubin


def test_same_input_gives_the_same_cubin():
    needs.nvrtc()
    first, second = (compile_unit(unit_of(PROBE), CompileOptions("sm_80")) for _ in range(2))
    assert first.cubin == second.cubin


def test_float32_keeps_its_accuracy():
    flags = CompileOptions("sm_80").flags()
    assert {"-ftz=false", "-prec-div=true", "-prec-sqrt=true"} <= set(flags)
    assert not any("fast" in flag for flag in flags)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [({"lineinfo": True}, "-lineinfo"), ({"fmad": False}, "-fmad=false")],
)
def test_an_option_is_a_flag_that_nvrtc_takes(changes, flag):
    needs.nvrtc()
    options = CompileOptions("sm_80", **changes)
    assert flag in options.flags()
    compile_unit(unit_of(PROBE), options)


def test_a_refused_unit_names_the_kernel_and_keeps_the_log():
    needs.nvrtc()
    with pytest.raises(CompileError, match=r"broken: NVRTC .* sm_80: broken.cu\(1\)") as caught:
        compile_unit(unit_of("nonsense", "broken"), CompileOptions("sm_80"))
    assert caught.value.kernel_name == "broken"
    assert "nonsense" in caught.value.log


def test_an_unknown_target_is_a_compile_error():
    needs.nvrtc()
    with pytest.raises(CompileError, match="sm_12345"):
        compile_unit(unit_of(PROBE), CompileOptions("sm_12345"))


def test_a_missing_compiler_says_what_to_install(monkeypatch):
    def missing(_name):
        raise ImportError("no cupy")

    monkeypatch.setattr(compiling, "import_module", missing)
    compiling._nvrtc.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"cupy-cuda13x\[ctk\].*cupy-cuda12x\[ctk\]"):
            compiling.nvrtc_version()
    finally:
        compiling._nvrtc.cache_clear()


def test_every_target_is_supported():
    needs.nvrtc()
    assert set(TARGETS) <= set(compiling.supported_archs())


SUPPORTED = (75, 80, 86, 89, 90, 100, 120)


@pytest.mark.parametrize(
    ("device", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 7), "sm_86"),
        ((9, 0), "sm_90a"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_a_device_gets_the_newest_code_that_it_runs(device, arch):
    assert compiling._choose_arch(*device, SUPPORTED, (13, 0)) == arch


@pytest.mark.parametrize(
    ("device", "version", "remedy"),
    [
        ((7, 0), (13, 0), "cuda12"),
        ((7, 0), (12, 9), "older than every"),
        ((13, 0), (13, 0), "newer CuPy"),
    ],
)
def test_a_device_without_code_says_what_to_install(device, version, remedy):
    with pytest.raises(CompileError, match=remedy) as caught:
        compiling._choose_arch(*device, SUPPORTED, version)
    assert f"sm_{device[0]}{device[1]}" in str(caught.value)


#: Targets for which every kernel is compiled: the oldest and the fastest; for the others, those of
#: calls without options. In bfloat16 where float16 differs by one instruction: with
#: CUATTN_EVERY_KERNEL=1, for minutes more, all there is.
IN_FULL = ("sm_75", "sm_90a")


def compiled_for(arch: str) -> Iterator[KernelSpec]:
    device, everything = known_device(arch), os.environ.get("CUATTN_EVERY_KERNEL")
    for spec in every_spec(device) if everything or arch in IN_FULL else default_specs(device):
        if everything or "_sm80_f16" not in spec.name:
            yield spec


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_fits(fits, arch):
    """No kernel spills that promises not to, on any target, in any tile."""
    needs.nvrtc()
    specs = compiled_for(arch)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        fitting = [
            pool.submit(fits, unit_of_spec(spec), arch, spec.max_spill_bytes, spec.min_blocks)
            for spec in specs
        ]
    broken = [str(each.exception()) for each in fitting if each.exception()]
    assert not broken, "\n".join(broken)
    assert len(fitting) > 20
