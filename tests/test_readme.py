"""The README is true: its Python runs, its files exist, its commands are the ones that CI runs."""

import re
from pathlib import Path

import needs
import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("source", BLOCKS, ids=[f"block{i}" for i in range(1, len(BLOCKS) + 1)])
def test_every_python_block_runs_on_its_own(source):
    for library in re.findall(r"^import (torch|jax)$", source, re.MULTILINE):
        needs.library(library)
    if "cuattn.kernels(" in source:
        needs.nvrtc()
    exec(compile(source, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_examples():
    assert len(BLOCKS) >= 3


def test_the_test_command_is_what_ci_runs():
    assert "\nbash .ci/run\n" in README
    assert (ROOT / ".ci" / "run").is_file()


def test_every_file_that_it_names_exists():
    named = re.findall(r"`((?:cuattn|kernels_cu|tests|examples|\.ci|\.github)/[\w./*-]*)`", README)
    assert named
    missing = [name for name in named if not list(ROOT.glob(name.rstrip("/")))]
    assert not missing


def test_every_link_within_the_project_leads_somewhere():
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert not [link for link in links if not (ROOT / link).exists()]
