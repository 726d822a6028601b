"""cuattn.abi: the header is current, both compilers see NumPy's layout, values survive the trip."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import needs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuattn.abi import emit, structs
from cuattn.abi.__main__ import PATH, main
from cuattn.abi.template import Template
from cuattn.abi.types import (
    CONST_PTR,
    F32,
    F64,
    I32,
    I64,
    PTR,
    U8,
    Array,
    Enum,
    Field,
    Struct,
)
from cuattn.jit.compile import CompileOptions, compile_unit
from cuattn.jit.source import Unit, kernels_dir

Inner = Struct("Inner", "Padded behind.", Field("wide", I64, ""), Field("small", U8, "tail"))
Awkward = Struct(
    "Awkward",
    "Every type, with holes.",
    Field("flag", U8, ""),
    Field("single", F32, ""),
    Field("inner", Inner, ""),
    Field("bytes", Array(U8, 3), ""),
    Field("dtype", structs.DTYPE, ""),
    Field("wrt", structs.WRT, ""),
    Field("integer", I32, ""),
    Field("double_", F64, ""),
    Field("pair", Array(I64, 2), ""),
)
Pointers = Struct("Pointers", "Addresses.", Field("a", PTR, ""), Field("b", CONST_PTR, ""))


def test_committed_header_is_current():
    assert PATH.read_text(encoding="utf-8") == emit.header(), "run python -m cuattn.abi --write"
    assert main(["--check"]) == 0


def test_check_reports_a_stale_header(tmp_path, monkeypatch, capsys):
    stale = tmp_path / "abi.cuh"
    stale.write_text("// old\n")
    monkeypatch.setattr("cuattn.abi.__main__.PATH", stale)
    assert main(["--check"]) == 1
    assert "--write" in capsys.readouterr().err
    assert main(["--write"]) == 0
    assert main(["--check"]) == 0


def test_lines_of_the_header_fit_a_screen():
    assert max(map(len, emit.header().splitlines())) <= 100


def both_sides(extra: str) -> str:
    """The real header, the awkward structs, and more text."""
    awkward = emit.header((), (Inner, Awkward, Pointers)).replace("#pragma once", "")
    return '#include "base/abi.cuh"\n' + awkward + extra


LIMITS = {
    "flag": 255,
    "single": 0.1,
    "inner": {"wide": -(2**63), "small": 0},
    "bytes": [1, 2, 3],
    "dtype": structs.DType.BFloat16,
    "wrt": structs.Wrt.Dq | structs.Wrt.Dv,
    "integer": -(2**31),
    "double_": 1e-310,
    "pair": [2**63 - 1, 0],
}
LIMITS_TEXT = f"""
constexpr cuattn::Awkward make() {{ using namespace cuattn; return {Awkward.literal(LIMITS)}; }}
constexpr cuattn::Awkward value = make();
static_assert(value.flag == 255 && value.single == 0.1f && value.double_ == 1e-310);
static_assert(value.inner.wide == (-9223372036854775807 - 1) && value.bytes[2] == 3);
static_assert(value.dtype == cuattn::DType::kBFloat16 && value.wrt == 5);
static_assert(value.integer == (-2147483647 - 1) && value.pair[0] == 9223372036854775807);
"""


def test_nvrtc_sees_the_offsets_and_values_of_numpy():
    needs.nvrtc()
    root = kernels_dir()
    headers = {path: (root / path).read_text() for path in ("base/abi.cuh", "base/prelude.cuh")}
    text = both_sides("__device__ " + LIMITS_TEXT.strip()) + 'extern "C" __global__ void k() {}\n'
    compile_unit(Unit("k", text, headers, 1), CompileOptions("sm_75"))


def test_host_compiler_sees_the_offsets_and_values_of_numpy(tmp_path: Path):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no host C++ compiler")
    source = tmp_path / "abi.cpp"
    source.write_text(both_sides(LIMITS_TEXT))
    markers = ["-D__device__=", "-D__host__=", "-D__forceinline__=inline"]
    subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", f"-I{kernels_dir()}", *markers, str(source)],
        check=True,
    )


@pytest.mark.parametrize("struct", structs.STRUCTS, ids=lambda struct: struct.name)
def test_dtype_is_what_numpy_aligns(struct):
    fields = [(field.name, field.type.dtype) for field in struct.fields]
    assert struct.dtype.itemsize == np.dtype(fields, align=True).itemsize
    assert struct.dtype.itemsize % struct.alignment == 0


def values_of(kind) -> st.SearchStrategy:
    """Values of a C type."""
    if isinstance(kind, Struct):
        return st.fixed_dictionaries({f.name: values_of(f.type) for f in kind.fields})
    if isinstance(kind, Array):
        return st.lists(values_of(kind.element), min_size=kind.length, max_size=kind.length)
    if isinstance(kind, Enum):
        return st.sampled_from(kind.type)  # of flags, every combination
    if kind.dtype.kind == "f":
        width = 8 * kind.dtype.itemsize
        return st.floats(allow_nan=False, allow_infinity=False, width=width)
    limits = np.iinfo(kind.dtype)
    return st.integers(int(limits.min), int(limits.max))


def read_literal(text: str):
    """Evaluate a designated initialiser as Python reads it."""
    text = re.sub(r"\.(\w+) = ", r"'\1': ", text)
    text = re.sub(r": \{([^{}']*)\}", r": [\1]", text)
    text = re.sub(r"\b\w+\{", "{", text)
    text = re.sub(r"\b(\w+)::k(\w+)", r"\1.\2", text)
    text = re.sub(r"\bkWrt(\w+)", r"Wrt.\1", text)
    text = re.sub(r"(?<=[\d.])f\b", "", text)
    return eval(text, {name: getattr(structs, name) for name in ("DType", "Product", "Wrt")})


@given(values_of(Awkward))
def test_a_literal_reads_back_as_the_value(values):
    back = read_literal(Awkward.literal(values))
    assert Awkward.pack(back).tobytes() == Awkward.pack(values).tobytes()


@given(values_of(structs.SimtConfig))
def test_a_config_literal_reads_back_as_the_value(values):
    assert read_literal(structs.SimtConfig.literal(values)) == values


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"wide": 2**63}, "i64"),
        ({"small": 1.5}, "u8"),
        ({"small": -1}, "u8"),
        ({"unheard": 1}, "unheard"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(change, complaint):
    values = {"wide": 0, "small": 0} | change
    for convert in (Inner.pack, Inner.literal):
        with pytest.raises(ValueError, match=complaint):
            convert(values)


def test_a_missing_field_is_refused():
    with pytest.raises(ValueError, match="small"):
        Inner.pack({"wide": 0})


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_of_a_numpy_name(name):
    assert structs.DType.of(name).name.lower() == name


def a_forward() -> dict:
    """Values for FwdParams with distinct numbers everywhere."""
    numbers = iter(range(1, 100))

    def fill(struct: Struct) -> dict:
        return {
            field.name: fill(field.type) if isinstance(field.type, Struct) else next(numbers)
            for field in struct.fields
        }

    return fill(structs.FwdParams)


def struct_bytes(arguments):
    """What a kernel would read: the bytes of the struct that the first word leads to."""
    size = structs.FwdParams.dtype.itemsize
    begin, length = arguments.buffer_info()
    assert arguments[0] + size == begin + length * arguments.itemsize
    return ctypes.string_at(arguments[0], size)


def test_template_replaces_pointers_and_nothing_else():
    values = a_forward()
    template = Template(structs.FwdParams, values)
    addresses = {name: (1 << 47) + i for i, name in enumerate(template.pointers)}
    filled = struct_bytes(template.arguments(addresses))
    for name, address in addresses.items():
        if isinstance(values[name], dict):
            values[name]["data"] = address
        else:
            values[name] = address
    assert filled == structs.FwdParams.pack(values).tobytes()


def test_template_is_not_changed_by_a_call():
    values = a_forward()
    template = Template(structs.FwdParams, values)
    first = template.arguments({"q": 7})
    before = struct_bytes(first)
    template.arguments({"q": 9, "lse": 3})
    assert struct_bytes(first) == before
    assert struct_bytes(template.arguments({})) == structs.FwdParams.pack(values).tobytes()


def test_template_names_every_pointer_of_the_backward():
    values = dict.fromkeys(field.name for field in structs.BwdParams.fields)
    values |= {"shape": None, "softmax_scale": 1.0, "dq_sum_size": 0}
    names = Template(structs.BwdParams, values).pointers
    assert names[:4] == ("q", "k", "v", "out")
    assert set(names) >= {"dout", "dq", "dk", "dv", "dlse", "lse", "delta"}


def test_template_refuses_an_unknown_pointer():
    with pytest.raises(KeyError, match="qq"):
        Template(structs.FwdParams, a_forward()).arguments({"qq": 1})
