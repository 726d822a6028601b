"""The record of the last run on a GPU is of these sources, complete, and without a failure."""

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import record

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def recorded():
    return json.loads(record.RECORD.read_text(encoding="utf-8"))


@pytest.mark.filterwarnings("default")
def test_digest_is_of_what_the_sources_launch(recorded):
    now = record.digest()
    pending = recorded.get("pending")
    if pending:
        # Only where no GPU could be had, and for one landing: {"digest", "reason", "date"}.
        assert pending["digest"] == now
        message = f"GPU record pending since {pending['date']}: {pending['reason']}"
        warnings.warn(message, UserWarning, stacklevel=1)
        return
    assert recorded["digest"] == now, (
        "kernels, options or plans changed since the last run on a GPU: run "
        "`pytest -m gpu --record-gpu=tests/gpu_record.json` there"
    )


def test_digest_sees_every_part_of_a_launch(monkeypatch):
    before = record.digest()
    make_unit = record.unit_of
    for change in ("text", "headers"):
        with monkeypatch.context() as patch:

            def changed(spec, change=change):
                unit = make_unit(spec)
                new = {"text": unit.text + " ", "headers": {**unit.headers, "more.cuh": ""}}
                return type(unit)(**{**vars(unit), change: new[change]})

            patch.setattr(record, "unit_of", changed)
            assert record.digest() != before
    parameters, plan_for, options = record.parameters, record.plan_for, record.CompileOptions

    def launches(change):
        def plan(asked, device):
            made = plan_for(asked, device)
            return replace(made, launches=tuple(map(change, made.launches)))

        return plan

    def more_shared_memory(launch):
        kernel = replace(launch.kernel, smem_bytes=launch.kernel.smem_bytes + 16)
        return replace(launch, kernel=kernel)

    for name, change in (
        ("parameters", lambda asked: parameters(asked) | {"softmax_scale": 2.0}),
        ("plan_for", launches(lambda launch: replace(launch, grid=launch.grid + 1))),
        ("plan_for", launches(more_shared_memory)),
        ("CompileOptions", partial(options, fmad=False)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(record, name, change)
            assert record.digest() != before


def test_every_gpu_test_is_in_the_record_and_passed(recorded):
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "tests"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    collected = {line for line in listing.splitlines() if "::" in line}
    assert len(collected) > 400
    outcomes = recorded["outcomes"]
    if "pending" not in recorded:
        assert collected - set(outcomes) == set(), "run them: pytest -m gpu --record-gpu=..."
    failed = {name for name in collected & set(outcomes) if outcomes[name] != "passed"}
    assert not failed
