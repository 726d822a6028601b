"""The small problems on emulated kernels, in one mode: what runs under the sanitizers.

    PYTHONPATH=.:tests python -m emulator.small_launches sanitized sm80 bfloat16

``environment()`` has what a process needs whose C++ code is sanitized and whose Python is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import calls
from engines import family_of
from small_problems import PROBLEMS
from tiles import RANKS

from emulator import build, device
from emulator.engine import EmulatedEngine
from emulator.launch import settings


def environment() -> dict[str, str] | None:
    """The environment with the sanitizers' libraries; None where the compiler has none to load."""
    libraries = []
    for name in ("libasan.so", "libstdc++.so"):  # the second, so that exceptions are found
        command = (build.compiler() or "false", f"-print-file-name={name}")
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        if not Path(found).is_absolute():
            return None
        libraries.append(str(Path(found).resolve()))
    return os.environ | {
        "LD_PRELOAD": ":".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def main(mode: str, name: str, dtype: str, count: str = "99") -> None:
    """So many small problems of a dtype in the smallest tile of a family, forward and backward."""
    settings.mode = mode
    with device.emulated(), family_of(name) as family:
        engine = EmulatedEngine(family)
        with engine.tile(RANKS[-1]), engine.order(1):
            for problem in [each for each in PROBLEMS if each.dtype == dtype][: int(count)]:
                calls.check_forward(engine, problem)
                calls.check_backward(engine, problem)
                print(name, problem, "is right", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
