"""NumPy under the names of CuPy that the benchmarks use: what they do, without a device."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace

import ml_dtypes
import numpy as np

#: What a new pool says that it grew to.
POOL_BYTES = 1 << 20
KINDS = {"CUDA_R_32F": 0, "CUDA_R_16F": 2, "CUDA_R_16BF": 14}
DTYPES = {0: np.float32, 2: np.float16, 14: ml_dtypes.bfloat16}
OPERATIONS = {"CUBLAS_OP_N": 0, "CUBLAS_OP_T": 1}


class HostArray(np.ndarray):
    """An array whose memory has an address, as CuPy's."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def gemm_strided_batched(_handle, op_a, op_b, m, n, k, alpha, *rest):
    """cublasGemmStridedBatchedEx as it is documented: matrices by columns, at addresses."""
    a, b, beta, c, (batch, compute, algo) = rest[:4], rest[4:8], rest[8], rest[9:13], rest[13:]
    assert (compute, algo) == (68, -1)

    def matrices(address, kind, leading, stride, rows, columns):
        assert leading >= rows
        dtype = np.dtype(DTYPES[kind])
        size = (batch - 1) * stride + (columns - 1) * leading + rows
        memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
        strides = [step * dtype.itemsize for step in (stride, 1, leading)]
        return np.ndarray((batch, rows, columns), dtype, memory, strides=strides)

    def factor(operation, operand, rows, columns):
        if operation == OPERATIONS["CUBLAS_OP_N"]:
            return matrices(*operand, rows, columns).astype(np.float32)
        return matrices(*operand, columns, rows).swapaxes(1, 2).astype(np.float32)

    scale = ctypes.c_float.from_address(alpha).value
    assert ctypes.c_float.from_address(beta).value == 0
    out = matrices(*c, m, n)
    out[...] = (scale * (factor(op_a, a, m, k) @ factor(op_b, b, k, n))).astype(out.dtype)


class HostCupy:
    """The module; its clock stands still, and its pools do not grow."""

    __version__ = "of the host"

    def __init__(self):
        event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
        self.cuda = SimpleNamespace(
            Event=lambda: event,
            get_elapsed_time=lambda begin, end: 2.0,
            Device=lambda: SimpleNamespace(cublas_handle=0),
            MemoryPool=lambda: SimpleNamespace(malloc=None, total_bytes=lambda: POOL_BYTES),
            using_allocator=contextlib.nullcontext,
            runtime=SimpleNamespace(**KINDS),
            cublas=SimpleNamespace(
                **OPERATIONS,
                CUBLAS_COMPUTE_32F=68,
                CUBLAS_GEMM_DEFAULT=-1,
                gemmStridedBatchedEx=gemm_strided_batched,
            ),
        )
        self.pool = SimpleNamespace(free_all_blocks=lambda: None, total_bytes=lambda: 0)

    def get_default_memory_pool(self):
        return self.pool

    def empty(self, shape, dtype):
        return np.empty(shape, dtype).view(HostArray)

    def ascontiguousarray(self, array):
        return np.ascontiguousarray(array).view(HostArray)

    def __getattr__(self, name):
        return getattr(np, name)
