"""Threads and processes that call at once, several devices, and a run of many problems."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import long_run
import mixed_calls
import needs
import numpy as np
import pytest
from engines import NumpyEngine

from cuattn import execute, precompile
from cuattn.cpu import heads
from cuattn.jit import cache, launch
from cuattn.jit.cache import KernelCache
from cuattn.jit.compile import Compiled, CompileOptions
from cuattn.jit.source import Unit
from cuattn.planning.device import known_device

ROOT = Path(__file__).parents[1]
NUM_PROCESSES = 8


def test_threads_that_call_anything_at_once_get_their_own_results(engine, tmp_path, monkeypatch):
    """On a device with nothing compiled before, of which each kernel is compiled once."""
    on_host = engine.name == "numpy"
    if on_host:  # several tiles, and those of larger problems over the cores
        for name, value in (("BLOCK_M", 16), ("BLOCK_N", 16), ("THREADED_WORK", 100_000)):
            monkeypatch.setattr(heads, name, value)
    calls = mixed_calls.mixed_calls(engine)
    known = mixed_calls.known_results(engine, calls)
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch, "_kernels", {})
    execute.forget()
    compiled, compile_unit = [], cache.compile_unit

    def counted(unit, options):
        compiled.append(unit.name)
        return compile_unit(unit, options)

    monkeypatch.setattr(cache, "compile_unit", counted)

    def around(thread):
        if on_host or thread % 2:
            return contextlib.nullcontext()
        return engine.xp.cuda.Stream(non_blocking=True)

    if not on_host:
        engine.xp.cuda.Device().synchronize()
    wrong = mixed_calls.wrong_calls(
        engine, calls, known, num_threads=16, num_calls=200, around=around
    )
    assert not wrong, "\n".join(wrong)
    kernels = sorted({kernel.name for kernel in launch._kernels.values()})
    assert sorted(compiled) == kernels
    assert mixed_calls.stored_kernels(tmp_path) == kernels
    assert on_host or len(kernels) > 2


def small_specs():
    """Kernels that take a tenth of a second each."""
    specs = list(precompile.default_specs(known_device("sm_90a")))
    return [spec for spec in specs if spec.entry.endswith(("bwd_prepare", "fwd_merge"))][:4]


def build_with_others(directory, barrier, results):
    """One process of many: fill the cache that they share, in threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUATTN_CACHE_DIR", str(directory))
        barrier.wait(timeout=120)
        built = list(precompile.build(small_specs(), "sm_90a", jobs=2))
        images = {each.spec.name: hashlib.sha256(each.compiled.cubin).hexdigest() for each in built}
        are_stored = all(each.stored for each in built)
        results.put((images, are_stored, cache.default_cache().stats.compiles))


def test_processes_that_share_an_empty_cache_build_it_whole(tmp_path):
    needs.nvrtc()
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(NUM_PROCESSES), context.Queue()
    processes = [
        context.Process(target=build_with_others, args=(tmp_path, barrier, results))
        for _ in range(NUM_PROCESSES)
    ]
    for process in processes:
        process.start()
    answers = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
    names = sorted(spec.name for spec in small_specs())
    assert mixed_calls.stored_kernels(tmp_path) == names
    in_memory, options = KernelCache(None), CompileOptions("sm_90a")
    for spec in small_specs():
        entry = in_memory.get(execute.unit_of(spec), options)
        wanted = hashlib.sha256(entry.compiled.cubin).hexdigest()
        assert {images[spec.name] for images, _, _ in answers} == {wanted}
    assert all(are_stored for _, are_stored, _ in answers)
    assert all(compiles <= len(names) for _, _, compiles in answers)


UNIT = Unit("probe", "void probe();", {}, 64)


class DriverError(Exception):
    """As cupy.cuda.driver.CUDADriverError."""


class FakeCupy:
    """What ``launch.load`` asks of CuPy: the current device, and modules; some images are bad."""

    def __init__(self):
        self.device, self.loaded, self.refused = 0, [], set()
        self.cuda = SimpleNamespace(
            runtime=SimpleNamespace(getDevice=lambda: self.device),
            driver=SimpleNamespace(CUDADriverError=DriverError),
        )

    def RawModule(self, path):
        image = Path(path).read_bytes()
        time.sleep(0.01)  # another thread may come between
        if image in self.refused:
            raise DriverError
        self.loaded.append((self.device, image))
        raw = SimpleNamespace(kernel=SimpleNamespace(ptr=len(self.loaded)))
        return SimpleNamespace(get_function=lambda name: raw)


