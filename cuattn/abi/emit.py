"""The shared declarations as C++ text: ``kernels_cu/base/abi.cuh``, and for host programs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cuattn.abi.structs import ENUMS, PARAMS, STRUCTS
from cuattn.abi.types import Enum, Struct

_HEAD = """\
// What Python and CUDA share. Layer: base.
//
// GENERATED from cuattn/abi/structs.py by `python -m cuattn.abi --write`; edit that file instead.
// The asserts at the end compare every offset and size with the NumPy dtype that Python fills, so
// the two sides cannot drift: a difference does not compile.
#pragma once

#include "base/prelude.cuh"

namespace cuattn {
"""


_HOST_HEAD = """\
// The parameters of cuattn's kernels, for a host program: standard C++, no header of CUDA.
//
// GENERATED from cuattn/abi/structs.py (MIT licence). A kernel takes one of the last two structs by
// value. data holds device addresses; strides and sizes count elements. lse, dlse and delta are
// float32, or float64 where q is; part_out, part_lse and dq_sum are float32.
//
// Of the values in kParams a program sets the addresses, and may change softmax_scale and the
// strides of q, k, v, out, dout and dlse to those of its arrays. All else was decided together with
// kernels and grids: another shape, or other gradients, is another export. Addresses are aligned to
// the size of an element (to 16 bytes where it should be fast), those of the workspace to 256.
#ifndef CUATTN_ABI_H
#define CUATTN_ABI_H

#include <array>
#include <cstddef>
#include <cstdint>

namespace cuattn {

using i32 = std::int32_t;
using i64 = std::int64_t;
using f64 = double;

// One of the kernels that do a pass: cuLaunchKernel(function, grid, 1, 1, block, 1, 1, smem_bytes,
// stream, &address_of_the_parameters, nullptr).
struct Launch {
  const char* name;   // of the function in the module
  const char* cubin;  // the file that holds the module
  unsigned grid;
  unsigned block;
  unsigned smem_bytes;  // above 48 KB the function needs
                        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
};
"""


def host_header() -> str:
    """The parameter structs for a C++ program of the host, which stands alone."""
    lines = [_HOST_HEAD]
    for struct in PARAMS:
        lines += [*_struct(struct), ""]
    asserts = (line for struct in PARAMS for line in _asserts(struct))
    lines += [line.replace("CUATTN_OFFSETOF", "offsetof") for line in asserts]
    lines += ["", "}  // namespace cuattn", "", "#endif", ""]
    return "\n".join(lines)


_NAME = re.compile(r"[a-z][a-z0-9_]*")

#: Names of that form that C++ or the header has for something else.
_TAKEN = re.compile(
    "abi|i32|i64|f64|std|alignas|alignof|and|and_eq|asm|auto|bitand|bitor|bool|"
    "break|case|catch|char|char8_t|char16_t|char32_t|class|co_await|co_return|"
    "co_yield|compl|concept|const|const_cast|consteval|constexpr|constinit|continue|"
    "decltype|default|delete|do|double|dynamic_cast|else|enum|explicit|export|extern|"
    "false|float|for|friend|goto|if|inline|int|long|mutable|namespace|new|noexcept|"
    "not|not_eq|nullptr|operator|or|or_eq|private|protected|public|register|"
    "reinterpret_cast|requires|return|short|signed|sizeof|static|static_assert|"
    "static_cast|struct|switch|template|this|thread_local|throw|true|try|typedef|"
    "typeid|typename|union|unsigned|using|virtual|void|volatile|wchar_t|while|xor|"
    "xor_eq"
)


def is_cpp_name(name: str) -> bool:
    """Whether a namespace in cuattn may have this name, and a file beside ``cuattn_abi.h``."""
    return bool(_NAME.fullmatch(name)) and not _TAKEN.fullmatch(name)


def pass_header(
    name: str,
    what: str,
    arch: str,
    params: tuple[Struct, Mapping[str, Any]],
    launches: Iterable[tuple[str, str, int, int, int]],
    workspace: Mapping[str, int],
    itemsizes: Mapping[str, int],
    pointers: Iterable[str],
) -> str:
    """Launches, workspace and parameters as a C++ header that includes that of ``host_header``.

