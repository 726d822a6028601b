"""The names of types and dtypes that every layer shares; imports nothing of cuattn."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A NumPy or CuPy array. CuPy ships no types, and what comes out is of the kind that went in.
Array: TypeAlias = Any

#: Every dtype cuattn computes in, and the dtype its scores, state and gradients accumulate in.
ACCUMULATOR = {
    "float16": "float32",
    "bfloat16": "float32",
    "float32": "float32",
    "float64": "float64",
}
