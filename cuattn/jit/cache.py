"""Compiled kernels kept in memory and on disk, under a key that covers everything they depend on.

Disk layout, readable with ls, less and cuobjdump::

    <directory>/<target>-nvrtc<version>-<options>/<kernel name>.<key>/
        unit.cu  kernel.cubin  meta.json

An entry is built in a temporary folder beside its place and renamed into it, so a reader sees all
of it or nothing, and of many processes that race one wins and the rest use its entry. A damaged
entry is rebuilt. Where the disk cannot be written, kernels stay in memory after one warning.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuattn.jit.compile import Compiled, CompileOptions, compile_unit, nvrtc_version
from cuattn.jit.source import Unit

#: Raise when the meaning of an entry changes.
SCHEMA = 1

#: Age of a temporary folder at which its process is gone: to build takes seconds.
_STALE_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel, and its folder where the disk holds it."""

    key: str
    compiled: Compiled
    folder: Path | None

    @contextmanager
    def cubin_path(self) -> Iterator[Path]:
        """A file that holds the cubin, at least as long as the context."""
        if self.folder is not None and (self.folder / "kernel.cubin").is_file():
            yield self.folder / "kernel.cubin"
            return
        handle, name = tempfile.mkstemp(prefix="cuattn-", suffix=".cubin")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(self.compiled.cubin)
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)


@dataclass(slots=True)
class Stats:
    """What the cache did in this process."""

    compiles: int = 0
    disk_hits: int = 0
    memory_hits: int = 0


def cache_key(unit: Unit, options: CompileOptions, nvrtc: tuple[int, int]) -> str:
    """The digest of everything that an entry depends on."""
    digest = hashlib.sha256()
    parts = [str(SCHEMA), str(nvrtc), *options.flags(), unit.name, unit.text]
    for path in sorted(unit.headers):
        parts += [path, unit.headers[path]]
    for part in parts:
        data = part.encode()
        digest.update(b"%d:" % len(data))  # why: the border between two parts counts too
        digest.update(data)
    return digest.hexdigest()


def default_directory() -> Path | None:
    """CUATTN_CACHE_DIR, else the user's cache folder; None where there is no home."""
    if chosen := os.environ.get("CUATTN_CACHE_DIR"):
        try:
            return Path(chosen).expanduser()
        except RuntimeError:
            return Path(chosen)  # ~somebody who has no home here
    variable = "LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME"
    if base := os.environ.get(variable):
        return Path(base) / "cuattn"
    try:
        return Path.home() / ".cache" / "cuattn"
    except RuntimeError:
        return None


