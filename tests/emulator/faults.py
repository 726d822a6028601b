"""Faults made mechanically from the kernels' sources, to see that the emulated tests catch them.

    PYTHONPATH=.:tests python -m emulator.faults --write          # the list, faults.txt
    PYTHONPATH=.:tests python -m emulator.faults --draw           # breaks, builds, runs: drawn.txt

A fault is one place of one line, changed by one rule. Layers base and ptx have none: the emulator
has its own instructions, whose tests are in test_instructions.py.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cuattn.jit.source import kernels_dir

HERE = Path(__file__).parent
LIST, DRAWN = HERE / "faults.txt", HERE / "drawn.txt"
LAYERS = ("tile", "softmax", "mainloop", "kernel")

#: How many are drawn that compile, by which seed.
COUNT, SEED = 40, 0

SURVIVED = "SURVIVED"

#: Seconds after which a problem counts as one that does not end; its kernels are built meanwhile.
TIMEOUT = 90

#: An argument without commas and brackets, and an expression in a call's brackets.
_ARG = r"[^,()]+(?:\([^()]*\))?[^,()]*"

#: What is changed, by name: a pattern, and what takes its place (None: nothing does).
RULES: dict[str, tuple[tuple[str, str], ...]] = {
    # A barrier is missing.
    "barrier": (
        (r"ptx::sync_(?:cta|warp)\(\);", ";"),
        (r"ptx::sync_named\(.*\);", ";"),
        (r"ptx::sync_cta_or\(", "("),
    ),
    # A wait is for one group too few, or a group is never closed.
    "wait": (
        (r"(ptx::async_wait<)0(>)", r"\g<1>1\2"),
        (r"(ptx::async_wait<)1(>)", r"\g<1>2\2"),
        (r"ptx::async_commit\(\);", ";"),
    ),
    # A bound is off by one, or the other one.
    "bound": (
        (r" < ", " <= "),
        (r" <= ", " < "),
        (r" > ", " >= "),
        (r" >= ", " > "),
        (r"(?<![\w:])min\(", "max("),
        (r"(?<![\w:])max\(", "min("),
    ),
    # Two indices have changed places.
    "indices": (
        (rf"(\.\w*(?:at|quad|pair|read|read_transposed)\()({_ARG}), ({_ARG})\)", r"\1\3, \2)"),
    ),
    # Something is not brought to a common scale.
    "rescale": (
        (r"[\w.\[\](), ]+ \*= [^;]+;", ";"),
        (r" \* (?:weight|inverse|scale|units\.scale)\b", ""),
    ),
    # An edge of the mask, or of a range, is off by one.
    "edge": (
        (r" \+ 1\b", ""),
        (r" - 1\b", ""),
        (r"\bupper\b(?! *[(;,])", "(upper - 1)"),
        (r"\blower\b(?! *[(;,])", "(lower + 1)"),
    ),
    # A lane, row, column or step is another.
    "fragment": (
        (r" ([*/%]) (2|4|8|16|32)\b", r" \1 (2 * \2)"),
        (r" \+ (4|8|16)\b", r" + (\1 / 2)"),
        (r"\^ 1\b", "^ 0"),
        (r"shuffle_xor\((\w+), (\d+)\)", r"shuffle_xor(\1, 3 - \2)"),
    ),
    # A condition is weaker or stronger.
    "condition": ((r" && ", " || "), (r" \|\| ", " && ")),
}

#: Lines that are no statement of a kernel.
_NO_CODE = re.compile(r"^\s*(//|#|static_assert|template|using|namespace|\}  //)")


@dataclass(frozen=True)
class Fault:
    """One change of one line; ``line`` counts from 1."""

    rule: str
    path: str
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.rule}\t{self.path}:{self.line}\t{self.before.strip()}\t{self.after.strip()}"

    def apply(self, root: Path) -> None:
        """Make the change in the sources below a folder."""
        path = root / self.path
        lines = path.read_text(encoding="utf-8").split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        path.write_text("\n".join(lines), encoding="utf-8")


def all_faults() -> Iterator[Fault]:
    """Every fault of the sources as they are, in their order."""
    root = kernels_dir()
    for path in sorted(path for layer in LAYERS for path in (root / layer).glob("*.cuh")):
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if not _NO_CODE.match(line):
                for rule, after in _changed(line):
                    yield Fault(rule, name, number, line, after)


def _changed(line: str) -> Iterator[tuple[str, str]]:
    code, slashes, comment = line.partition("  //")
    seen = {line}
    for rule, changes in RULES.items():
        for pattern, replacement in changes:
            for match in re.finditer(pattern, code):
                after = code[: match.start()] + match.expand(replacement) + code[match.end() :]
                after += slashes + comment
                if after not in seen:
                    seen.add(after)
                    yield rule, after


def check(fault: Fault | None) -> None:
    """Run what has the fault, or without one everything; raises what shows it.

    That is every small problem whose kernels include its file, and of the schedule the test that
    walks its tiles.

    Raises
    ------
    AssertionError, EmulationError
        The fault is caught.
    """
    import calls
    import test_schedule
    from engines import CUDA_ENGINES, family_of
    from small_problems import PROBLEMS
    from tiles import RANKS

    from emulator import device
    from emulator.engine import EmulatedEngine
    from emulator.launch import settings

    with tempfile.TemporaryDirectory() as place:
        root = Path(place) / "kernels_cu"
        shutil.copytree(kernels_dir(), root)
        if fault is not None:
            fault.apply(root)
        settings.root = root
        if fault is None or fault.path == "softmax/schedule.cuh":
            test_schedule.test_kernels_walk_the_same_tiles()
        for rank in reversed(RANKS):
            for name in CUDA_ENGINES:
                with device.emulated(), family_of(name) as family:
                    engine = EmulatedEngine(family)
                    for problem in PROBLEMS:
                        if problem.dtype in family.dtypes and _meets(fault, problem, engine, rank):
                            signal.alarm(TIMEOUT)  # ends the process
                            with engine.tile(rank), engine.order(rank):
                                calls.check_forward(engine, problem)
                                calls.check_without_lse(engine, problem)
                                calls.check_backward(engine, problem)
                                calls.check_backward(engine, problem, deterministic=True)


_done: set[object] = set()


def _meets(fault: Fault | None, problem, engine, rank: int) -> bool:
    """Whether the problem launches a kernel with the fault's file that ran on nothing like it."""
    if fault is None:
        return True
    from cuattn import execute
    from cuattn.attention import prepare
    from cuattn.explain import both_passes
    from cuattn.planning.options import Options
    from cuattn.planning.select import plan_for
    from emulator.device import DEVICE

    kernels = set()
    with engine.tile(rank):
        for deterministic in (None, True):
            options = Options(**problem.options, deterministic=deterministic)
            for asked in both_passes(prepare(*problem.arrays(), None, options)):
                kernels |= {launch.kernel for launch in plan_for(asked, DEVICE).launches}
    mine = {spec for spec in kernels if fault.path in execute.unit_of(spec).headers}
    key = problem, frozenset(mine)
    is_new = bool(mine) and key not in _done
    _done.add(key)
    return is_new


