"""What every benchmark says beside its numbers: device, versions, digest of the sources."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cuattn
from cuattn.errors import CompileError
from cuattn.jit.compile import nvrtc_version
from cuattn.jit.source import kernels_dir


def sources_digest() -> str:
    """SHA-256 over every Python and CUDA source, by path: which code was measured."""
    digest = hashlib.sha256()
    package = Path(cuattn.__file__).parent
    for root, pattern in ((package, "*.py"), (kernels_dir(), "*.cuh")):
        for path in sorted(root.rglob(pattern)):
            name = f"{root.name}/{path.relative_to(root).as_posix()}"
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def circumstances() -> dict[str, Any]:
    """Device, driver, versions and the sources' digest; nothing else about the machine."""
    found: dict[str, Any] = {
        "cuattn": cuattn.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "sources_sha256": sources_digest(),
    }
    try:
        import cupy

        found["cupy"] = cupy.__version__
        found["nvrtc"] = ".".join(map(str, nvrtc_version()))
        driver = cupy.cuda.runtime.driverGetVersion()
        found["cuda_driver"] = f"{driver // 1000}.{driver % 1000 // 10}"
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
        found["device"] = properties["name"].decode()
    except (ImportError, CompileError):
        pass
    except cupy.cuda.runtime.CUDARuntimeError:
        found["device"] = None
    return found


def parser(description: str | None) -> argparse.ArgumentParser:
    """A command line that takes ``--json``."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", type=Path, metavar="PATH", help="write the numbers there too")
    return made


def write(path: Path | None, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write rows, circumstances and more as JSON, where a path is given."""
    if path is not None:
        data = {"circumstances": circumstances(), **more, "rows": list(rows)}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What ``write`` wrote, or SystemExit that says what is wrong with it."""
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path}: cannot be read ({error})") from None
    if not isinstance(data, dict) or not {"circumstances", "rows"} <= data.keys():
        raise SystemExit(f"{path}: no report of a benchmark")
    return data
