"""A parameter struct whose values are fixed but for its pointers: what a repeated call fills."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from cuattn.abi.types import Pointer, Struct


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
        self._words = array("Q", struct.pack(values).tobytes())
        self._slots = {name: offset // 8 for name, offset in _pointers(struct, 0)}
        # why: CuPy passes a NumPy scalar by value, and copies one without fields several times
        # faster than a structured one of the same bytes
        self._dtype = np.dtype((np.void, struct.dtype.itemsize))

    @property
    def pointers(self) -> tuple[str, ...]:
        """The names that ``with_pointers`` takes, in the order of the struct."""
        return tuple(self._slots)

    def with_pointers(self, addresses: Mapping[str, int]) -> np.void:
        """Return the struct's bytes with these device addresses (0 is null), to pass by value."""
        words, slots = self._words[:], self._slots
        for name, address in addresses.items():
            words[slots[name]] = address
        parameters: np.void = np.frombuffer(words, self._dtype)[0]
        return parameters


def _pointers(struct: Struct, base: int) -> Iterator[tuple[str, int]]:
    """The name and byte offset of every pointer; a nested struct holds at most one."""
    for field, offset in zip(struct.fields, struct.offsets, strict=True):
        if isinstance(field.type, Pointer):
            yield field.name, base + offset
        elif isinstance(field.type, Struct):
            for _, inner in _pointers(field.type, base + offset):
                yield field.name, inner
