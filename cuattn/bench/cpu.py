"""The CPU engine against the N x N formula: ``python -m cuattn.bench.cpu [seqlen]``.

Prints, for 8 heads of dimension 64: seconds of the engine and of the formula, their ratio, the
16-bit dtypes against float32, peak memory beyond inputs and outputs, many tiny heads, and torch
where it is importable. The formula goes head by head over contiguous arrays and is given twice: as
one writes it in NumPy, and with every step in place. Its backward starts from what ours starts
from, (q, k, v, out, lse, dout), and computes P again; the time with P kept from the forward, which
is N x N memory per head, stands beside it.
Everything that is compared takes turns, so that a machine's mood strikes all alike; ratios are
medians of the rounds' own ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tracemalloc
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401 - registers bfloat16 with NumPy
import numpy as np
from numpy.typing import NDArray

from cuattn.bench.timing import medians, rounds
from cuattn.cpu import tiled
from cuattn.planning.problem import AttentionProblem, Band, Layouts

Array = NDArray[Any]
HEADS, HEAD_DIM = 8, 64
#: A call takes seconds here: each is a burst of its own.
ONE_BY_ONE: dict[str, Any] = {"calls": 1, "repeats": 5, "warmups": 1}


def problem_of(q: Array, k: Array, v: Array, *, causal: bool, wrt: tuple[str, ...] = ()) -> Any:
    """The engine's question for arrays in the axes (batch, seqlen, heads, dim)."""
    strides = {
        name: tuple(stride // a.itemsize for stride in a.strides)
        for name, a in (("q", q), ("k", k), ("v", v), ("out", q))
    }
    band = Band.clamped(None, 0 if causal else None, q.shape[1], k.shape[1])
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
        softmax_scale=q.shape[3] ** -0.5,
        deterministic=None,
        layouts=Layouts(**strides),  # type: ignore[arg-type]
        wrt=wrt,
    )


class Engine:
    """One forward and backward of the engine, outputs allocated beforehand."""

    def __init__(self, q: Array, k: Array, v: Array, dout: Array, *, causal: bool) -> None:
        self.inputs, self.dout = (q, k, v), dout
        self.problem = problem_of(q, k, v, causal=causal)
        self.backward_problem = problem_of(q, k, v, causal=causal, wrt=("q", "k", "v"))
        self.out = np.empty(q.shape, q.dtype)
        self.lse = np.empty((q.shape[0], q.shape[2], q.shape[1]), self.problem.accumulator)
        self.gradients = {"d" + name: np.empty(q.shape, q.dtype) for name in "qkv"}

    def forward(self) -> None:
        tiled.forward(self.problem, *self.inputs, self.out, self.lse)

    def backward(self) -> None:
        tiled.backward(
            self.backward_problem,
            *self.inputs,
            self.out,
            self.lse,
            self.dout,
            None,
            dq=self.gradients["dq"],
            dk=self.gradients["dk"],
            dv=self.gradients["dv"],
        )


def probabilities(q: Array, k: Array, visible: Array | None, lse: Array | None) -> Array:
    """P of one head, from lse where it is known."""
    S: Array = q @ k.T * q.shape[1] ** -0.5
    if visible is not None:
        S = np.where(visible, S, -np.inf)
    P: Array = np.exp(S - (S.max(axis=1) if lse is None else lse)[:, None])
    return P / P.sum(axis=1, keepdims=True) if lse is None else P


