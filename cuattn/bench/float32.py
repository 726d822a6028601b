"""float32 and float64 on a GPU: ``python -m cuattn.bench.float32 [--json PATH]``.

Part one, seqlen 4096, 8 heads of dimension 64: cuattn beside the N x N formula in CuPy and torch's
SDPA, in one process and taking turns, with ratios. Part two, seqlen 65,536, 4 heads, causal: time,
and the bytes that CuPy's pool took beyond inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cuattn
from cuattn._typing import ACCUMULATOR, Array
from cuattn.bench.baselines import Formula, Passes, torch_or_none, torch_passes
from cuattn.bench.report import parser, write
from cuattn.bench.timing import medians
from cuattn.bench.workloads import cupy_with_device, normal
from cuattn.explain import counted_flops

SHAPE = (1, 8, 4096, 64)
LONG_SHAPE = (1, 4, 65536, 64)
DTYPES = ("float32", "float64")
PASSES = ("forward", "backward", "both")


def ours(q: Array, k: Array, v: Array, dout: Array, *, causal: bool) -> tuple[Passes, float]:
    """The passes of cuattn, and the FLOPs of a forward (of a backward 2.5 times that)."""
    options: dict[str, Any] = {"causal": causal, "layout": "bhsd"}
    _, res = cuattn.attention_forward(q, k, v, **options)

    def both() -> None:
        _, its = cuattn.attention_forward(q, k, v, **options)
        cuattn.attention_backward(its, dout)

    passes: Passes = {
        "forward": lambda: cuattn.attention(q, k, v, **options),
        "backward": lambda: cuattn.attention_backward(res, dout),
        "both": both,
    }
    return passes, counted_flops(res.call.problem)


def compare(cupy: Any, dtype: str, *, causal: bool) -> Iterator[dict[str, Any]]:
    """One row per peer and pass: seconds, and how many times cuattn's."""
    arrays = tuple(normal(cupy, 4, SHAPE, dtype))
    own, flops = ours(*arrays, causal=causal)
    peers = [("cuattn", own), *Formula(cupy, *arrays, causal=causal).passes()]
    if torch := torch_or_none():
        peers += torch_passes(torch, arrays, causal=causal)
    for name in PASSES:
        taking_part = [(title, passes[name]) for title, passes in peers if name in passes]
        seconds = medians(*(function for _, function in taking_part), cupy=cupy)
        work = flops * {"forward": 1, "backward": 2.5, "both": 3.5}[name]
        for (title, _), its_seconds in zip(taking_part, seconds, strict=True):
            yield {
                "dtype": dtype,
                "mask": "causal" if causal else "full",
                "pass": name,
                "peer": title,
                "shape": SHAPE,
                "seconds": its_seconds,
                "tflops": work / its_seconds / 1e12,
                "ratio_to_cuattn": its_seconds / seconds[0],
            }


def run_long(cupy: Any, dtype: str) -> dict[str, Any]:
    """Forward and backward of a long sequence: seconds and memory."""
    q, k, v, dout = normal(cupy, 4, LONG_SHAPE, dtype)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    # Freed blocks stay in the pool, so what it has grown by is the peak, outputs included.
    _, res = cuattn.attention_forward(q, k, v, causal=True, layout="bhsd")
    grads = cuattn.attention_backward(res, dout)
    grown = pool.total_bytes() - before
    written: list[Any] = [res.out, res.lse, grads.dq, grads.dk, grads.dv]
    outputs = sum(array.nbytes for array in written)
    del res, grads, written
    passes, _ = ours(q, k, v, dout, causal=True)
    seconds = medians(*(passes[name] for name in PASSES), cupy=cupy, calls=1)
    rows = LONG_SHAPE[0] * LONG_SHAPE[1] * LONG_SHAPE[2]
    return {
        "dtype": dtype,
        "mask": "causal",
        "shape": LONG_SHAPE,
        "seconds": dict(zip(PASSES, seconds, strict=True)),
        "input_bytes": 4 * q.nbytes,
        "output_bytes": outputs,
        "extra_bytes": grown - outputs,
        "score_matrix_bytes": rows * LONG_SHAPE[2] * int(ACCUMULATOR[dtype][-2:]) // 8,
    }


def main() -> int:
    """Print both parts."""
    arguments = parser(__doc__).parse_args()
    cupy = cupy_with_device()
    rows: list[dict[str, Any]] = []
    print(f"{'shape':22}{'dtype':9}{'mask':8}{'pass':10}{'peer':18}{'ms':>9}{'TFLOP/s':>9}{'x':>7}")
    for dtype in DTYPES:
        for causal in (False, True):
            for row in compare(cupy, dtype, causal=causal):
                rows.append(row)
                print(
                    f"{row['shape']!s:22}{dtype:9}{row['mask']:8}{row['pass']:10}{row['peer']:18}"
                    f"{1e3 * row['seconds']:9.3f}{row['tflops']:9.1f}{row['ratio_to_cuattn']:7.2f}",
                    flush=True,
                )
            cupy.get_default_memory_pool().free_all_blocks()
    for dtype in DTYPES:
        row = run_long(cupy, dtype)
        rows.append(row)
        times = ", ".join(f"{name} {1e3 * row['seconds'][name]:.1f} ms" for name in PASSES)
        print(
            f"{LONG_SHAPE} {dtype} causal: {times}; {row['extra_bytes']:,} bytes beyond "
            f"{row['input_bytes']:,} of inputs and {row['output_bytes']:,} of outputs "
            f"(the scores alone: {row['score_matrix_bytes']:,})"
        )
    write(arguments.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
