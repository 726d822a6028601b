"""The engine fixture, hypothesis profiles, and the record of what ran on a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import record
from engines import CUDA_ENGINES, CudaEngine, NumpyEngine, family_of

from cuattn.cpu import heads

hypothesis.settings.register_profile("default", deadline=None, derandomize=False)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def cuda_devices():
    """How many CUDA devices this process can use."""
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except Exception:  # noqa: BLE001 - no CuPy, no driver and no device all mean none
        return 0


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles small enough that short sequences have many."""
    monkeypatch.setattr(heads, "BLOCK_M", 32)
    monkeypatch.setattr(heads, "BLOCK_N", 48)


def is_repeated(item):
    """Whether another test does the same: another engine's, where its module's ``ENGINES`` say so.

    On the emulator every minute counts: ``EMULATED`` has the engines of single tests, and a dtype
    is for the families that take it.
    """
    params = item.callspec.params if hasattr(item, "callspec") else {}
    engine = params.get("engine")
    if engine is None:
        return False
    few = getattr(item.module, "EMULATED", None)
    if few is not None:
        dtypes = CUDA_ENGINES[engine][0].dtypes
        is_other = engine not in few.get(item.originalname, (engine,))
        if is_other or params.get("dtype", dtypes[0]) not in dtypes:
            return True
    return engine not in getattr(item.module, "ENGINES", (engine,))


@pytest.fixture(
    params=["numpy", *(pytest.param(name, marks=pytest.mark.gpu) for name in CUDA_ENGINES)],
    scope="module",
)
def engine(request):
    """Every engine and kernel family in turn: the shared suites take it."""
    if request.param == "numpy":
        yield NumpyEngine()
        return
    with family_of(request.param) as family:
        yield CudaEngine(family)


def pytest_addoption(parser):
    parser.addoption("--record-gpu", metavar="PATH", help="write what ran on this GPU to PATH")


def pytest_collection_modifyitems(config, items):
    repeated = [item for item in items if is_repeated(item)]
    config.hook.pytest_deselected(items=repeated)
    items[:] = [item for item in items if item not in repeated]
    if cuda_devices() == 0:
        skip = pytest.mark.skip(reason="no CUDA device; tests/gpu_record.json holds the last run")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


_outcomes: dict[str, str] = {}


def pytest_runtest_logreport(report):
    if "gpu" not in report.keywords:
        return
    if report.when == "call" or report.outcome != "passed":
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session):
    path = session.config.getoption("--record-gpu")
    if path and not hasattr(session.config, "workerinput"):  # a worker knows only its own share
        record.write(Path(path), _outcomes)
