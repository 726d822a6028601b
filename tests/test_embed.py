"""Kernels as plain data: the source stands alone, the parameters are those of a launch."""

import re
import shutil
import subprocess

import needs
import numpy as np
import pytest
from calls import refused
from test_execute import H200

import cuattn
from cuattn import embed
from cuattn.abi import structs
from cuattn.abi.emit import host_header
from cuattn.abi.template import Template
from cuattn.execute import unit_of
from cuattn.jit.compile import CompileOptions, _nvrtc, compile_unit
from cuattn.jit.source import flattened
from cuattn.planning.plan import KernelSpec, parameters
from cuattn.planning.select import plan_for
from cuattn.precompile import default_specs

Q, K, V = (np.empty(shape, np.float16) for shape in ((2, 70, 4, 64), *[(2, 90, 2, 64)] * 2))
ADDRESSES = {"q": 1 << 33, "k": 2 << 33, "v": 3 << 33, "out": 4 << 33, "lse": 5 << 33}


@pytest.fixture(autouse=True)
def compiler():
    needs.nvrtc()


def given(**how):
    return cuattn.kernels(Q, K, V, device="sm_90a", **how)


def addresses(kernels):
    """A device address for every pointer."""
    return {name: (i + 1) << 33 for i, name in enumerate(kernels.pointers)}


def one_of_each_entry():
    """A default kernel for every function that kernels are made of."""
    found: dict[str, KernelSpec] = {}
    for spec in default_specs(H200):
        found.setdefault(spec.entry, spec)
    return found.values()


@pytest.mark.parametrize("spec", one_of_each_entry(), ids=lambda spec: spec.name)
def test_a_flattened_source_is_the_unit(spec):
    """It compiles alone, to the machine code of the unit, for what matters of it."""
    unit = unit_of(spec)
    text = flattened(unit)
    assert "#include" not in text
    assert "#pragma once" not in text
    flags = CompileOptions("sm_90a").flags()
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(text, "flattened.cu", [], [])
    nvrtc.compileProgram(program, flags)
    report = re.compile(r"Used \d+ registers.*|\d+ bytes stack frame.*")
    found = report.findall(nvrtc.getProgramLog(program))
    nvrtc.destroyProgram(program)
    assert found == report.findall(compile_unit(unit, CompileOptions("sm_90a")).log)


def test_options_are_taken_beside_those_that_cupy_adds():
    kernel = given()[0]
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(kernel.source, "kern.cu", [], [])
    nvrtc.compileProgram(program, (*kernel.options, "-ftz=true", "-arch=sm_90"))
    assert kernel.name.encode() in nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    assert not any("arch" in option or "ftz" in option for option in kernel.options)


@pytest.mark.parametrize("backward", [False, True])
def test_launches_are_those_of_the_plan(backward):
    kernels = given(causal=True, align="bottom_right", backward=backward)
    dense = given(backward=backward)
    assert kernels.op == ("backward" if backward else "forward")
    assert kernels.arch == "sm_90a"
    assert len(kernels) == len(list(kernels)) == len(kernels[:]) >= 1
    for kernel in kernels:
        assert kernel.cubin.startswith(b"\x7fELF")
        assert kernel.name.encode() in kernel.cubin
        assert f"{kernel.name}(const __grid_constant__ cuattn::{kernels.struct}" in kernel.source
        assert kernel.grid[1:] == kernel.block[1:] == (1, 1)
        assert f"__launch_bounds__({kernel.block[0]}" in kernel.source
    assert kernels.params(addresses(kernels)) != dense.params(addresses(dense))
    assert repr(kernels).startswith(f"<cuattn.Kernels: {kernels.op} on sm_90a: cuattn_")


@pytest.mark.parametrize("how", [{}, {"wrt": {"v"}}, {"deterministic": True}, None])
def test_parameters_are_what_a_launch_of_cuattn_passes(how, monkeypatch):
    plans = []
    monkeypatch.setattr(
        embed, "plan_for", lambda *asked: plans.append(plan_for(*asked)) or plans[0]
    )
    kernels = given() if how is None else given(backward=True, **how)
    struct = structs.FwdParams if how is None else structs.BwdParams
    template = Template(struct, parameters(plans[0]))
    where = addresses(kernels)
    words = template.arguments(where)
    assert kernels.params(where) == words[1:].tobytes()
    assert kernels.params(**where) == kernels.params(where)
    assert len(kernels.params(where)) == struct.dtype.itemsize
    assert set(kernels.workspace) == {name for name, _ in plans[0].workspace}
    assert sum(kernels.workspace.values()) == plans[0].workspace_bytes
    gradients = {"dq", "dk", "dv"} & set(kernels.pointers)
    assert gradients == (set() if how is None else {"d" + name for name in how.get("wrt", "qkv")})


