"""The N x N formula in 16 bit, as one writes it in CuPy with care.

Why not ``cupy.matmul``: of more than two axes it refuses bfloat16 and multiplies float16 as float32
(cupy#10317). So the products call cuBLAS: 16-bit factors, sums in float32. Scores are float32 and
every step on them is in place; weights and the gradient of the scores are rounded to 16 bit for the
products that follow, and the weights are what a forward keeps.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from cuattn._typing import Array

#: A score in float32, its weight in 16 bit, and the gradient of the score in 16 bit.
BYTES_PER_SCORE = 8


class HalfFormula:
    """Attention with every score in memory; arrays and results are (batch, heads, seqlen, dim)."""

    def __init__(
        self, cupy: Any, q: Array, k: Array, v: Array, dout: Array, *, causal: bool
    ) -> None:
        self.cupy, self.q, self.k, self.v, self.dout = cupy, q, k, v, dout
        self.scale = 1 / math.sqrt(q.shape[-1])
        self.hidden = ~cupy.tri(q.shape[2], k.shape[2], dtype=bool) if causal else None

    def _weights(self) -> Array:
        cupy = self.cupy
        S = cupy.empty((*self.q.shape[:3], self.k.shape[2]), cupy.float32)
        multiply(cupy, self.q, self.k, S, transpose_b=True, alpha=self.scale)
        if self.hidden is not None:
            cupy.copyto(S, -math.inf, where=self.hidden)
        S -= S.max(axis=-1, keepdims=True)
        cupy.exp(S, out=S)
        S /= S.sum(axis=-1, keepdims=True)
        return S.astype(self.q.dtype)

    def _attend(self) -> tuple[Array, Array]:
        P, out = self._weights(), self.cupy.empty_like(self.q)
        multiply(self.cupy, P, self.v, out)
        return P, out

    @cached_property
    def _kept(self) -> tuple[Array, Array]:
        return self._attend()

    def _differentiate(self, P: Array, out: Array) -> tuple[Array, Array, Array]:
        cupy, wide = self.cupy, self.cupy.float32
        dq, dk, dv = map(cupy.empty_like, (self.q, self.k, self.v))
        multiply(cupy, P, self.dout, dv, transpose_a=True)
        dS = cupy.empty(P.shape, wide)
        multiply(cupy, self.dout, self.v, dS, transpose_b=True)
        dS -= (self.dout.astype(wide) * out.astype(wide)).sum(axis=-1, keepdims=True)
        dS *= P
        dS = dS.astype(P.dtype)
        multiply(cupy, dS, self.k, dq, alpha=self.scale)
        multiply(cupy, dS, self.q, dk, transpose_a=True, alpha=self.scale)
        return dq, dk, dv

    def forward(self) -> Array:
        """Out alone."""
        return self._attend()[1]

    def backward(self) -> tuple[Array, Array, Array]:
        """The gradients, from the weights that the forward kept."""
        return self._differentiate(*self._kept)

    def both(self) -> tuple[Array, Array, Array, Array]:
        """Out and the gradients."""
        P, out = self._attend()
        return out, *self._differentiate(P, out)


def multiply(
    cupy: Any,
    a: Array,
    b: Array,
    out: Array,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    alpha: float = 1.0,
) -> None:
    """Write alpha * a @ b into out, matrix by matrix of C-contiguous arrays, with float32 sums."""
    cublas = cupy.cuda.cublas
    *matrices, rows, columns = out.shape
    length = a.shape[-2] if transpose_a else a.shape[-1]
    scalars = np.array([alpha, 0], np.float32)
    # cuBLAS counts columns first, in which out is its transpose: b.T @ a.T.
    cublas.gemmStridedBatchedEx(
        cupy.cuda.Device().cublas_handle,
        cublas.CUBLAS_OP_T if transpose_b else cublas.CUBLAS_OP_N,
        cublas.CUBLAS_OP_T if transpose_a else cublas.CUBLAS_OP_N,
        *(columns, rows, length),
        scalars.ctypes.data,
        *_operand(cupy, b),
        *_operand(cupy, a),
        scalars.ctypes.data + scalars.itemsize,
        *_operand(cupy, out),
        math.prod(matrices),
        cublas.CUBLAS_COMPUTE_32F,
        cublas.CUBLAS_GEMM_DEFAULT,
    )


def _operand(cupy: Any, array: Array) -> tuple[int, int, int, int]:
    """Address, type, leading dimension, and elements from one matrix to the next."""
    kinds = {"float16": "CUDA_R_16F", "bfloat16": "CUDA_R_16BF", "float32": "CUDA_R_32F"}
    kind = getattr(cupy.cuda.runtime, kinds[array.dtype.name])
    rows, columns = array.shape[-2:]
    return array.data.ptr, kind, columns, rows * columns
