"""The C types that Python and CUDA share: size, alignment, C++ spelling, NumPy dtype, literal.

A type knows everything that both sides need, so a struct is declared once (``structs.py``) and
never spelled twice.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import numpy as np

#: A field's value: a number, an enum member, a sequence, a mapping of fields, or None for null.
Value = Any


class CType(Protocol):
    """What a field of a shared struct needs from its type."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of the same size."""

    @property
    def alignment(self) -> int:
        """C alignment in bytes."""

    def declare(self, name: str) -> str:
        """Spell a C++ member declaration, without the semicolon."""

    def literal(self, value: Value) -> str:
        """Spell a value as a C++ constant expression."""

    def convert(self, value: Value) -> Value:
        """Convert a value to what ``np.array(..., dtype)`` takes for this type."""


@dataclass(frozen=True)
class Scalar:
    """A number: its C++ alias in ``base/prelude.cuh`` and its NumPy dtype."""

    spelling: str
    code: str

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.code)

    @property
    def alignment(self) -> int:
        return self.dtype.itemsize

    def declare(self, name: str) -> str:
        return f"{self.spelling} {name}"

    def convert(self, value: Value) -> Value:
        if self.dtype.kind == "f":
            return float(value)
        number, limits = int(value), np.iinfo(self.dtype)
        if number != value or not limits.min <= number <= limits.max:
            raise ValueError(f"{value!r} is not a value of {self.spelling}")
        return number

    def literal(self, value: Value) -> str:
        number = self.convert(value)
        if self.dtype.kind == "f":
            # why: repr is the shortest text that reads back as the same bits; adding f rounds once
            text = repr(float(self.dtype.type(number)))
            if text.lstrip("-") in ("inf", "nan"):
                raise ValueError(f"{value!r} has no C++ literal")
            return text + ("f" if self.dtype.itemsize == 4 else "")
        if number == -(2**63):
            return f"({number + 1} - 1)"  # why: C++ has no negative literals, 2**63 does not fit
        return str(number)


@dataclass(frozen=True)
class Pointer:
    """A device address; ``None`` is null."""

    spelling: str
    alignment = 8
    dtype = np.dtype("u8")

    def declare(self, name: str) -> str:
        return f"{self.spelling} {name}"

    def convert(self, value: Value) -> Value:
        return 0 if value is None else int(value)

    def literal(self, value: Value) -> str:
        if value is not None:
            raise TypeError(f"{value!r}: an address is no compile-time constant")
        return "nullptr"


@dataclass(frozen=True)
class Enum:
    """An ``IntEnum`` as a scoped C++ enumeration over i32, an ``IntFlag`` as an unscoped one.

    The members of a scoped enumeration are ``Name::kMember``, those of a flag set ``kNameMember``,
    so that flags combine with ``|`` and ``&`` without casts.
    """

    type: type[enum.IntEnum] | type[enum.IntFlag]
    alignment = 4
    dtype = np.dtype("i4")

    @property
    def name(self) -> str:
        return self.type.__name__

    @property
    def is_flags(self) -> bool:
        return issubclass(self.type, enum.IntFlag)

    def member(self, member: enum.IntEnum | enum.IntFlag) -> str:
        """Spell a member as its declaration does."""
        return f"k{self.name}{member.name}" if self.is_flags else f"k{member.name}"

    def declare(self, name: str) -> str:
        return f"{'i32' if self.is_flags else self.name} {name}"

    def convert(self, value: Value) -> Value:
        return int(self.type(value))

    def literal(self, value: Value) -> str:
        if self.is_flags:
            bits = [self.member(bit) for bit in self.type if bit & self.convert(value)]
            return " | ".join(bits) or "0"
        return f"{self.name}::{self.member(self.type(value))}"


@dataclass(frozen=True)
class Array:
    """A fixed number of elements of one type."""

    element: CType
    length: int

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype((self.element.dtype, (self.length,)))

    @property
    def alignment(self) -> int:
        return self.element.alignment

    def declare(self, name: str) -> str:
        return self.element.declare(f"{name}[{self.length}]")

    def _checked(self, value: Value) -> Value:
        if len(value) != self.length:
            raise ValueError(f"got {len(value)} elements, expected {self.length}")
        return value

    def convert(self, value: Value) -> Value:
        return [self.element.convert(item) for item in self._checked(value)]

    def literal(self, value: Value) -> str:
        return "{" + ", ".join(self.element.literal(item) for item in self._checked(value)) + "}"


@dataclass(frozen=True)
class Field:
    """One member of a struct; the doc line becomes its comment in C++."""

    name: str
    type: CType
    doc: str


@dataclass(frozen=True, init=False)
class Struct:
    """A C struct: ordered fields at their natural alignment, padded as C pads them.

    The offsets are computed here and asserted by the compiler (``emit.py``), so a disagreement is
    a compile error.
    """

    name: str
    doc: str
    fields: tuple[Field, ...]

    def __init__(self, name: str, doc: str, *fields: Field) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "doc", doc)
        object.__setattr__(self, "fields", fields)

    @property
    def alignment(self) -> int:
        return max(field.type.alignment for field in self.fields)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Byte offset of every field."""
        offsets, end = [], 0
        for field in self.fields:
            offsets.append(_round_up(end, field.type.alignment))
            end = offsets[-1] + field.type.dtype.itemsize
        return tuple(offsets)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        end = self.offsets[-1] + self.fields[-1].type.dtype.itemsize
        return np.dtype(
            {
                "names": [field.name for field in self.fields],
                "formats": [field.type.dtype for field in self.fields],
                "offsets": self.offsets,
                "itemsize": _round_up(end, self.alignment),
            }
        )

    def declare(self, name: str) -> str:
        return f"{self.name} {name}"

    def _checked(self, values: Mapping[str, Value]) -> list[tuple[Field, Value]]:
        """Pair every field with its value; refuse a missing and an unknown one."""
        names = [field.name for field in self.fields]
        missing = [name for name in names if name not in values]
        unknown = [name for name in values if name not in names]
        if missing or unknown:
            raise ValueError(f"{self.name}: missing fields {missing}, unknown fields {unknown}")
        return [(field, values[field.name]) for field in self.fields]

    def convert(self, value: Value) -> Value:
        if value is None:
            return np.zeros((), self.dtype)[()]
        return tuple(field.type.convert(item) for field, item in self._checked(value))

    def literal(self, value: Value) -> str:
        """Spell the value as a C++20 designated initialiser, every field named."""
        body = ", ".join(
            f".{field.name} = {field.type.literal(item)}" for field, item in self._checked(value)
        )
        return f"{self.name}{{{body}}}"

    def pack(self, values: Mapping[str, Value]) -> np.void:
        """The struct as a NumPy structured scalar (launches use ``Template``, which is faster).

        Parameters
        ----------
        values : mapping
            Every field by name; a nested struct is a mapping too. ``None`` is a null pointer or
            a nested struct of zeros.

        Raises
        ------
        ValueError
            A field is missing, unknown, or holds a value that its type cannot.
        """
        packed = np.zeros((), self.dtype)  # why zeros: equal values are equal bytes, holes too
        packed[()] = self.convert(values)
        return cast("np.void", packed[()])


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


PTR = Pointer("void*")
CONST_PTR = Pointer("const void*")
U8 = Scalar("u8", "u1")
I32 = Scalar("i32", "i4")
I64 = Scalar("i64", "i8")
F32 = Scalar("f32", "f4")
F64 = Scalar("f64", "f8")
