"""The benchmarks measure what they say: peers in turn, every pass, the right bytes."""

import json

import numpy as np
import pytest
from compare import assert_backward, assert_forward
from host_cupy import HostCupy

import cuattn
from cuattn.bench import first_call, float32, report, timing
from cuattn.bench.baselines import Formula
from cuattn.bench.host_time import measure, no_engine
from cuattn.bench.workloads import normal
from cuattn.planning.problem import Band


def test_functions_take_turns_and_medians_are_of_one_call():
    order = []
    medians = timing.medians(
        lambda: order.append("a"),
        lambda: order.append("b"),
        calls=2,
        repeats=3,
        between=lambda: order.append("|"),
    )
    assert "".join(order) == "aa|bb|" * 4  # the first round is not counted
    assert len(medians) == 2
    assert all(seconds > 0 for seconds in medians)


@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_that_is_timed_is_attention(causal):
    arrays = normal(np, 4, (1, 2, 16, 8), "float32")
    formula = Formula(np, *arrays, causal=causal)
    meaning = {"band": Band(-16, 0 if causal else 16), "softmax_scale": 8**-0.5}
    q, k, v, dout, out = (array.swapaxes(1, 2) for array in (*arrays, formula.forward()))
    assert_forward(out, formula.lse[..., 0], q, k, v, **meaning)
    for backward in (formula.backward_stored, formula.backward_again, formula.both):
        gradients = tuple(array.swapaxes(1, 2) for array in backward())
        assert_backward(gradients, q, k, v, out, dout, None, **meaning)


def test_the_float32_bench_compares_every_pass_of_every_peer(monkeypatch):
    monkeypatch.setattr(float32, "SHAPE", (1, 2, 16, 8))
    rows = list(float32.compare(HostCupy(), "float64", causal=True))
    passes = {name: [row["peer"] for row in rows if row["pass"] == name] for name in float32.PASSES}
    assert passes["forward"][:2] == ["cuattn", "formula"]
    assert passes["backward"][:3] == ["cuattn", "formula", "formula, P again"]
    assert passes["both"][:2] == ["cuattn", "formula"]
    flops = 4 * 8 * (16 * 17 // 2) * 2
    seconds = 2e-3 / timing.CALLS
    assert [row["tflops"] for row in rows][:1] == [flops / seconds / 1e12]
    assert all(row["ratio_to_cuattn"] == 1 for row in rows)


def test_the_float32_bench_states_the_bytes_of_a_long_run(monkeypatch):
    monkeypatch.setattr(float32, "LONG_SHAPE", (1, 2, 64, 8))
    row = float32.run_long(HostCupy(), "float32")
    elements = 2 * 64 * 8
    assert row["input_bytes"] == 4 * 4 * elements
    assert row["output_bytes"] == 4 * (4 * elements + 2 * 64)
    assert row["extra_bytes"] == -row["output_bytes"]  # this pool does not grow
    assert row["score_matrix_bytes"] == 4 * 2 * 64 * 64


@pytest.mark.gpu
def test_a_first_call_is_timed_in_its_own_process(tmp_path):
    arguments = "float16", "forward+backward", "128", "64"
    cold, warm = (first_call.in_fresh_process(str(tmp_path), *arguments) for _ in range(2))
    assert cold > 0
    assert warm > 0
    assert len(list(tmp_path.glob("*/*/kernel.cubin"))) == 2  # one tile holds all keys


@pytest.mark.gpu
def test_host_time_of_a_device_has_a_launch(monkeypatch):
    import cupy

    monkeypatch.setattr("cuattn.bench.host_time.REPEATS", 1)
    assert all({"total", "launch", "device"} <= row.keys() for row in measure(cupy, "float32"))


def test_host_time_has_parts(monkeypatch):
    monkeypatch.setattr("cuattn.bench.host_time.REPEATS", 1)
    rows = measure(np, "float32")
    assert [row["pass"] for row in rows] == ["forward", "backward", "forward+backward"]
    assert all(row.keys() == {"dtype", "seqlen", "pass", "allocation", "own"} for row in rows)


def test_without_an_engine_nothing_is_computed():
    q = np.full((1, 4, 1, 2), np.nan)
    out = np.zeros_like(q)
    with no_engine():
        cuattn.attention(q, q, q, out=out)
    assert not out.any()
    cuattn.attention(q, q, q, out=out)
    assert np.isnan(out).all()


def test_a_report_names_versions_and_sources_only(tmp_path):
    path = tmp_path / "numbers.json"
    report.write(path, [{"pass": "forward"}])
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["rows"] == [{"pass": "forward"}]
    allowed = {"cuattn", "python", "numpy", "cupy", "nvrtc", "cuda_driver", "device"}
    assert data["circumstances"].keys() <= allowed | {"sources_sha256"}
    assert data["circumstances"]["sources_sha256"] == report.sources_digest()
