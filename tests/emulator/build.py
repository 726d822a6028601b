"""Compiles generated units with the host's C++20 compiler, unchanged, and keeps what it built."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from cuattn.jit.source import Unit, kernels_dir

HERE = Path(__file__).parent

#: Puts calls before plain accesses of memory, and where an index or a pointer is wrong.
CALLS = (
    "-fsanitize=thread",
    "-fsanitize=bounds-strict,alignment",
    "-fno-sanitize-recover=bounds-strict,alignment",
)

#: How a unit and the machine are compiled. In the first two machine/accesses.cpp answers these
#: calls, in the last one the sanitizers see everything.
MODES = {
    "checked": ("-O1", "-g1", *CALLS),
    "debug": ("-O0", "-g3", *CALLS),
    "sanitized": (
        "-O1",
        "-g1",
        "-fsanitize=address,undefined,bounds-strict",
        "-fno-sanitize-recover=all",
    ),
}

#: -ffp-contract: as NVRTC's --fmad; -Wno-unknown-pragmas: unroll is nvcc's.
FLAGS = (
    "-std=c++20",
    "-ffp-contract=fast",
    "-fPIC",
    "-fno-semantic-interposition",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
)

#: What to do where there is no compiler.
REMEDY = "install g++ 12 or newer (Debian: apt install g++), or name a compiler in CXX"

_ENTRY = """
template <class Params>
static void call(void (*kernel)(Params), const void* params) {{
  kernel(*static_cast<const Params*>(params));
}}
extern "C" void run(const void* params) {{ call({name}, params); }}
"""


class BuildError(Exception):
    """The compiler refused a unit."""


@functools.cache
def compiler() -> str | None:
    """A compiler whose C++20 suffices for the kernels; None where there is none."""
    probe = """
        #include <source_location>
        struct Config { int size; };
        template <Config C> constexpr int size = C.size + __builtin_bit_cast(int, 1.0f);
        int main() { return size<Config{1}> + std::source_location::current().line(); }
    """
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if os.name == "posix" and name and shutil.which(name):
            with tempfile.TemporaryDirectory() as place:
                source = Path(place) / "probe.cpp"
                source.write_text(probe, encoding="utf-8")
                command = (
                    name,
                    "-std=c++20",
                    "-c",
                    str(source),
                    "-o",
                    str(Path(place) / "probe.o"),
                )
                if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                    return name
    return None


def folder() -> Path:
    """Where built files are kept; they may be deleted at any time."""
    given = os.environ.get("CUATTN_EMULATOR_DIR")
    return Path(given) if given else Path.home() / ".cache" / "cuattn-emulator"


@functools.cache
def _identity() -> str:
    """What a built file depends on besides its sources."""
    version = subprocess.run((_required(), "--version"), capture_output=True, check=True).stdout
    return f"{version!r} {platform.machine()} {platform.node()}"


def _required() -> str:
    found = compiler()
    if found is None:
        raise BuildError(f"no C++20 compiler: {REMEDY}")
    return found


@functools.cache
def _instrument() -> str:
    """The text of all that builds: a change of any builds everything anew."""
    files = sorted(path for path in HERE.rglob("*") if path.suffix in {".h", ".cpp", ".cuh"})
    files.append(Path(__file__))
    return "\0".join(path.read_text(encoding="utf-8") for path in files)


def _native() -> tuple[str, ...]:
    # What is built stays on this machine; fma is a function call without it.
    return ("-mcpu=native",) if platform.machine() in {"aarch64", "arm64"} else ("-march=native",)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def _compile(target: Path, sources: list[Path], flags: tuple[str, ...], *libraries: Path) -> None:
    """One shared object; whoever finds it finds it whole."""
    compile_one = (_required(), *FLAGS, *_native(), *flags, "-c", "-o")
    objects = []
    for source in sources:
        objects.append(str(target.with_name(f"{source.stem}.{os.getpid()}.o")))
        _run(*compile_one, objects[-1], str(source))
    partial = str(target.with_suffix(f".{os.getpid()}"))
    # why without CALLS: they would bring the libraries for which accesses.cpp stands
    linked = [flag for flag in flags if flag.startswith("-fsanitize") and flag not in CALLS]
    _run(
        _required(),
        *linked,
        "-shared",
        "-Wl,-Bsymbolic",
        "-o",
        partial,
        *objects,
        *map(str, libraries),
    )
    for path in objects:
        Path(path).unlink()
    Path(partial).replace(target)


@contextlib.contextmanager
def _alone(path: Path):
    """Others wait that build the same."""
    import fcntl  # POSIX: where there is none, `compiler` finds none either

    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join((_identity(), _instrument(), *parts)).encode()).hexdigest()[:24]


@functools.cache
def machine(mode: str) -> Path:
    """The library that every kernel is linked with: threads, memory, instructions."""
    flags = tuple(flag for flag in MODES[mode] if flag not in CALLS)
    flags = ("-O2", *flags[1:]) if mode != "debug" else flags
    target = folder() / _digest(mode, *flags) / "libmachine.so"
    with _alone(target):
        if not target.exists():
            # The sanitizers have answers of their own to what accesses.cpp answers.
            sources = {HERE / "machine" / "accesses.cpp"} if mode == "sanitized" else set()
            sources = sorted({*(HERE / "machine").glob("*.cpp")} - sources)
            _compile(target, sources, (*flags, f"-I{HERE}"))
    return target


def build(unit: Unit, mode: str = "checked", root: Path | None = None) -> Path:
    """A unit as a shared object with a function ``run(const void* params)``: one thread of it.

    Parameters
    ----------
    unit : Unit
        What ``cuattn.jit.source`` generates.
    mode : str
        A key of ``MODES``.
    root : Path, optional
        The folder of the kernels' sources, where it is another than ``kernels_cu``.

    Raises
    ------
    BuildError
        The compiler is missing, or refuses the unit.
    """
    root = root or kernels_dir()
    flags = (*MODES[mode], f"-I{HERE / 'cuda'}", f"-I{HERE}")
    text = f'#include "cuda/language.h"\n#line 1 "{unit.name}"\n{unit.text}'
    text += _ENTRY.format(name=unit.name)
    # The headers' text and not their folder, which may hold others than the unit.
    headers = [(root / path).read_text(encoding="utf-8") for path in unit.headers]
    place = folder() / _digest(mode, *flags, text, *headers)
    target = place / f"{unit.name}.so"
    with _alone(target):
        if not target.exists():
            source = place / f"{unit.name}.cpp"
            source.write_text(text, encoding="utf-8")
            _compile(target, [source], (*flags, f"-I{root}"), machine(mode))
    return target
