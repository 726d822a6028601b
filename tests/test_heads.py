"""How the CPU engine cuts up its work: batches, products in pieces, threads."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cpu_calls import backward, check, forward, random

from cuattn.cpu import heads, tiled
from cuattn.planning.problem import Band


def test_small_heads_are_batched(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()
    multiply = heads.matmul
    monkeypatch.setattr(tiled, "matmul", lambda *a: (next(calls), multiply(*a))[1])
    q, k, v, dout = random((300, 4, 2, 8), (300, 4, 1, 8), (300, 4, 1, 8), (300, 4, 2, 8))
    forward(q, k, v, Band(-9, 0))
    assert next(calls) == 4  # two products for each of two query heads, all 300 at once
    check(q, k, v, Band(-9, 0), dout, None)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("num_heads", [1, 9])
def test_same_bits_whatever_the_number_of_cores(
    num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, dout = random(*[(1, 400, num_heads, 16)] * 4)
    monkeypatch.setattr(heads, "THREADED_WORK", 0)
    results = []
    for cores in (1, 2, 7, 2):
        monkeypatch.setattr(heads, "_num_cores", lambda cores=cores: cores)
        band = Band(-999, 0)
        results.append((*forward(q, k, v, band), *backward(q, k, v, band, dout, None)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize(
    "shape",
    [(64, 64, 64), (256, 64, 480), (256, 480, 64), (480, 256, 64), (257, 300, 211), (3, 9, 1)],
)
def test_products_in_pieces(shape: tuple[int, int, int]) -> None:
    """Integers, so that any order of summation gives the same bits."""
    rows, terms, columns = shape
    rng = np.random.default_rng(0)
    a = rng.integers(-8, 8, (2, rows, terms)).astype(np.float32)
    b = rng.integers(-8, 8, (2, columns, terms)).astype(np.float32).swapaxes(1, 2)
    assert np.array_equal(heads.matmul(a, b), a @ b)
    transposed = np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
    out = np.empty((2, rows, columns), np.float32)
    assert heads.matmul(transposed, b, out) is out
    assert np.array_equal(out, a @ b)


@pytest.mark.parametrize("wait", ["threading.main_thread().join()", "time.sleep(0.2)", "pass"])
def test_a_thread_that_outlives_the_main_thread_still_computes(wait: str) -> None:
    script = f"""
import threading, time
import numpy as np
import cuattn

q, k, v = np.random.default_rng(0).standard_normal((3, 1, 1500, 2, 64), dtype=np.float32)
want = cuattn.attention(q, k, v)

def late():
    {wait}
    for _ in range(3):
        out, vjp = cuattn.attention_vjp(q, k, v)
        assert np.array_equal(out, want)
        vjp(out)
    print("computed", flush=True)

threading.Thread(target=late).start()
"""
    command = [sys.executable, "-c", script]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert run.stdout == "computed\n", run.stderr


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signals to a thread here")
@pytest.mark.parametrize("num_heads", [1, 16])
def test_an_interrupt_is_heard_at_the_next_tile(num_heads: int) -> None:
    q, k, v = random(*[(1, 40_000 // num_heads + 10_000, num_heads, 64)] * 3)
    main_thread = threading.main_thread().ident
    timer = threading.Timer(0.3, signal.pthread_kill, (main_thread, signal.SIGINT))
    begin = time.perf_counter()
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        forward(q, k, v, Band(-99_999, 99_999))
    assert time.perf_counter() - begin < 2  # the whole takes more than ten seconds


def test_an_error_in_a_part_is_the_one_that_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(tiled.State, "push", fail)
    monkeypatch.setattr(heads, "THREADED_WORK", 0)
    monkeypatch.setattr(heads, "_num_cores", lambda: 3)
    q, k, v = random(*[(2, 600, 2, 16)] * 3)
    with pytest.raises(MemoryError, match="no room"):
        forward(q, k, v, Band(-999, 999))
