"""What holds for every file of the project."""

import ast
import fnmatch
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP_LEVEL = {"cuattn", "kernels_cu", "tests", "examples", "pyproject.toml", "README.md", "LICENSE"}
#: What is part of the project under a name with a dot; the rest belongs to tools.
DOTTED = {".ci", ".clang-format", ".github", ".gitignore", ".pre-commit-config.yaml"}
MAX_LINES = 400
#: A file that is longer has its reason here.
LONGER: dict[str, str] = {}
GENERATED = {"tests/gpu_record.json", "tests/emulator/faults.txt", "tests/emulator/drawn.txt"}


def ignored(name):
    """Whether .gitignore names a file or folder."""
    lines = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    patterns = [line.strip("/") for line in lines if line and not line.startswith("#")]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def project_files():
    """Every text file that belongs to the project, as (path from the root, text)."""
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        of_a_tool = parts[0].startswith(".") and parts[0] not in DOTTED
        is_text = path.is_file() and path.suffix != ".png"
        if not is_text or of_a_tool or any(map(ignored, parts)):
            continue
        yield "/".join(parts), path.read_text(encoding="utf-8")


FILES = dict(project_files())
PYTHON = {name: ast.parse(text) for name, text in FILES.items() if name.endswith(".py")}


def test_the_top_level_holds_what_it_may():
    names = {path.name for path in ROOT.iterdir()}
    assert {name for name in names if not name.startswith(".") and not ignored(name)} == TOP_LEVEL


def test_no_file_is_too_long():
    lines = {name: text.count("\n") for name, text in FILES.items() if name not in GENERATED}
    assert {name for name, count in lines.items() if count > MAX_LINES} == set(LONGER)


def test_no_file_names_a_place_of_one_machine():
    place = re.compile(r"(?<![\w.~])/(home|root|Users|tmp|work|mnt|opt|var|usr(?!/bin/env))/\w")
    assert not {name for name, text in FILES.items() if place.search(text)}


def test_nothing_is_left_undone():
    mark = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X)\b|@@[A-Z]")
    assert not {name for name, text in FILES.items() if mark.search(text)}


def test_every_file_ends_with_one_newline():
    assert not {name for name, text in FILES.items() if text and text != text.rstrip("\n") + "\n"}


def test_the_licence_is_the_one_that_the_metadata_names():
    assert FILES["LICENSE"].startswith("MIT License")
    assert '\nlicense = "MIT"\n' in FILES["pyproject.toml"]


@pytest.mark.parametrize("name", [name for name in PYTHON if name.startswith("cuattn/")])
def test_every_public_function_has_a_docstring(name):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    public = [
        node
        for node in PYTHON[name].body
        if isinstance(node, kinds) and not node.name.startswith("_")
    ]
    assert all(map(ast.get_docstring, [PYTHON[name], *public]))


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.startswith("kernels_cu/") and name.endswith(".cuh")]
)
def test_every_header_says_its_layer(name):
    head, _, _ = FILES[name].partition("#pragma once")
    assert f"Layer: {name.split('/')[1]}" in head