def gradients(
    q: Array, k: Array, v: Array, P: Array, out: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """dq, dk, dv of one head from its P."""
    scale = q.shape[1] ** -0.5
    dS = P * (dout @ v.T - (dout * out).sum(axis=1, keepdims=True))
    return scale * (dS @ k), scale * (dS.T @ q), P.T @ dout


def probabilities_in_place(
    q: Array, k: Array, visible: Array | None, lse: Array | None
) -> tuple[Array, Array | None]:
    """P of one head in one N x N array; without lse not normalised, and the row sums."""
    P = (q * q.dtype.type(q.shape[1] ** -0.5)) @ k.T
    if visible is not None:
        np.copyto(P, -np.inf, where=~visible)
    P -= P.max(axis=1, keepdims=True) if lse is None else lse[:, None]
    np.exp(P, out=P)
    return P, P.sum(axis=1, keepdims=True) if lse is None else None


def gradients_in_place(
    q: Array, k: Array, v: Array, P: Array, out: Array, dout: Array
) -> tuple[Array, Array, Array]:
    """As ``gradients``, in one further N x N array."""
    scale = q.dtype.type(q.shape[1] ** -0.5)
    dS = dout @ v.T
    dS -= (dout * out).sum(axis=1, keepdims=True)
    dS *= P
    return scale * (dS @ k), scale * (dS.T @ q), P.T @ dout


def peak_bytes(function: Callable[[], object]) -> int:
    """Most memory NumPy held during a call, beyond what was there before it."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def random_arrays(count: int, shape: tuple[int, ...], dtype: str) -> list[Array]:
    """Standard normal arrays, the same for every dtype up to rounding."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32).astype(dtype) for _ in range(count)]


def compare_with_formula(seqlen: int, *, causal: bool) -> None:
    """Our seconds, the formula's (one head, times HEADS), their ratio; float32."""
    arrays = random_arrays(4, (1, seqlen, HEADS, HEAD_DIM), "float32")
    engine = Engine(*arrays, causal=causal)
    engine.forward()
    q, k, v, dout, out = (np.ascontiguousarray(a[0, :, 0]) for a in (*arrays, engine.out))
    lse = engine.lse[0, 0]
    visible = np.tri(seqlen, dtype=bool) if causal else None

    def in_place() -> Array:
        P, l = probabilities_in_place(q, k, visible, None)  # noqa: E741
        out: Array = (P @ v) / l
        return out

    def report(what: str, ours: Callable[[], None], *formulas: Callable[[], object]) -> None:
        """Ours and two ways to write the formula, taking turns with nothing else."""
        own, *heads = map(np.asarray, rounds(ours, *formulas, **ONE_BY_ONE))
        for way, head_seconds in zip(("", ", in place"), heads, strict=True):
            theirs = HEADS * head_seconds
            print(
                f"float32   {'causal' if causal else 'full':7}{what + way:27} "
                f"{np.median(own):7.3f} s   formula {np.median(theirs):7.3f} s   "
                f"{np.median(theirs / own):5.2f} x"
            )

    report("forward", engine.forward, lambda: probabilities(q, k, visible, None) @ v, in_place)
    report(
        "backward",
        engine.backward,
        lambda: gradients(q, k, v, probabilities(q, k, visible, lse), out, dout),
        lambda: gradients_in_place(
            q, k, v, probabilities_in_place(q, k, visible, lse)[0], out, dout
        ),
    )
    P = probabilities(q, k, visible, lse)  # only now: what it holds would slow the others down
    report(
        "backward, P kept",
        engine.backward,
        lambda: gradients(q, k, v, P, out, dout),
        lambda: gradients_in_place(q, k, v, P, out, dout),
    )


def compare_dtypes(seqlen: int) -> None:
    """The narrow dtypes against float32, causal, and the memory of each."""
    dtypes = ("float32", "float16", "bfloat16")
    engines = [
        Engine(*random_arrays(4, (1, seqlen, HEADS, HEAD_DIM), dtype), causal=True)
        for dtype in dtypes
    ]
    forwards = medians(*(engine.forward for engine in engines), **ONE_BY_ONE)
    backwards = medians(*(engine.backward for engine in engines), **ONE_BY_ONE)
    for dtype, engine, forward, backward in zip(dtypes, engines, forwards, backwards, strict=True):
        memory = [peak_bytes(call) / 2**20 for call in (engine.forward, engine.backward)]
        print(
            f"{dtype:10}causal  forward {forward:.3f} s ({forward / forwards[0]:.2f} of float32, "
            f"{memory[0]:.0f} MiB)   backward {backward:.3f} s ({backward / backwards[0]:.2f}, "
            f"{memory[1]:.0f} MiB)"
        )


def many_tiny_heads() -> None:
    """65,540 heads of seqlen 4: past every 16-bit grid limit, and all overhead."""
    engine = Engine(*random_arrays(4, (65540, 4, 1, HEAD_DIM), "float32"), causal=True)
    forward, backward = medians(engine.forward, engine.backward, **ONE_BY_ONE)
    print(f"float32   65540 heads of seqlen 4: forward {forward:.2f} s   backward {backward:.2f} s")


def compare_with_torch(seqlen: int) -> None:
    """Time torch's scaled_dot_product_attention on the same cores, forward and backward."""
    torch = importlib.import_module("torch")
    arrays = random_arrays(4, (1, seqlen, HEADS, HEAD_DIM), "float32")
    q, k, v, dout = (torch.from_numpy(a).transpose(1, 2) for a in arrays)
    for t in (q, k, v):
        t.requires_grad_()
    for causal in (True, False):
        engine = Engine(*arrays, causal=causal)

        def forward(causal: bool = causal) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

        out = forward()

        def backward(out: Any = out) -> None:
            torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        ours, theirs = medians(engine.forward, forward, **ONE_BY_ONE)
        ours_backward, theirs_backward = medians(engine.backward, backward, **ONE_BY_ONE)
        print(
            f"float32   {'causal' if causal else 'full':7}torch {torch.__version__}: forward "
            f"{theirs:.3f} s ({theirs / ours:.2f} x)   backward {theirs_backward:.3f} s "
            f"({theirs_backward / ours_backward:.2f} x)"
        )


def main(seqlen: int) -> None:
    """Print every bar."""
    print(f"seqlen {seqlen}, {HEADS} heads, head_dim {HEAD_DIM}, NumPy {np.__version__}")
    print("load averages before:", *(f"{load:.1f}" for load in os.getloadavg()))
    for causal in (True, False):
        compare_with_formula(seqlen, causal=causal)
    compare_dtypes(seqlen)
    many_tiny_heads()
    if importlib.util.find_spec("torch"):
        compare_with_torch(seqlen)
    print("load averages after:", *(f"{load:.1f}" for load in os.getloadavg()))


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("seqlen", type=int, nargs="?", default=8192)
    main(asked.parse_args().seqlen)