def test_a_split_forward_has_its_merge_and_workspace():
    q, k = np.empty((1, 16, 1, 64), np.float16), np.empty((1, 9000, 1, 64), np.float16)
    kernels = cuattn.kernels(q, k, k, device="sm_90a")
    assert [kernel.name.split("_")[2] for kernel in kernels] == ["sm80", "merge"]
    assert list(kernels.workspace) == ["part_out", "part_lse"]


@pytest.mark.parametrize("backward", [False, True])
def test_other_strides_are_other_parameters_and_nothing_else(backward):
    """So a program may set those of its own arrays."""
    wide = np.empty((2, 70, 4, 96), np.float16)
    views = wide[..., 8:72], K[:, ::-1], np.broadcast_to(V[:, :1], V.shape)
    some, other = (
        cuattn.kernels(*arrays, device="sm_90a", backward=backward) for arrays in ((Q, K, V), views)
    )
    assert some[:] == other[:]
    assert some.workspace == other.workspace
    where = addresses(some)
    words = [np.frombuffer(each.params(where), np.int64) for each in (some, other)]
    changed = set(np.flatnonzero(words[0] != words[1]))
    strides = {some.pointers[name] // 8 + 1 + axis for name in "qkv" for axis in range(4)}
    assert changed
    assert changed <= strides


def test_an_empty_problem_has_nothing_to_launch():
    empty = np.empty((2, 0, 2, 64), np.float16)
    kernels = cuattn.kernels(empty, empty, empty, device="sm_90a")
    assert len(kernels) == 0
    assert "nothing to launch" in repr(kernels)


def test_what_may_be_null_may_be_left_out():
    forward, backward = given(), given(backward=True)
    some = {name: at for name, at in ADDRESSES.items() if name != "lse"}
    assert forward.params(some) == forward.params(some, lse=0)
    where = addresses(backward)
    del where["dlse"]
    assert backward.params(where) == backward.params(where, dlse=0)
    for name in where:
        fewer = {each: at for each, at in where.items() if each != name}
        refused(
            cuattn.ArgumentError, "addresses", f"'{name}'", run=lambda f=fewer: backward.params(f)
        )
    refused(cuattn.ArgumentError, "addresses", "'x'", run=lambda: forward.params(ADDRESSES, x=1))
    assert forward.params(some) == forward.params(some, lse=None)


def test_what_has_no_elements_needs_no_address():
    some, none = np.empty((2, 7, 2, 64), np.float16), np.empty((2, 0, 2, 64), np.float16)
    for q, k, needed in (
        (none, some, {"k", "v", "dk", "dv"}),
        (some, none, {"q", "out", "lse", "dout", "dq"}),
    ):
        kernels = cuattn.kernels(q, k, k, device="sm_90a", backward=True)
        assert 0 not in kernels.workspace.values()
        needed |= set(kernels.workspace)
        where = {name: at for name, at in addresses(kernels).items() if name in needed}
        assert len(kernels.params(where)) == structs.BwdParams.dtype.itemsize
        refused(cuattn.ArgumentError, "addresses", run=lambda k=kernels: k.params())


BAD_ADDRESSES = {
    "none": ("addresses", 0, "no ['q']"),
    "negative": ("q", -2, "-0x2"),
    "too large": ("q", 1 << 64, "0x1"),
    "between elements": ("q", 4097, "multiple of 2"),
    "between rows": ("lse", 4098, "multiple of 4"),
    "workspace": ("dq_sum", 4096 + 128, "multiple of 256"),
    "no integer": ("q", 1.5, "float"),
    "array": ("q", np.ones(2), "ndarray"),
    "text": ("q", "4096", "str"),
}


@pytest.mark.parametrize("kind", BAD_ADDRESSES)
def test_an_address_that_no_kernel_can_use_is_refused(kind):
    name, address, got = BAD_ADDRESSES[kind]
    q = np.empty((2, 2000, 2, 64), np.float16)
    backward = cuattn.kernels(q, q, q, device="sm_90a", backward=True)
    where = addresses(backward) | {"q" if name == "addresses" else name: address}
    error = cuattn.ArgumentError if isinstance(address, int) else cuattn.DTypeError
    refused(error, name, got, run=lambda: backward.params(where))


def test_misuse_is_told_what_to_do():
    call = lambda **how: lambda: cuattn.kernels(Q, K, V, **how)  # noqa: E731
    refused(cuattn.ArgumentError, "device", "host memory", "sm_90a", run=call())
    refused(cuattn.ArgumentError, "device", "sm_1", "sm_90a", run=call(device="sm_1"))
    refused(cuattn.ArgumentError, "wrt", "backward=True", run=call(device="sm_90a", wrt={"q"}))
    refused(cuattn.DTypeError, "device", "90", "sm_90a", run=call(device=90))
    refused(cuattn.DTypeError, "backward", "True or False", run=call(backward=1))
    refused(
        cuattn.ArgumentError,
        "k",
        "divides the 4 heads",
        run=lambda: cuattn.kernels(
            Q, K[:, :, :1].repeat(3, 2), V[:, :, :1].repeat(3, 2), device="sm_90a"
        ),
    )


PROGRAM = """
#include "cuattn_forward.h"
#include "cuattn_backward.h"
#include "cuattn_decode.h"

#include <cstdio>
#include <initializer_list>

int main() {
  cuattn::FwdParams forward = cuattn::forward::kParams;
  cuattn::BwdParams backward = cuattn::backward::kParams;
  void* next = nullptr;
  for (void** pointer : {&forward.q.data, &forward.k.data, &forward.v.data, &forward.out.data,
                         &forward.lse})
    *pointer = next = static_cast<char*>(next) + (1ull << 33);
  FILE* file = std::fopen("forward.bin", "wb");
  std::fwrite(&forward, sizeof forward, 1, file);
  std::fclose(file);
  file = std::fopen("backward.bin", "wb");
  std::fwrite(&backward, sizeof backward, 1, file);
  std::fclose(file);
  for (const cuattn::Launch& each : cuattn::backward::kLaunches) {
    std::printf("%s %s %u %u %u\\n", each.name, each.cubin, each.grid, each.block, each.smem_bytes);
  }
  std::printf("%zu %zu\\n", cuattn::backward::kDqSumBytes, cuattn::decode::kPartOutBytes);
  std::printf("%s %zu %zu %zu\\n", cuattn::decode::kArch, cuattn::decode::kItemsize,
              cuattn::decode::kOutItemsize, cuattn::decode::kLseItemsize);
}
"""


def test_what_is_saved_serves_a_cpp_program(tmp_path):
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    q = np.empty((2, 2000, 2, 64), np.float16)
    forward, backward = (
        cuattn.kernels(q, q, q, device="sm_90a", backward=backward) for backward in (False, True)
    )
    assert forward.save(tmp_path / "new") == tmp_path / "new" / "cuattn_forward.h"
    backward.save(str(tmp_path / "new"))
    one, long = np.empty((1, 1, 2, 64), np.float16), np.empty((1, 9000, 2, 64), np.float16)
    decode = cuattn.kernels(one, long, long, device="sm_90a", out_dtype="float32")
    assert decode.save(tmp_path / "new", "decode") == tmp_path / "new" / "cuattn_decode.h"
    for kernel in (*forward, *backward):
        assert (tmp_path / "new" / f"{kernel.name}.sm_90a.cubin").read_bytes() == kernel.cubin
        assert (tmp_path / "new" / f"{kernel.name}.sm_90a.cu").read_text() == kernel.source
    (tmp_path / "main.cpp").write_text(PROGRAM)
    strict = ["-std=c++20", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command = [compiler, *strict, "-I", "new", "main.cpp", "-o", "main"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(["./main"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert (tmp_path / "forward.bin").read_bytes() == forward.params(ADDRESSES)
    nulls = backward._struct.pack(backward._values).tobytes()
    assert (tmp_path / "backward.bin").read_bytes() == nulls
    *launches, sizes, about = done.stdout.splitlines()
    assert launches == [
        f"{each.name} {each.name}.sm_90a.cubin {each.grid[0]} {each.block[0]} {each.smem_bytes}"
        for each in backward
    ]
    assert sizes == f"{backward.workspace['dq_sum']} {decode.workspace['part_out']}"
    assert about == "sm_90a 2 4 4"


def test_what_cannot_be_saved_is_told(tmp_path):
    forward = given()
    for name in ("", "Forward", "a-b", "1st", "double", "abi", "std"):
        refused(cuattn.ArgumentError, "name", run=lambda n=name: forward.save(tmp_path / "x", n))
    refused(cuattn.DTypeError, "name", "int", run=lambda: forward.save(tmp_path / "x", 3))
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    refused(cuattn.ArgumentError, "folder", "file", run=lambda: forward.save(tmp_path / "file"))


def test_the_host_header_has_every_offset():
    for struct in (structs.FwdParams, structs.BwdParams):
        for field, offset in zip(struct.fields, struct.offsets, strict=True):
            assert f"offsetof({struct.name}, {field.name}) == {offset})" in host_header()
