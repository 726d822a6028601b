"""The shared declarations as C++ text: ``kernels_cu/base/abi.cuh``, and for host programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
