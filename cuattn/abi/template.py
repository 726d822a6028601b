"""A parameter struct whose values are fixed but for its pointers: what a repeated call fills."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

from cuattn.abi.types import Pointer, Struct

#: Bytes of an address.
WORD = 8


class Template:
    """The bytes of one parameter struct, copied for every launch with new addresses.

    Parameters
    ----------
    struct : Struct
        The parameter struct.
    values : mapping
        As ``Struct.pack`` takes it; the pointers in it are the defaults.

    Notes
    -----
    A pointer is named by its field: ``"lse"``; the pointer inside a nested struct by the field
    that holds the struct: ``"q"`` for ``q.data``.
    """

    def __init__(self, struct: Struct, values: Mapping[str, Any]) -> None:
        self._words = array("Q", b"\0" * WORD + struct.pack(values).tobytes())
        self._slots = {name: 1 + at // WORD for name, at in pointer_offsets(struct).items()}

    @property
    def pointers(self) -> tuple[str, ...]:
        """The names that ``arguments`` takes, in the order of the struct."""
        return tuple(self._slots)

    def arguments(self, addresses: Mapping[str, int]) -> array[int]:
        """The arguments of a kernel that takes the struct with these device addresses (0 is null).

        A list of one address in host memory, as ``cuLaunchKernel`` takes it (``kernelParams``), and
        behind it the struct that it points to. A launch copies the struct before it returns.
        """
        words, slots = self._words[:], self._slots
        for name, address in addresses.items():
            words[slots[name]] = address
        words[0] = words.buffer_info()[0] + WORD
        return words


def pointer_offsets(struct: Struct) -> dict[str, int]:
    """The byte offset of every pointer, by the name that ``Template`` gives it."""
    return dict(_pointers(struct, 0))


def _pointers(struct: Struct, base: int) -> Iterator[tuple[str, int]]:
    """Name and byte offset; a nested struct holds at most one pointer."""
    for field, offset in zip(struct.fields, struct.offsets, strict=True):
        if isinstance(field.type, Pointer):
            yield field.name, base + offset
        elif isinstance(field.type, Struct):
            for _, inner in _pointers(field.type, base + offset):
                yield field.name, inner
