"""Emulated kernels under the address and the undefined-behaviour sanitizer."""

import subprocess
import sys
from pathlib import Path

import needs
import pytest
from emulator.small_launches import environment

ROOT = Path(__file__).parents[1]

#: Lines of a kernel, and what a sanitizer says of them.
FAULTS = {
    "past an array": ("its.out[thread + 1] = 1;", "heap-buffer-overflow"),
    "past shared memory": (
        "its.out[thread] = reinterpret_cast<f32*>(shared)[511 + thread];",
        "use-after-poison",
    ),
    "past registers": (
        "f32 r[4]; for (int i = 0; i <= its.a[63]; ++i) r[i] = i; its.out[thread] = r[2];",
        "out of bounds",
    ),
    "a misaligned vector": (
        "reinterpret_cast<float4*>(its.out + 1)[0] = make_float4(0, 0, 0, 0);",
        "misaligned address",
    ),
    "a shift by too much": (
        "its.out[thread] = 1 << int(8 * its.a[63] + thread);",
        "shift exponent",
    ),
    "an integer that is too large": (
        "its.out[thread] = int(its.a[63]) * 1000000000 * (1 + thread);",
        "signed integer overflow",
    ),
}

_ONE = """
import numpy as np
from emulator.launch import settings
from instructions import Emulated
settings.mode = "sanitized"
a, out = np.full(64, 4, np.float32), np.zeros(64, np.float32)
Emulated()({body!r}, {{"out": out}}, threads=64, smem=2048, name="fault", a=a)
"""


def sanitized(*command):
    """A Python process with the sanitizers' libraries."""
    its = environment()
    needs.sanitizers(its)
    paths = f"{ROOT}:{ROOT / 'tests'}"
    return subprocess.run(
        (sys.executable, *command),
        cwd=ROOT,
        env=its | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("name", "dtype"), [("simt", "float32"), ("sm80", "bfloat16")])
def test_small_launches(name, dtype):
    done = sanitized("-m", "emulator.small_launches", "sanitized", name, dtype, "2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "is right" in done.stdout


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name):
    body, says = FAULTS[name]
    done = sanitized("-c", _ONE.format(body=body))
    assert done.returncode != 0
    assert says in done.stderr, done.stderr[-4000:]