    Parameters
    ----------
    name, what, arch : str
        The namespace in cuattn; what it does, in words; the target of the cubins.
    params : (Struct, mapping)
        The parameter struct and its values, all addresses None.
    launches : iterable of tuples
        The fields of ``Launch``.
    workspace : mapping
        Bytes of every buffer by its pointer's name; 0 where it is not used.
    itemsizes : mapping
        Bytes of an element of q, out and lse.
    pointers : iterable of str
        The names of all addresses that the pass takes.
    """
    struct, values = params
    literal = textwrap.indent(textwrap.fill(struct.literal(values), 96), "    ")
    lines = [
        f'    Launch{{"{function}", "{cubin}",\n           {grid}, {block}, {smem_bytes}}},'
        for function, cubin, grid, block, smem_bytes in launches
    ]
    sizes = [
        f"constexpr std::size_t k{each.title().replace('_', '')}Bytes = {size};"
        for each, size in workspace.items()
    ]
    guard = f"CUATTN_{name.upper()}_H"
    return "\n".join(
        [
            f"// GENERATED by cuattn.kernels (MIT licence): {what}.",
            f"#ifndef {guard}",
            f"#define {guard}",
            "",
            '#include "cuattn_abi.h"',
            "",
            f"namespace cuattn::{name} {{",
            "",
            "// What the cubins run on: X.y on X.z with z >= y, but sm_90a on 9.0 alone, and only",
            "// where a block may have the shared memory that each asks for.",
            f'constexpr char kArch[] = "{arch}";',
            "",
            "// Bytes of an element of q, k, v and the gradients; of out and dout; of lse.",
            f"constexpr std::size_t kItemsize = {itemsizes['q']};",
            f"constexpr std::size_t kOutItemsize = {itemsizes['out']};",
            f"constexpr std::size_t kLseItemsize = {itemsizes['lse']};",
            "",
            "// Bytes of each buffer beyond the arrays; 0: leave its pointer null. Calls one",
            "// after another on a stream may share them, calls on two streams may not.",
            *sizes,
            "",
            "// In this order, on one stream, all with the same parameters.",
            f"constexpr std::array<Launch, {len(lines)}> kLaunches = {{",
            *lines,
            "};",
            "",
            f"// All but the addresses: {', '.join(pointers)}.",
            f"constexpr {struct.name} kParams =",
            f"{literal};",
            "",
            f"}}  // namespace cuattn::{name}",
            "",
            "#endif",
            "",
        ]
    )


def header(enums: Iterable[Enum] = ENUMS, structs: Iterable[Struct] = STRUCTS) -> str:
    """The complete header for these declarations, in the order given."""
    structs = tuple(structs)
    lines = [_HEAD]
    for enum in enums:
        lines += [*_enum(enum), ""]
    for struct in structs:
        lines += [*_struct(struct), ""]
    lines.append("// The layout as NumPy sees it.")
    for struct in structs:
        lines += _asserts(struct)
    lines += ["", "}  // namespace cuattn", ""]
    return "\n".join(lines)


def _enum(enum: Enum) -> Iterator[str]:
    summary = (enum.type.__doc__ or "").splitlines()[0]
    yield f"// {summary}"
    members = ", ".join(f"{enum.member(member)} = {member.value}" for member in enum.type)
    keyword = "enum" if enum.is_flags else "enum class"
    yield f"{keyword} {enum.name} : i32 {{ {members} }};"


def _struct(struct: Struct) -> Iterator[str]:
    yield f"// {struct.doc}"
    yield f"struct {struct.name} {{"
    members = [f"  {field.type.declare(field.name)};" for field in struct.fields]
    width = max(map(len, members))
    for member, field in zip(members, struct.fields, strict=True):
        yield f"{member.ljust(width)}  // {field.doc}" if field.doc else member
    yield "};"


def _asserts(struct: Struct) -> Iterator[str]:
    yield f"static_assert(sizeof({struct.name}) == {struct.dtype.itemsize});"
    yield f"static_assert(alignof({struct.name}) == {struct.alignment});"
    for field, offset in zip(struct.fields, struct.offsets, strict=True):
        yield f"static_assert(CUATTN_OFFSETOF({struct.name}, {field.name}) == {offset});"
