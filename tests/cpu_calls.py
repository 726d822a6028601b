"""How the tests of the CPU engine call it: below the API, with a band and a fixed scale."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
from compare import assert_backward, assert_forward

from cuattn.cpu import tiled
from cuattn.planning.problem import AttentionProblem, Band, Layouts

Array = np.ndarray[Any, Any]


def problem_of(
    q: Array, k: Array, v: Array, band: Band, wrt: tuple[str, ...] = ()
) -> AttentionProblem:
    strides = (0, 0, 0, 0)  # the engine reads the arrays' own
    return AttentionProblem(
        op="backward" if wrt else "forward",
        dtype=q.dtype.name,
        out_dtype=q.dtype.name,
        batch=q.shape[0],
        seqlen_q=q.shape[1],
        seqlen_k=k.shape[1],
        num_heads_q=q.shape[2],
        num_heads_kv=k.shape[2],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        band=band,
        softmax_scale=0.2,
        deterministic=None,
        layouts=Layouts(strides, strides, strides, strides),
        wrt=wrt,
    )


def forward(q: Array, k: Array, v: Array, band: Band) -> tuple[Array, Array]:
    problem = problem_of(q, k, v, band)
    out = np.full((*q.shape[:3], v.shape[3]), 7, q.dtype)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), 7, problem.accumulator)
    tiled.forward(problem, q, k, v, out, lse)
    return out, lse


def backward(
    q: Array,
    k: Array,
    v: Array,
    band: Band,
    dout: Array | None,
    dlse: Array | None,
    wrt: tuple[str, ...] = ("q", "k", "v"),
) -> tuple[Array | None, ...]:
    out, lse = forward(q, k, v, band)
    gradients = {
        name: np.full(a.shape, 7, a.dtype) if name in wrt else None
        for name, a in zip("qkv", (q, k, v), strict=True)
    }
    tiled.backward(
        problem_of(q, k, v, band, wrt),
        q,
        k,
        v,
        out,
        lse,
        dout,
        dlse,
        dq=gradients["q"],
        dk=gradients["k"],
        dv=gradients["v"],
    )
    return tuple(gradients.values())


def random(*shapes: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def check(q: Array, k: Array, v: Array, band: Band, dout: Array, dlse: Array | None) -> None:
    out, lse = forward(q, k, v, band)
    given = {"band": band, "softmax_scale": 0.2}
    assert_forward(out, lse, q, k, v, **given)
    gradients = backward(q, k, v, band, dout, dlse)
    assert_backward(gradients, q, k, v, out, dout, dlse, **given)
