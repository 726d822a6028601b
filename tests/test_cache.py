"""cuattn.jit.cache: what the key covers, and that no disk, race or damage breaks it.

The compiler is replaced by one that counts, so these tests need neither NVRTC nor a GPU.
"""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from cuattn.jit import cache
from cuattn.jit.cache import KernelCache, cache_key, default_directory
from cuattn.jit.compile import Compiled, CompileOptions
from cuattn.jit.source import Unit

UNIT = Unit("cuattn_test", '#include "a.cuh"\n', {"a.cuh": "one", "b.cuh": "two"}, 128)
OPTIONS = CompileOptions("sm_90a")


def fake_compile(unit: Unit, options: CompileOptions) -> Compiled:
    image = f"{unit.text} {dict(unit.headers)} {options}".encode()
    return Compiled(image, "log", 32, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    monkeypatch.setattr(cache, "compile_unit", fake_compile)
    monkeypatch.setattr(cache, "nvrtc_version", lambda: (13, 5))


def folder_of(entry: cache.Entry) -> Path:
    assert entry.folder is not None
    return entry.folder


def test_first_get_compiles_second_is_memory_third_process_is_disk(tmp_path):
    first = KernelCache(tmp_path)
    entry = first.get(UNIT, OPTIONS)
    assert first.get(UNIT, OPTIONS) is entry
    assert (first.stats.compiles, first.stats.memory_hits, first.stats.disk_hits) == (1, 1, 0)
    second = KernelCache(tmp_path)
    assert second.get(UNIT, OPTIONS) == entry
    assert (second.stats.compiles, second.stats.disk_hits) == (0, 1)


def test_an_entry_is_readable(tmp_path):
    entry = KernelCache(tmp_path).get(UNIT, OPTIONS)
    folder = folder_of(entry)
    assert sorted(path.name for path in folder.iterdir()) == [
        "kernel.cubin",
        "meta.json",
        "unit.cu",
    ]
    assert folder.name.startswith("cuattn_test.")
    assert folder.parent.name.startswith("sm_90a-nvrtc13.5-")
    assert (folder / "unit.cu").read_text() == UNIT.text
    assert json.loads((folder / "meta.json").read_text())["name"] == "cuattn_test"
    assert list(tmp_path.glob("*/.*")) == []


CHANGES = {
    "name": (replace(UNIT, name="other"), OPTIONS, (13, 5)),
    "text": (replace(UNIT, text="x"), OPTIONS, (13, 5)),
    "header text": (replace(UNIT, headers={"a.cuh": "one", "b.cuh": "2"}), OPTIONS, (13, 5)),
    "header path": (replace(UNIT, headers={"a.cuh": "one", "c.cuh": "two"}), OPTIONS, (13, 5)),
    "border": (replace(UNIT, headers={"a.cuh": "onet", "b.cuh": "wo"}), OPTIONS, (13, 5)),
    "arch": (UNIT, CompileOptions("sm_80"), (13, 5)),
    "lineinfo": (UNIT, replace(OPTIONS, lineinfo=True), (13, 5)),
    "fmad": (UNIT, replace(OPTIONS, fmad=False), (13, 5)),
    "nvrtc": (UNIT, OPTIONS, (13, 6)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_key_covers(change):
    assert cache_key(*CHANGES[change]) != cache_key(UNIT, OPTIONS, (13, 5))


def test_the_key_covers_the_schema(monkeypatch):
    before = cache_key(UNIT, OPTIONS, (13, 5))
    monkeypatch.setattr(cache, "SCHEMA", cache.SCHEMA + 1)
    assert cache_key(UNIT, OPTIONS, (13, 5)) != before


def test_the_key_ignores_the_order_of_headers():
    backwards = replace(UNIT, headers=dict(reversed(UNIT.headers.items())))
    assert cache_key(backwards, OPTIONS, (13, 5)) == cache_key(UNIT, OPTIONS, (13, 5))


DAMAGE = {
    "flipped byte": lambda f: (f / "kernel.cubin").write_bytes(b"?" * 10),
    "truncated": lambda f: os.truncate(f / "kernel.cubin", 5),
    "empty cubin": lambda f: (f / "kernel.cubin").write_bytes(b""),
    "no cubin": lambda f: (f / "kernel.cubin").unlink(),
    "no meta": lambda f: (f / "meta.json").unlink(),
    "meta is no json": lambda f: (f / "meta.json").write_text("{"),
    "meta is a list": lambda f: (f / "meta.json").write_text("[]"),
    "meta lacks all": lambda f: (f / "meta.json").write_text("{}"),
    "meta is binary": lambda f: (f / "meta.json").write_bytes(b"\xff\xfe\x00"),
    "foreign key": lambda f: (f / "meta.json").write_text(
        (f / "meta.json").read_text().replace('"key": "', '"key": "0')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_rebuilt(tmp_path, damage):
    good = KernelCache(tmp_path).get(UNIT, OPTIONS)
    DAMAGE[damage](folder_of(good))
    again = KernelCache(tmp_path)
    assert again.get(UNIT, OPTIONS) == good
    assert again.stats.compiles == 1
    healed = KernelCache(tmp_path)
    assert healed.get(UNIT, OPTIONS) == good
    assert healed.stats.compiles == 0
    assert list(tmp_path.glob("*/.*")) == []


def test_rebuild_replaces_what_the_driver_refused(tmp_path):
    kernels = KernelCache(tmp_path)
    entry = kernels.get(UNIT, OPTIONS)
    assert kernels.rebuild(UNIT, OPTIONS) == entry
    assert kernels.stats.compiles == 2
    assert folder_of(entry).is_dir()


def degraded(directory: Path) -> KernelCache:
    """A cache that must work without its directory, after exactly one warning."""
    kernels = KernelCache(directory)
    other = replace(UNIT, name="other")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for unit in (UNIT, other, UNIT):
            assert kernels.get(unit, OPTIONS).folder is None
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert "CUATTN_CACHE_DIR" in str(caught[0].message)
    assert kernels.stats.compiles == 2
    return kernels


def test_a_path_below_a_file_degrades_to_memory(tmp_path):
    (tmp_path / "file").write_text("")
    degraded(tmp_path / "file" / "cache")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_directory_degrades_to_memory(tmp_path):
    tmp_path.chmod(0o555)
    degraded(tmp_path)


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("step", ["mkdir", "write_bytes", "rename"])
def test_a_disk_that_refuses_degrades_to_memory(tmp_path, monkeypatch, code, step):
    def refuse(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(Path, step, refuse)
    degraded(tmp_path / "cache")
    assert list(tmp_path.glob("cache/*/*")) == []


def test_cubin_path_is_the_entry_or_a_temporary_file(tmp_path):
    on_disk = KernelCache(tmp_path).get(UNIT, OPTIONS)
    with on_disk.cubin_path() as path:
        assert path == folder_of(on_disk) / "kernel.cubin"
    in_memory = KernelCache(None).get(UNIT, OPTIONS)
    with in_memory.cubin_path() as path:
        assert path.read_bytes() == in_memory.compiled.cubin
    assert not path.exists()


def test_cubin_path_survives_a_deleted_entry(tmp_path):
    entry = KernelCache(tmp_path).get(UNIT, OPTIONS)
    (folder_of(entry) / "kernel.cubin").unlink()
    with entry.cubin_path() as path:
        assert path.read_bytes() == entry.compiled.cubin


def test_threads_compile_once(tmp_path, monkeypatch):
    def slow(unit, options):
        time.sleep(0.05)
        return fake_compile(unit, options)

    monkeypatch.setattr(cache, "compile_unit", slow)
    kernels = KernelCache(tmp_path)
    units = [UNIT, replace(UNIT, name="other")]
    threads = [
        threading.Thread(target=kernels.get, args=(units[i % 2], OPTIONS)) for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kernels.stats.compiles == 2


def race(directory: Path, barrier, results) -> None:
    """One process of the race: everybody compiles, everybody publishes."""

    def compile_together(unit, options):
        barrier.wait(60)
        return fake_compile(unit, options)

    cache.compile_unit = compile_together
    cache.nvrtc_version = lambda: (13, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = KernelCache(directory).get(UNIT, OPTIONS)
    results.put((entry.compiled.cubin, entry.folder))


@pytest.mark.parametrize("before", ["nothing", "a damaged entry"])
def test_eight_processes_race_to_one_entry(tmp_path, before):
    good = KernelCache(tmp_path).get(UNIT, OPTIONS)
    folder = folder_of(good)
    if before == "nothing":
        folder.rename(tmp_path / "away")
    else:
        (folder / "kernel.cubin").write_bytes(b"")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(8), context.Queue()
    processes = [context.Process(target=race, args=(tmp_path, barrier, results)) for _ in range(8)]
    for process in processes:
        process.start()
    answers = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert answers == [(good.compiled.cubin, folder)] * 8
    assert KernelCache(tmp_path).get(UNIT, OPTIONS) == good
    assert list(folder.parent.iterdir()) == [folder]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_a_thread_compiles_does_not_hang(tmp_path, monkeypatch):
    compiling, release = threading.Event(), threading.Event()

    def blocked(unit, options):
        if threading.current_thread() is not threading.main_thread():
            compiling.set()
            release.wait(30)
        return fake_compile(unit, options)

    monkeypatch.setattr(cache, "compile_unit", blocked)
    kernels = KernelCache(tmp_path)
    thread = threading.Thread(target=kernels.get, args=(UNIT, OPTIONS))
    thread.start()
    compiling.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        kernels.get(UNIT, OPTIONS)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_directory_follows_the_environment(tmp_path, monkeypatch):
    for variable in ("CUATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_directory() == tmp_path / ".cache" / "cuattn"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert default_directory() == tmp_path / "xdg" / "cuattn"
    monkeypatch.setattr(cache.sys, "platform", "win32")
    assert default_directory() == tmp_path / "local" / "cuattn"
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "own"))
    assert default_directory() == tmp_path / "own"
    assert cache.default_cache().directory == tmp_path / "own"
    assert cache.default_cache() is cache.default_cache()


def test_no_home_means_memory(monkeypatch):
    def homeless():
        raise RuntimeError("no home")

    for variable in ("CUATTN_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert default_directory() is None
    assert KernelCache(None).get(UNIT, OPTIONS).folder is None