@pytest.fixture
def fake_cupy(monkeypatch, tmp_path):
    """A compiler and a loader without CUDA; nothing is loaded before."""
    fake = FakeCupy()
    images = iter(f"image {i}".encode() for i in range(100))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(
        cache, "compile_unit", lambda unit, options: Compiled(next(images), "", 1, 0, 0, 0, 0)
    )
    for module in (cache, launch):
        monkeypatch.setattr(module, "nvrtc_version", lambda: (13, 0))
    monkeypatch.setattr(launch, "_kernels", {})
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    return fake


def test_a_kernel_is_loaded_once_on_each_device_and_compiled_once(fake_cupy):
    kernels = []
    for device in (0, 1, 0, 1):
        fake_cupy.device = device
        kernels.append(launch.load(UNIT, "sm_90a"))
    assert fake_cupy.loaded == [(0, b"image 0"), (1, b"image 0")]
    assert kernels[0] is kernels[2]
    assert kernels[1] is kernels[3]
    assert [each.function.ptr for each in kernels[:2]] == [1, 2]
    assert cache.default_cache().stats.compiles == 1


def test_threads_load_a_kernel_once(fake_cupy):
    both, kernels = threading.Barrier(8), []

    def load():
        both.wait(timeout=60)
        kernels.append(launch.load(UNIT, "sm_90a"))

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(kernels) == 8
    assert len(set(map(id, kernels))) == len(fake_cupy.loaded) == 1


def test_an_image_that_the_driver_refuses_is_built_anew(fake_cupy, tmp_path):
    """Its checksum is right: it was damaged before it was written."""
    fake_cupy.refused = {b"image 0"}
    launch.load(UNIT, "sm_90a")
    assert fake_cupy.loaded == [(0, b"image 1")]
    assert mixed_calls.stored_kernels(tmp_path) == ["probe"]
    assert cache.default_cache().stats.compiles == 2


def test_an_image_that_the_driver_refuses_twice_is_an_error_and_no_loop(fake_cupy):
    fake_cupy.refused = {b"image 0", b"image 1"}
    with pytest.raises(DriverError):
        launch.load(UNIT, "sm_90a")
    assert cache.default_cache().stats.compiles == 2
    fake_cupy.refused.clear()
    launch.load(UNIT, "sm_90a")  # what failed holds no lock
    assert [image for _, image in fake_cupy.loaded] == [b"image 1"]


LONG_RUN = ["--engine", "numpy", "--count", "60", "--workers", "2"]


def last_line(text):
    return json.loads(text.splitlines()[-1])


def test_many_random_problems_are_right_and_keep_no_memory():
    command = [sys.executable, "tests/long_run.py", *LONG_RUN, "--check-every", "3"]
    environment = os.environ | {"PYTHONPATH": "."}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcome = last_line(done.stdout)
    assert (outcome["checked"], outcome["failures"]) == (20, 0)
    assert sum(outcome["calls"].values()) == 60
    assert all(outcome["calls"][f"numpy/{dtype}"] for dtype in NumpyEngine.dtypes)
    assert all(0 < outcome["worst"][name][0] <= 1 for name in long_run.RESULTS)


def scaled(results):
    results[0] *= results[0].dtype.type(1.05)


def with_nan(results):
    results[3].flat[-1] = np.nan


FAULTS = {"> bound": scaled, "not finite": with_nan}


@pytest.mark.parametrize("what", FAULTS)
def test_a_run_of_many_problems_sees_a_fault(what, monkeypatch, capsys):
    compute = long_run.compute

    def faulty(engine, case):
        results, res = compute(engine, case)
        if case.problem.seed >= 10 and results[3] is not None:
            FAULTS[what](results)
        return results, res

    monkeypatch.setattr(long_run, "compute", faulty)
    assert long_run.main([*LONG_RUN, "--check-every", "1"]) == 1
    printed = capsys.readouterr().out
    (failed, *_) = [line for line in printed.splitlines() if line.startswith("FAILED")]
    assert what in failed
    assert "Case(problem=Problem(" in failed
    assert last_line(printed)["failures"] > 0


def test_a_run_of_many_problems_sees_memory_that_is_kept(monkeypatch, capsys):
    compute, kept = long_run.compute, []

    def keeping(engine, case):
        kept.append(np.ones(8 << 20, np.uint8))
        return compute(engine, case)

    monkeypatch.setattr(long_run, "compute", keeping)
    assert long_run.main([*LONG_RUN, "--check-every", "30"]) == 1
    assert "FAILED process memory grew by" in capsys.readouterr().out
