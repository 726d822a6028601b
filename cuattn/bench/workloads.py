"""What is measured: standard normal arrays, and the calls of 16-bit attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  (gives NumPy the dtype name "bfloat16")
import numpy as np

from cuattn._typing import Array
from cuattn.attention import prepare
from cuattn.explain import both_passes, counted_flops
from cuattn.planning.options import Options

DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
MASKS = ("full", "causal")
PASSES = ("forward", "backward")
SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
#: Lengths that the grid takes too where they are asked for.
SHORT_SEQLENS = (32, 64, 128, 256)
#: Lengths of a sequence that is alone in its batch.
ALONE_SEQLENS = (256, 512, 1024, 2048, 4096)
#: Every cell of the grid has as many tokens, and as many numbers a token.
TOKENS, HIDDEN = 16384, 2048
#: Lengths of one sequence, of which memory is measured; the last is timed too.
LONG_SEQLENS = tuple(2**power for power in range(10, 17))


@dataclass(frozen=True)
class Workload:
    """One call. ``passes`` are those to time; ``memory`` says whether its bytes are measured."""

    name: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    head_dim: int
    mask: str
    dtype: str
    passes: tuple[str, ...] = PASSES
    memory: bool = False

    @property
    def causal(self) -> bool:
        """The mask as ``attention`` takes it."""
        return self.mask == "causal"

    @property
    def num_scores(self) -> int:
        """Elements of the seqlen x seqlen matrices of all heads."""
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """Of q, k, v and dout, in the axes (batch, seqlen, heads, dim)."""
        of_queries = (self.batch, self.seqlen_q, self.num_heads, self.head_dim)
        of_keys = (self.batch, self.seqlen_k, self.num_heads, self.head_dim)
        return of_queries, of_keys, of_keys, of_queries

    def flops(self, name: str) -> int:
        """FLOPs of a pass, as ``explain`` counts them."""
        q, k, v, _ = (np.broadcast_to(np.zeros((), self.dtype), shape) for shape in self.shapes)
        forward, backward = both_passes(prepare(q, k, v, None, Options(causal=self.causal)))
        return counted_flops({"forward": forward, "backward": backward}[name])

    def facts(self) -> dict[str, Any]:
        """What a row of results says of it."""
        return {
            "workload": self.name,
            "batch": self.batch,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
            "num_heads": self.num_heads,
            "head_dim": self.head_dim,
            "mask": self.mask,
            "dtype": self.dtype,
        }


def grid(
    dtype: str,
    *,
    head_dims: Iterable[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    seqlens: Sequence[int] = SEQLENS,
    passes: tuple[str, ...] = PASSES,
) -> list[Workload]:
    """The cells, each of 16,384 tokens and hidden size 2048."""
    return [
        Workload("grid", TOKENS // seqlen, seqlen, seqlen, HIDDEN // dim, dim, mask, dtype, passes)
        for dim in head_dims
        for mask in masks
        for seqlen in seqlens
    ]


def alone(
    dtype: str,
    *,
    head_dims: Iterable[int] = HEAD_DIMS,
    masks: Sequence[str] = MASKS,
    passes: tuple[str, ...] = PASSES,
) -> list[Workload]:
    """Batches of one sequence, hidden size 2048: too little for a large device."""
    return [
        Workload("alone", 1, seqlen, seqlen, HIDDEN // dim, dim, mask, dtype, passes)
        for dim in head_dims
        for mask in masks
        for seqlen in ALONE_SEQLENS
    ]


def few_queries(dtype: str) -> Workload:
    """128 rows that see 65,536 keys: there are fewer tiles of rows than multiprocessors."""
    return Workload("few-queries", 1, 128, 65536, 16, 128, "full", dtype, ("forward",))


def long(dtype: str, passes: tuple[str, ...] = PASSES) -> list[Workload]:
    """One causal sequence of growing length, for its memory; the longest is timed."""
    return [
        Workload(
            *("long", 1, seqlen, seqlen, 16, 128, "causal", dtype),
            passes=passes if seqlen == LONG_SEQLENS[-1] else (),
            memory=True,
        )
        for seqlen in LONG_SEQLENS
    ]


def normal(xp: Any, count: int, shape: tuple[int, ...], dtype: str) -> list[Array]:
    """``count`` arrays on the side of ``xp`` (numpy or cupy), the same values on both."""
    rng = np.random.default_rng(0)
    return [xp.asarray(rng.standard_normal(shape, np.float32).astype(dtype)) for _ in range(count)]


def normal_on_device(cupy: Any, workload: Workload) -> list[Array]:
    """Array q, k, v and dout of a workload, drawn where they are used: a host takes seconds."""
    rng = cupy.random.default_rng(0)
    return [
        rng.standard_normal(shape, dtype=cupy.float32).astype(workload.dtype)
        for shape in workload.shapes
    ]


def cupy_with_device() -> Any:
    """CuPy, or SystemExit that says why a measurement is not possible here."""
    from cuattn.check import cuda_or_why

    if trouble := cuda_or_why():
        remedy = "`python -m cuattn info` says what to do"
        raise SystemExit(f"this measures a CUDA device: {trouble}; {remedy}")
    import cupy

    return cupy
