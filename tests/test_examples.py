"""Every example runs as it is; it asserts its own claims."""

import os
import subprocess
import sys
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: What one needs beyond cuattn, and CuPy on a GPU.
LIBRARIES = {"04_torch": "torch", "05_jax": "jax"}


def run(path, **environment):
    if path.stem in LIBRARIES:
        needs.library(LIBRARIES[path.stem])
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        check=False,
        capture_output=True,
        text=True,
    )


def test_they_are_numbered_without_a_gap():
    assert [path.name[:2] for path in EXAMPLES] == [f"{i + 1:02}" for i in range(len(EXAMPLES))]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs_on_numpy_arrays(path):
    done = run(path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "arrays: numpy" in done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_runs_on_cupy_arrays(path):
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert "cupy" in done.stdout or "arrays: device memory" in done.stdout
