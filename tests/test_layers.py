"""Imports and includes point downwards only: the tables below are the picture of the project."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: What each part of the package may import of it, lowest first.
IMPORTS = {
    "errors": (),
    "_typing": (),
    "_foreign": ("errors", "_typing"),
    "_arrays": ("errors", "_typing", "_foreign"),
    "abi": ("errors",),
    "states": ("errors", "_typing", "_foreign", "_arrays"),
    "planning": ("errors", "_typing", "_foreign", "_arrays", "abi"),
    "jit": ("errors", "abi"),
    "cpu": ("errors", "_typing", "states", "planning"),
    "execute": ("errors", "_typing", "_arrays", "abi", "planning", "jit", "cpu"),
    "residuals": ("errors", "_typing", "_foreign", "_arrays", "planning"),
    "attention": ("errors", "_typing", "_foreign", "_arrays", "planning", "execute", "residuals"),
    "precompile": ("abi", "planning", "jit", "execute"),
    "explain": (
        *("errors", "_typing", "_foreign", "_arrays", "planning"),
        *("cpu", "execute", "attention", "precompile"),
    ),
    "executable": (
        *("errors", "_typing", "_foreign", "_arrays", "planning"),
        *("execute", "residuals", "attention"),
    ),
    "embed": (
        *("errors", "_typing", "_foreign", "_arrays", "abi", "planning", "jit"),
        *("execute", "attention", "precompile"),
    ),
    "__init__": (
        *("errors", "states", "residuals", "attention", "explain"),
        *("executable", "embed"),
    ),
}
#: The tools, each on top of everything before it.
for tool in ("check", "bench", "__main__"):
    IMPORTS[tool] = tuple(IMPORTS)

#: What a header of each folder may include; softmax knows no tile, so no architecture.
INCLUDES = {
    "base": (),
    "ptx": ("base",),
    "tile": ("base", "ptx"),
    "softmax": ("base", "ptx"),
    "mainloop": ("base", "ptx", "tile", "softmax"),
    "kernel": ("base", "ptx", "tile", "softmax", "mainloop"),
}

MODULES = sorted((ROOT / "cuattn").rglob("*.py"))
HEADERS = sorted((ROOT / "kernels_cu").rglob("*.cuh"))


def name_of(path):
    """The dotted name of a module's file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def part_of(module):
    """The key of IMPORTS that a module belongs to."""
    return module.split(".")[1] if "." in module else "__init__"


def imported(path):
    """The modules of the package that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            members = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in NAMES else node.module for name in members]
        else:
            continue
        yield from (name for name in found if name.split(".")[0] == "cuattn")


def included(path):
    """What stands behind every ``#include`` of a header, with its quotes."""
    text = path.read_text(encoding="utf-8")
    return re.findall(r"^[ \t]*#[ \t]*include[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)


def is_one_way(table):
    order = list(table)
    return all(order.index(low) < order.index(part) for part in table for low in table[part])


def test_both_tables_are_one_way():
    assert is_one_way(IMPORTS)
    assert is_one_way(INCLUDES)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_lower_layers_only(path):
    part = part_of(name_of(path))
    for name in imported(path):
        assert part_of(name) in {part, *IMPORTS[part]}, f"{name_of(path)} imports {name}"


def test_no_module_imports_itself_through_others():
    graph = {name_of(path): set(imported(path)) for path in MODULES}
    tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", HEADERS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_header_includes_lower_layers_only(path):
    layer = path.parent.name
    for name in included(path):
        below = re.fullmatch(r'"(\w+)/\w+\.cuh"', name)
        assert below, f"{path.name} includes {name}: only headers of kernels_cu, with quotes"
        assert below[1] in {layer, *INCLUDES[layer]}, f"{layer}/{path.name} includes {name}"


def test_no_header_includes_itself_through_others():
    graph = {
        path.relative_to(ROOT / "kernels_cu").as_posix(): {
            name.strip('"') for name in included(path)
        }
        for path in HEADERS
    }
    tuple(graphlib.TopologicalSorter(graph).static_order())


def test_every_header_is_in_a_layer():
    assert {path.parent.relative_to(ROOT / "kernels_cu").as_posix() for path in HEADERS} <= set(
        INCLUDES
    )


def layers_with(pattern):
    """The layers whose code, without comments, has a match."""
    texts = {path: re.sub(r"//[^\n]*", "", path.read_text(encoding="utf-8")) for path in HEADERS}
    return {path.parent.name for path, text in texts.items() if re.search(pattern, text)}


def test_inline_ptx_lives_in_ptx_only():
    assert layers_with(r"\b(asm|__asm__)\b[\s(]") <= {"ptx"}


def test_intrinsics_live_in_ptx_only():
    """What the emulator must replace; builtins are the host compiler's too."""
    assert layers_with(r"\b__(?!builtin_|align__|INTADDR__)\w+\(") <= {"ptx"}


def test_shared_memory_is_dynamic():
    """The emulator has one array for it, which every kernel declares by the same name."""
    declared = r"extern __shared__ __align__\(\d+\) unsigned char shared\[\]"
    assert layers_with("__shared__") == layers_with(declared) == {"kernel"}
    assert not layers_with(r"(?<!extern )__shared__")


def test_importing_cuattn_imports_no_framework():
    program = "import sys, cuattn; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert not {"cupy", "cupyx", "cupy_backends", "torch", "jax"} & set(run.stdout.split())
