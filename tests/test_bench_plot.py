"""What the benchmark of 16-bit attention ends in: its summary, its reports, its pictures."""

import itertools
import json
import sys

import numpy as np
import pytest

from cuattn.__main__ import main
from cuattn.bench import half, plot, report, workloads


def synthetic_rows():
    """The grid without its last cells of the formula, and the memory of three peers."""
    rows = []
    speeds = {"cuattn": 600, "fa4": 500, "cudnn": 610, "formula": 60}
    for cell, name in itertools.product(workloads.grid("bfloat16"), workloads.PASSES):
        for peer, tflops in speeds.items():
            if (peer, cell.seqlen_q) != ("formula", 16384):
                speed = {"tflops": tflops, "ratio_to_cuattn": speeds["cuattn"] / tflops}
                rows.append({"kind": "speed", **cell.facts(), "pass": name, "peer": peer, **speed})
    for long, name in itertools.product(
        workloads.long("bfloat16"), ("forward", "forward+backward")
    ):
        for peer, count in {"cuattn": 0, "fa4": 64 * long.seqlen_q, "formula": 1}.items():
            sizes = {
                "extra_bytes": count if peer != "formula" else 6 * long.num_scores,
                "score_matrix_bytes": 4 * long.num_scores,
            }
            rows.append({"kind": "memory", **long.facts(), "pass": name, "peer": peer, **sizes})
    return rows


def test_the_summary_has_geometric_means_and_the_least_with_its_cell():
    rows = [row for row in synthetic_rows() if row["pass"] == "forward"]
    for row in rows:
        if row["peer"] == "fa4" and (row["head_dim"], row["seqlen_q"]) == (64, 512):
            row["ratio_to_cuattn"] = {"full": 0.8, "causal": 0.2}[row["mask"]]
    found = {row["peer"]: row for row in half.summary(rows)}
    assert list(found) == ["best", "fa4", "cudnn", "formula"]
    assert found["fa4"]["cells"] == found["best"]["cells"] == 36
    assert found["formula"]["cells"] == 30
    assert found["fa4"]["mean"] == pytest.approx((1.2**34 * 0.8 * 0.2) ** (1 / 36))
    assert found["fa4"]["least"] == found["best"]["least"] == 0.2
    assert found["fa4"]["least_at"] == {"head_dim": 64, "mask": "causal", "seqlen": 512}
    assert found["cudnn"]["mean"] == pytest.approx(600 / 610)
    assert found["best"]["mean"] == pytest.approx(((600 / 610) ** 34 * 0.8 * 0.2) ** (1 / 36))


def write_report(path, rows, **circumstances):
    report.write(path, rows, peers={"cuattn": "1"}, missing={})
    data = json.loads(path.read_text(encoding="utf-8"))
    data["circumstances"] |= circumstances
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_reports_of_one_device_and_source_are_read_as_one(tmp_path):
    rows = synthetic_rows()
    one = write_report(tmp_path / "one.json", rows[:100], device="A")
    two = write_report(tmp_path / "two.json", rows[90:], device="A")
    data = half._read([one, two])
    assert data["rows"] == rows
    assert data["summary"] == half.summary(rows)
    assert data["peers"] == {"cuattn": "1"}
    write_report(two, rows[100:], device="B")
    with pytest.raises(SystemExit, match=r"two\.json: device is B, that of .*one\.json is A"):
        half._read([one, two])
    write_report(two, [row | {"dtype": "float16"} for row in rows], device="A")
    with pytest.raises(SystemExit, match="more than one dtype"):
        half._read([one, two])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "cannot be read"),
        ("{", "cannot be read"),
        ("[]", "no report of a benchmark"),
        ('{"circumstances": {}, "rows": [{"pass": "forward"}]}', "a report of another benchmark"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path, text, why):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit, match=f"x.json: {why}"):
        half._read([path])


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_speed_and_memory_are_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    data = {"circumstances": {"device": "A Device"}, "rows": synthetic_rows()}
    files = plot.draw(data, tmp_path / f"a{suffix}")
    assert files == [tmp_path / f"a{suffix}", tmp_path / f"a_memory{suffix}"]
    speed, memory = (file.read_bytes() for file in files)
    starts = {".png": b"\x89PNG", ".svg": b"<?xml"}
    assert speed.startswith(starts[suffix])
    assert memory.startswith(starts[suffix])
    assert files == plot.draw(data, tmp_path / f"a{suffix}")
    assert (speed, memory) == tuple(file.read_bytes() for file in files)  # the same bytes again
    if suffix == ".svg":
        speed, memory = (text.decode() for text in (speed, memory))
        for label in ("cuattn", "FA4", "cuDNN", "N x N formula"):
            assert speed.count(f">{label}</text>") == 12
        for head_dim, name in itertools.product((64, 128, 256), workloads.PASSES):
            assert f">{name}, causal, head_dim {head_dim}</text>" in speed
        assert "FA3" not in speed
        assert memory.count(">cuattn, 0</text>") == memory.count(">float32 scores</text>") == 2
        assert "A Device" in speed
        assert "A Device" in memory


def test_only_what_was_measured_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row for row in synthetic_rows() if row["kind"] == "speed" and row["seqlen_q"] == 512]
    assert plot.draw({"circumstances": {}, "rows": rows}, tmp_path / "a.png") == [
        tmp_path / "a.png"
    ]
    left_out = {"kind": "left out", **workloads.few_queries("float16").facts()}
    with pytest.raises(SystemExit, match="nothing to draw"):
        plot.draw({"circumstances": {}, "rows": [left_out]}, tmp_path / "b.png")


def test_without_matplotlib_the_extra_is_named_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("cuattn.bench.half.cupy_with_device", lambda: None)
    with pytest.raises(SystemExit, match=r'pip install "cuattn\[plot\]"'):
        main(["bench", "--plot", str(tmp_path / "a.png")])


def test_labels_are_spread_and_keep_their_order():
    assert plot.spread([5.0, 1.0, 3.0], 1.0) == [5.0, 1.0, 3.0]
    assert plot.spread([2.0, 2.0], 1.0) == [1.5, 2.5]
    values = np.random.default_rng(0).uniform(0, 3, 7).tolist()
    places = plot.spread(values, 0.5)
    assert np.argsort(places).tolist() == np.argsort(values).tolist()
    assert np.diff(sorted(places)).min() > 0.5 - 1e-9
    assert plot.spread([], 1.0) == []


def test_sizes_read_well():
    assert [plot._bytes(1 << power) for power in (4, 10, 24, 38)] == [
        "16 bytes",
        "1 KiB",
        "16 MiB",
        "256 GiB",
    ]