class KernelCache:
    """Compiles each variant at most once per process, and once per disk.

    Parameters
    ----------
    directory : Path or None
        Where entries live; created when first needed. None keeps everything in memory.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.stats = Stats()
        self._entries: dict[str, Entry] = {}
        # invariant: a lock belongs to one process; a child of fork never sees one that is held
        self._locks: dict[tuple[int, str], threading.Lock] = {}
        self._warned = False

    def _count(self, what: str) -> None:
        with self._locks.setdefault((os.getpid(), what), threading.Lock()):
            setattr(self.stats, what, getattr(self.stats, what) + 1)

    def get(self, unit: Unit, options: CompileOptions) -> Entry:
        """The compiled unit: from memory, from disk, or built now.

        Raises
        ------
        CompileError
            NVRTC is missing or refuses the unit. Trouble with the disk is a warning.
        """
        nvrtc = nvrtc_version()
        key = cache_key(unit, options, nvrtc)
        entry = self._entries.get(key)
        if entry is not None:
            self._count("memory_hits")
            return entry
        with self._locks.setdefault((os.getpid(), key), threading.Lock()):
            entry = self._entries.get(key)
            if entry is None:
                folder = self._folder(unit, options, nvrtc, key)
                entry = _read(folder, key)
                if entry is not None:
                    self._count("disk_hits")
                else:
                    entry = self._build(unit, options, folder, key)
                self._entries[key] = entry
        return entry

    def rebuild(self, unit: Unit, options: CompileOptions) -> Entry:
        """Drop what is kept for a unit, for an entry that the driver refuses, and build it anew."""
        nvrtc = nvrtc_version()
        key = cache_key(unit, options, nvrtc)
        with self._locks.setdefault((os.getpid(), key), threading.Lock()):
            folder = self._folder(unit, options, nvrtc, key)
            if folder is not None:
                _discard(folder)
            entry = self._build(unit, options, folder, key)
            self._entries[key] = entry
        return entry

    def _folder(
        self, unit: Unit, options: CompileOptions, nvrtc: tuple[int, int], key: str
    ) -> Path | None:
        if self.directory is None:
            return None
        flags = hashlib.sha256(f"{SCHEMA} {options.flags()}".encode()).hexdigest()[:8]
        group = f"{options.arch}-nvrtc{nvrtc[0]}.{nvrtc[1]}-{flags}"
        return self.directory / group / f"{unit.name}.{key[:16]}"

    def _build(self, unit: Unit, options: CompileOptions, folder: Path | None, key: str) -> Entry:
        self._count("compiles")
        compiled = compile_unit(unit, options)
        entry = Entry(key, compiled, None)
        if folder is None:
            return entry
        try:
            return _publish(folder, unit, options, entry)
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the kernel cache {self.directory} cannot be written ({error}); kernels are "
                    "compiled again in every process; set CUATTN_CACHE_DIR to a writable folder",
                    RuntimeWarning,
                    stacklevel=2,
                )
            return entry


def _read(folder: Path | None, key: str) -> Entry | None:
    """The entry of a folder, or None where it is absent or damaged."""
    if folder is None:
        return None
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        cubin = (folder / "kernel.cubin").read_bytes()
        if meta["key"] != key or meta["cubin_sha256"] != hashlib.sha256(cubin).hexdigest():
            return None
        return Entry(key, Compiled(cubin=cubin, **meta["report"]), folder)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _publish(folder: Path, unit: Unit, options: CompileOptions, entry: Entry) -> Entry:
    """Put an entry in its place; where another process was faster, return that one's."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        (building / "unit.cu").write_text(unit.text, encoding="utf-8")
        (building / "kernel.cubin").write_bytes(entry.compiled.cubin)
        meta = json.dumps(_meta(unit, options, entry), indent=1)
        (building / "meta.json").write_text(meta, encoding="utf-8")
        building.chmod(0o755)  # why: mkdtemp makes it private, a shared cache is read by others
        trouble: OSError | None = None
        for _ in range(8):
            try:
                building.rename(folder)
            except OSError as error:
                # why no test of the error: what a taken name raises differs by system. And the
                # folder may be gone by now, for others discard damaged entries too: try again.
                trouble = error
                winner = _read(folder, entry.key)
                if winner is not None:
                    return winner
                if folder.exists():
                    _discard(folder)
            else:
                return Entry(entry.key, entry.compiled, folder)
        raise OSError(f"{folder} cannot be put in place") from trouble
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _sweep(group: Path) -> None:
    """Delete what processes that were killed left behind, once nobody can be at work in it."""
    with suppress(OSError):
        for folder in group.glob(".*-*"):
            with suppress(OSError):
                if time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)


def _discard(folder: Path) -> None:
    """Take an entry away in one step, so that no reader sees half of it, then delete it."""
    with suppress(OSError):
        grave = Path(tempfile.mkdtemp(prefix=".discarded-", dir=folder.parent))
        with suppress(OSError):
            folder.rename(grave / folder.name)
        shutil.rmtree(grave, ignore_errors=True)


def _meta(unit: Unit, options: CompileOptions, entry: Entry) -> dict[str, Any]:
    report = asdict(entry.compiled)
    cubin = report.pop("cubin")
    return {
        "name": unit.name,
        "key": entry.key,
        "flags": options.flags(),
        "cubin_sha256": hashlib.sha256(cubin).hexdigest(),
        "cubin_bytes": len(cubin),
        "report": report,
    }


@cache
def _cache_in(directory: Path | None) -> KernelCache:
    return KernelCache(directory)


def default_cache() -> KernelCache:
    """Return this process' cache for the folder that the environment names now."""
    return _cache_in(default_directory())


def build(
    units: Iterable[Unit], options: CompileOptions, jobs: int | None = None
) -> Iterator[tuple[Unit, Entry, float]]:
    """Build what the default cache lacks and give every unit as it is ready, with the seconds.

    NVRTC works without the interpreter's lock and may be called from threads: a core for each unit.

    Raises
    ------
    CompileError
        NVRTC is missing or refuses a unit; units that wait are given up.
    """
    cache = default_cache()

    def one(unit: Unit) -> tuple[Unit, Entry, float]:
        begin = time.perf_counter()
        entry = cache.get(unit, options)
        return unit, entry, time.perf_counter() - begin

    pool = ThreadPoolExecutor(jobs or os.cpu_count())
    waiting = []
    try:
        for unit in units:
            try:
                waiting.append(pool.submit(one, unit))
            except RuntimeError:  # the interpreter is shutting down and takes no more work
                yield one(unit)
        for done in as_completed(waiting):
            yield done.result()
    finally:
        pool.shutdown(cancel_futures=True)
