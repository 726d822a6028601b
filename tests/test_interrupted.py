"""cuattn.jit.cache: a compilation or a write that ends half-way leaves nothing that does harm."""

import errno
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path

import mixed_calls
import pytest

from cuattn.jit import cache
from cuattn.jit.cache import KernelCache
from cuattn.jit.compile import Compiled, CompileOptions
from cuattn.jit.source import Unit

UNIT = Unit("probe", "void probe();", {}, 64)
OPTIONS = CompileOptions("sm_90a")
IMAGE = bytes(range(256)) * 40


def fake_compile(unit, options):
    return Compiled(IMAGE, "log", 32, 0, 0, 0, 0)


def without_nvrtc(patch):
    patch.setattr(cache, "compile_unit", fake_compile)
    patch.setattr(cache, "nvrtc_version", lambda: (13, 5))


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    without_nvrtc(monkeypatch)


def assert_next_process_is_well(directory):
    """What another cache of the folder finds: nothing, or all; and it leaves a whole entry."""
    kernels = KernelCache(directory)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entry = kernels.get(UNIT, OPTIONS)
    assert entry.compiled.cubin == IMAGE
    assert entry.folder is not None
    third = KernelCache(directory)
    assert third.get(UNIT, OPTIONS) == entry
    assert (third.stats.compiles, third.stats.disk_hits) == (0, 1)
    return kernels


def in_thread(function):
    """What a function returns or raises in a thread of its own, which must not hang."""
    got = []

    def run():
        try:
            got.append(function())
        except BaseException as error:  # noqa: BLE001 - it is what is asked for
            got.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert got, "it hangs"
    return got[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_an_interrupted_compilation_holds_nothing_up(tmp_path, monkeypatch, error):
    def interrupted(unit, options):
        raise error

    kernels = KernelCache(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "compile_unit", interrupted)
        for ask in (kernels.get, kernels.rebuild):
            assert type(in_thread(lambda ask=ask: ask(UNIT, OPTIONS))) is error
    assert in_thread(lambda: kernels.get(UNIT, OPTIONS)).compiled.cubin == IMAGE
    assert mixed_calls.stored_kernels(tmp_path) == ["probe"]


def test_an_interrupted_build_of_many_gives_up_those_that_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path))
    compiled = []

    def interrupted_once(unit, options):
        compiled.append(unit.name)
        if len(compiled) == 1:
            raise KeyboardInterrupt
        time.sleep(0.01)  # so that those that wait are not done before they are given up
        return fake_compile(unit, options)

    monkeypatch.setattr(cache, "compile_unit", interrupted_once)
    units = [Unit(f"probe_{i}", f"void probe_{i}();", {}, 64) for i in range(50)]
    with pytest.raises(KeyboardInterrupt):
        list(cache.build(units, OPTIONS, jobs=1))
    assert len(compiled) < len(units)
    assert len(list(cache.build(units, OPTIONS, jobs=1))) == len(units)
    assert mixed_calls.stored_kernels(tmp_path) == sorted(unit.name for unit in units)


def test_what_a_killed_process_left_is_deleted_after_a_day(tmp_path):
    kernels = KernelCache(tmp_path)
    group = kernels.get(UNIT, OPTIONS).folder.parent
    day = 24 * 3600
    for name, age in (
        (".building-old", day + 60),
        (".discarded-old", day + 60),
        (".building-new", 60),
    ):
        (group / name).mkdir()
        (group / name / "kernel.cubin").write_bytes(IMAGE)
        then = time.time() - age
        os.utime(group / name, (then, then))
    kernels.get(Unit("other", "void other();", {}, 64), OPTIONS)
    assert {each.name for each in group.iterdir() if each.name.startswith(".")} == {".building-new"}
    assert KernelCache(tmp_path).get(UNIT, OPTIONS).compiled.cubin == IMAGE


#: What touches the disk when an entry is stored, in order.
STEPS = ("mkdir", "mkdtemp", "unit.cu", "kernel.cubin", "meta.json", "chmod", "rename")