def verdict(number: int | None) -> str:
    """How the fault of this number fares, or what has none, in a process of its own."""
    asked = "none" if number is None else str(number)
    command = (sys.executable, "-m", "emulator.faults", "--check", asked)
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    env = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode == 0:
        return SURVIVED
    if done.returncode < 0:
        return f"caught: {signal.Signals(-done.returncode).name}"
    found = re.findall(r"^(?:[\w.]+\.)?(\w*Error)\b(.*)", done.stderr, re.MULTILINE)
    error, says = found[-1] if found else ("", "")
    if error == "BuildError":
        return "no fault: does not compile"
    if error not in {"AssertionError", "EmulationError"}:  # the search itself is broken
        raise RuntimeError(done.stderr)
    return f"caught: {error}{says}"[:200].rstrip(" :")


def named(faults: Iterable[Fault]) -> dict[str, int]:
    """Their numbers by names that stay when other lines change, in the order the seed draws."""
    names: dict[str, int] = {}
    count: Counter[str] = Counter()
    for number, fault in enumerate(faults):
        name = "\t".join((fault.rule, fault.path, fault.before.strip(), fault.after.strip()))
        count[name] += 1  # the same line stands twice in a file
        names[f"{name}\t{count[name]}"] = number
    digest = {name: hashlib.sha256(f"{SEED}\t{name}".encode()).digest() for name in names}
    return {name: names[name] for name in sorted(names, key=digest.__getitem__)}


def known() -> dict[str, str]:
    """The verdicts of drawn.txt by the faults' names."""
    lines = DRAWN.read_text(encoding="utf-8").splitlines() if DRAWN.exists() else []
    return dict(line.rsplit("\t", 1) for line in lines)


def is_fault(says: str) -> bool:
    """Whether a verdict is of a change that compiles."""
    return not says.startswith("no fault")


def draw() -> None:
    """Write the verdicts of the drawn faults; those that drawn.txt has already are kept.

    Raises
    ------
    RuntimeError
        A problem fails without a fault, so that none would show.
    """
    says = verdict(None)
    if says != SURVIVED:
        raise RuntimeError(f"without a fault: {says}")
    numbers, verdicts = named(all_faults()), known()
    waiting, taken = list(numbers), []

    def keep() -> None:
        lines = [f"{name}\t{verdicts[name]}\n" for name in taken if name in verdicts]
        DRAWN.write_text("".join(lines), encoding="utf-8")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        while (missing := COUNT - sum(is_fault(verdicts[name]) for name in taken)) and waiting:
            some, waiting = waiting[:missing], waiting[missing:]
            taken += some
            new = [name for name in some if name not in verdicts]
            for name, says in zip(new, pool.map(verdict, map(numbers.get, new)), strict=True):
                verdicts[name] = says
                keep()
            keep()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write the list anew")
    parser.add_argument("--draw", action="store_true", help="try the drawn ones without a verdict")
    parser.add_argument(
        "--check", metavar="NUMBER", help="try one (or none), and raise what shows it"
    )
    options = parser.parse_args()
    if options.write:
        LIST.write_text("\n".join(map(str, all_faults())) + "\n", encoding="utf-8")
    if options.check is not None:
        is_none = options.check == "none"
        check(None if is_none else list(all_faults())[int(options.check)])
    if options.draw:
        draw()


if __name__ == "__main__":
    main()
