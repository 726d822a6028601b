"""How long the first call takes: ``python -m cuattn.bench.first_call [--json PATH]``.

From ``attention(...)`` to its synchronised result in a fresh process: with an empty kernel cache,
then in another process with the cache that the first one left. Importing CuPy and cuattn, making
the CUDA context and the arrays come before the clock starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cuattn
from cuattn._typing import ACCUMULATOR
from cuattn.bench.report import parser, write
from cuattn.bench.workloads import cupy_with_device, normal

PASSES = ("forward", "forward+backward")
WARM_RUNS = 3


def measure(dtype: str, passes: str, seqlen: int, head_dim: int) -> float:
    """Seconds of the first call in this process."""
    cupy = cupy_with_device()
    cupy.zeros(1)  # makes the context
    q, k, v, dout = normal(cupy, 4, (1, seqlen, 8, head_dim), dtype)
    device = cupy.cuda.Device()
    device.synchronize()
    begin = time.perf_counter()
    if passes == "forward":
        cuattn.attention(q, k, v)
    else:
        _, vjp = cuattn.attention_vjp(q, k, v)
        vjp(dout)
    device.synchronize()
    return time.perf_counter() - begin


def in_fresh_process(directory: str, *arguments: str) -> float:
    """``measure`` in another process with its kernel cache in ``directory``."""
    here = str(Path(cuattn.__file__).parents[1])
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"CUATTN_CACHE_DIR": directory, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "cuattn.bench.first_call", "--measure", *arguments]
    run = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds: float = json.loads(run.stdout)
    return seconds


def cold_and_warm(dtype: str, passes: str, seqlen: int, head_dim: int) -> dict[str, Any]:
    """One row: the first process, and the median of later ones."""
    arguments = dtype, passes, str(seqlen), str(head_dim)
    with tempfile.TemporaryDirectory() as directory:
        cold = in_fresh_process(directory, *arguments)
        warm = statistics.median(in_fresh_process(directory, *arguments) for _ in range(WARM_RUNS))
    facts = {"dtype": dtype, "pass": passes, "seqlen": seqlen, "head_dim": head_dim}
    return facts | {"cold": cold, "warm": warm}


def main() -> int:
    """Print a table of every dtype, head_dim and pass."""
    made = parser(__doc__)
    made.add_argument("--seqlen", type=int, nargs="+", default=[128, 4096])
    made.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    made.add_argument("--dtype", nargs="+", choices=tuple(ACCUMULATOR), default=list(ACCUMULATOR))
    made.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.measure:
        dtype, passes, seqlen, head_dim = arguments.measure
        print(json.dumps(measure(dtype, passes, int(seqlen), int(head_dim))))
        return 0
    cupy_with_device()
    rows = []
    titles = ("dtype", 10), ("pass", 18), ("seqlen", 8), ("head_dim", 10)
    print("".join(f"{title:{width}}" for title, width in titles), "empty cache, s  warm cache, s")
    cases = itertools.product(arguments.seqlen, arguments.head_dim, arguments.dtype, PASSES)
    for seqlen, head_dim, dtype, passes in cases:
        row = cold_and_warm(dtype, passes, seqlen, head_dim)
        rows.append(row)
        print(
            "".join(f"{row[title]!s:{width}}" for title, width in titles),
            f"{row['cold']:14.2f}{row['warm']:15.3f}",
            flush=True,
        )
    write(arguments.json, rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