def at_step(patch, step, act):
    """Have ``act()`` called at a step, and at every one after it; of a file half is written."""
    begun = []

    def wrap(owner, name, step_of, writes):
        whole = getattr(owner, name)

        def call(*arguments, **options):
            if not begun and step_of(*arguments) != step:
                return whole(*arguments, **options)
            begun.append(name)
            if writes:
                path, data, *_ = arguments
                whole(path, data[: len(data) // 2], **options)
            return act()

        patch.setattr(owner, name, call)

    wrap(tempfile, "mkdtemp", lambda *_: "mkdtemp", writes=False)
    for name in ("mkdir", "chmod", "rename"):
        wrap(Path, name, lambda *_, name=name: name, writes=False)
    for name in ("write_text", "write_bytes"):
        wrap(Path, name, lambda path, *_: path.name, writes=True)
    return begun


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_fails_at_any_step_is_done_without(tmp_path, monkeypatch, step, code):
    def fail():
        raise OSError(code, os.strerror(code))

    kernels, directory = KernelCache(tmp_path / "cache"), tmp_path / "cache"
    with monkeypatch.context() as patch:
        begun = at_step(patch, step, fail)
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            entry = kernels.get(UNIT, OPTIONS)
    assert begun
    assert (entry.compiled.cubin, entry.folder) == (IMAGE, None)
    assert mixed_calls.stored_kernels(directory) == []
    assert kernels.get(UNIT, OPTIONS) is entry
    assert assert_next_process_is_well(directory).stats.compiles == 1
    assert mixed_calls.stored_kernels(directory) == ["probe"]


def with_little_room(directory, results):
    """A process whose files may have half of an image; what the system writes is written."""
    import resource

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        without_nvrtc(patch)
        warnings.simplefilter("always")
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(IMAGE) // 2, resource.RLIM_INFINITY))
        entry = KernelCache(directory).get(UNIT, OPTIONS)
    results.put((entry.compiled.cubin, entry.folder, [str(each.message) for each in caught]))


def run_in_process(target, *arguments):
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(timeout=60)
    return process.exitcode


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="no limit of a file's size here")
def test_a_file_that_finds_no_room_half_way_leaves_no_entry(tmp_path):
    results = multiprocessing.get_context("spawn").SimpleQueue()
    assert run_in_process(with_little_room, tmp_path, results) == 0
    image, folder, (warning,) = results.get()
    assert (image, folder) == (IMAGE, None)
    assert os.strerror(errno.EFBIG) in warning
    assert mixed_calls.stored_kernels(tmp_path) == []
    assert assert_next_process_is_well(tmp_path).stats.compiles == 1


def die_at(step, directory):
    with pytest.MonkeyPatch.context() as patch:
        without_nvrtc(patch)
        at_step(patch, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
        KernelCache(directory).get(UNIT, OPTIONS)


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no such signal here")
@pytest.mark.parametrize("step", ["unit.cu", "kernel.cubin", "rename"])
def test_a_process_killed_while_it_writes_does_the_next_one_no_harm(tmp_path, step):
    assert run_in_process(die_at, step, tmp_path) == -signal.SIGKILL
    (left,) = tmp_path.glob("*/*")
    assert left.name.startswith(".building-")
    assert any(left.iterdir())
    assert assert_next_process_is_well(tmp_path).stats.compiles == 1
    (entry,) = tmp_path.glob("*/probe.*")
    # Even under the name that an entry has, half of one is none.
    left.rename(left.with_name("away"))
    entry.rename(left)
    left.with_name("away").rename(entry)
    compiles = int(step != "rename")  # by then it was whole
    assert assert_next_process_is_well(tmp_path).stats.compiles == compiles


def test_folders_that_others_left_are_neither_read_nor_in_the_way(tmp_path):
    good = KernelCache(tmp_path).get(UNIT, OPTIONS)
    group = good.folder.parent
    for name in (".building-abc", ".discarded-abc"):
        (group / name / good.folder.name).mkdir(parents=True)
        (group / name / "kernel.cubin").write_bytes(b"other")
    assert KernelCache(tmp_path).get(UNIT, OPTIONS) == good
    kernels = KernelCache(tmp_path)
    assert kernels.rebuild(UNIT, OPTIONS) == good
    assert assert_next_process_is_well(tmp_path).stats.disk_hits == 1
