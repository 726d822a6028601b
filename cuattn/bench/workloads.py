"""The arrays that are measured: standard normal, the same for every dtype up to rounding."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the dtype name "bfloat16")
import numpy as np

from cuattn._typing import Array


def normal(xp: Any, count: int, shape: tuple[int, ...], dtype: str) -> list[Array]:
    """``count`` arrays on the side of ``xp`` (numpy or cupy), C-contiguous."""
    rng = np.random.default_rng(0)
    return [xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(count)]


def cupy_with_device() -> Any:
    """CuPy, or SystemExit that says why a measurement is not possible here."""
    from cuattn.check import cuda_or_why

    if trouble := cuda_or_why():
        raise SystemExit(f"this measures a CUDA device: {trouble}")
    import cupy

    return cupy
