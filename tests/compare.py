"""Assertions over the one tolerance rule, ``cuattn.cpu.tolerance``, that locate a fault.

Arrays are NumPy, in the axes (batch, seqlen, heads, dim); lse and dlse (batch, heads_q, seqlen_q).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from cuattn.cpu.tolerance import (
    BLOCK_ROWS,
    Expected,
    compare,
    expected_backward,
    expected_forward,
)
from cuattn.planning.problem import Band

Array = NDArray[Any]

#: The dtypes whose float32 sums the engine under test rounds towards zero; ``engine`` says.
ROUNDS_TO_ZERO: tuple[str, ...] = ()


def assert_accepted(name: str, actual: Array, expected: Expected) -> None:
    """One result: shape, dtype, and every element within its bound."""
    assert actual.shape == expected.value.shape, f"{name}: shape {actual.shape}"
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}"
    worst = compare(actual, expected)
    if worst.accepted:
        return
    batch, second, third = worst.index[:3]
    row, head = (second, third) if actual.ndim == 4 else (third, second)
    block = row // BLOCK_ROWS
    raise AssertionError(
        f"{name}{list(worst.index)} is {actual[worst.index]}, must be "
        f"{expected.value[worst.index]}: error {worst.error:.3e} > bound {worst.bound:.3e} "
        f"(x {worst.ratio:.3g}; batch {batch}, head {head}, rows {block * BLOCK_ROWS}.."
        f"{(block + 1) * BLOCK_ROWS - 1})"
    )


def assert_forward(
    out: Array | None,
    lse: Array | None,
    q: Array,
    k: Array,
    v: Array,
    *,
    band: Band,
    softmax_scale: float,
    out_dtype: DTypeLike | None = None,
) -> None:
    """Out and lse of a forward; None is not looked at."""
    want_out, want_lse = expected_forward(
        q,
        k,
        v,
        band=band,
        softmax_scale=softmax_scale,
        out_dtype=out_dtype,
        rounds_to_zero=q.dtype.name in ROUNDS_TO_ZERO,
    )
    if out is not None:
        assert_accepted("out", out, want_out)
    if lse is not None:
        assert_accepted("lse", lse, want_lse)


def assert_backward(
    gradients: tuple[Array | None, Array | None, Array | None],
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    dout: Array | None,
    dlse: Array | None,
    *,
    band: Band,
    softmax_scale: float,
) -> None:
    """(dq, dk, dv) of a backward that was given ``out``; None is not looked at."""
    wanted = expected_backward(
        q,
        k,
        v,
        out,
        dout,
        dlse,
        band=band,
        softmax_scale=softmax_scale,
        rounds_to_zero=q.dtype.name in ROUNDS_TO_ZERO,
    )
    for name, actual, expected in zip(("dq", "dk", "dv"), gradients, wanted, strict=True):
        if actual is not None:
            assert_accepted(name, actual, expected)


def as_stored(expected: Expected) -> Array:
    """The exact result as its dtype holds it."""
    with np.errstate(over="ignore", invalid="ignore"):
        return expected.value.astype(expected.dtype)
