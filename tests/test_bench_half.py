"""The benchmark of 16-bit attention: its grid, its peers, what it leaves out, what it draws."""

import argparse
import importlib
import itertools
import math
import sys
import warnings
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from compare import assert_backward, assert_forward
from host_cupy import POOL_BYTES, HostArray, HostCupy

from cuattn.bench import half, half_formula, peers, plot, timing, workloads
from cuattn.bench.peers import LackError, Ours, Peer
from cuattn.bench.workloads import Workload
from cuattn.jit.replay import AFTER_CALLS
from cuattn.planning.problem import Band

TINY = Workload("grid", 2, 24, 24, 2, 16, "causal", "bfloat16")


# workloads -------------------------------------------------------------------------------------


def test_the_grid_has_every_cell_with_as_many_tokens():
    cells = workloads.grid("float16")
    named = {(cell.head_dim, cell.mask, cell.seqlen_q) for cell in cells}
    lengths = (512, 1024, 2048, 4096, 8192, 16384)
    assert named == set(itertools.product((64, 128, 256), ("full", "causal"), lengths))
    assert len(cells) == 36
    for cell in cells:
        assert cell.batch * cell.seqlen_q == 16384
        assert cell.num_heads * cell.head_dim == 2048
        assert cell.seqlen_q == cell.seqlen_k
        assert (cell.passes, cell.dtype) == (("forward", "backward"), "float16")


def test_a_sequence_alone_has_the_hidden_size_of_the_grid():
    cells = workloads.alone("bfloat16", head_dims=(64,), masks=("full",))
    assert [(each.batch, each.seqlen_q, each.seqlen_k) for each in cells] == [
        (1, seqlen, seqlen) for seqlen in (256, 512, 1024, 2048, 4096)
    ]
    assert {each.num_heads * each.head_dim for each in cells} == {2048}


def test_flops_are_those_of_two_products_half_if_causal_and_of_five_in_a_backward():
    full, causal = (
        Workload("", 3, 100, 200, 5, 64, "full", "bfloat16"),
        Workload("", 3, 100, 100, 5, 64, "causal", "bfloat16"),
    )
    assert full.flops("forward") == 4 * 100 * 200 * 64 * 5 * 3
    assert causal.flops("forward") == 4 * (100 * 101 // 2) * 64 * 5 * 3
    assert causal.flops("backward") == 2.5 * causal.flops("forward")


def test_few_queries_and_one_long_sequence():
    few = workloads.few_queries("bfloat16")
    heads_and_dim = (few.batch, few.num_heads, few.head_dim)
    assert (*heads_and_dim, few.seqlen_q, few.seqlen_k) == (1, 16, 128, 128, 65536)
    assert (few.mask, few.passes, few.memory) == ("full", ("forward",), False)
    *shorter, longest = workloads.long("bfloat16")
    assert (longest.batch, longest.num_heads, longest.head_dim) == (1, 16, 128)
    assert (longest.seqlen_q, longest.mask) == (65536, "causal")
    assert longest.passes == ("forward", "backward")
    assert all(each.memory for each in (*shorter, longest))
    assert not any(each.passes for each in shorter)


def test_arrays_are_normal_and_the_same_every_time():
    workload = Workload("", 2, 50, 70, 3, 16, "full", "bfloat16")
    arrays, again = (workloads.normal_on_device(HostCupy(), workload) for _ in range(2))
    shapes = [array.shape for array in arrays]
    assert shapes == [(2, 50, 3, 16), (2, 70, 3, 16), (2, 70, 3, 16), (2, 50, 3, 16)]
    for array, other in zip(arrays, again, strict=True):
        assert array.dtype == "bfloat16"
        assert np.array_equal(array, other)
        values = array.astype(np.float64)
        assert abs(values.mean()) < 5 / math.sqrt(values.size)
        assert abs(values.var() - 1) < 5 * math.sqrt(2 / values.size)
    assert not np.array_equal(arrays[1], arrays[2])


def options(*words):
    parser = argparse.ArgumentParser()
    half.add_options(parser)
    return parser.parse_args(words)


def test_without_options_everything_is_measured():
    arguments = options()
    chosen = half.chosen_workloads(arguments)
    names = ["grid"] * 36 + ["alone"] * 30 + ["few-queries"] + ["long"] * 7
    assert [each.name for each in chosen] == names
    assert {each.dtype for each in chosen} == {"bfloat16"}
    assert arguments.rounds == timing.REPEATS
    assert ["cuattn", *arguments.peers] == list(peers.TITLES) == list(plot.STYLES)


def test_options_choose_cells_and_passes():
    words = "--workloads grid --head-dims 64 256 --masks causal --seqlens 512 --passes backward"
    chosen = half.chosen_workloads(options(*words.split(), "--dtype", "float16"))
    cells = [(each.head_dim, each.mask, each.seqlen_q, each.passes) for each in chosen]
    assert cells == [(64, "causal", 512, ("backward",)), (256, "causal", 512, ("backward",))]
    assert {each.dtype for each in chosen} == {"float16"}
    backward = half.chosen_workloads(options("--passes", "backward"))
    assert "few-queries" not in {each.name for each in backward}
    assert backward[-1].passes == ("backward",)


def host_peer(name, start):
    def same(array):
        return array

    return Peer(name, "1", start, same, lambda function: (function(), POOL_BYTES))


def ours(workload, arrays):
    return Ours(*arrays, causal=workload.causal)


def host_formula():
    return peers.find(HostCupy(), ["formula"])[0][1]


# the formula -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", workloads.MASKS)
def test_the_formula_is_attention(mask):
    workload = Workload("", 2, 24, 24, 3, 16, mask, "float32")  # in which nothing is rounded twice
    arrays = workloads.normal_on_device(HostCupy(), workload)
    runner = host_formula().start(workload, arrays)
    meaning = {"band": Band(-24, 0 if workload.causal else 24), "softmax_scale": 16**-0.5}
    q, k, v, dout = arrays
    out, *gradients = (np.asarray(array).swapaxes(1, 2) for array in runner.both())
    assert_forward(out, None, q, k, v, **meaning)
    assert_backward(gradients, q, k, v, out, dout, None, **meaning)
    assert np.array_equal(runner.forward().swapaxes(1, 2), out)
    for array, again in zip(gradients, runner.backward(), strict=True):
        assert np.array_equal(array, again.swapaxes(1, 2))


@pytest.mark.parametrize("dtype", workloads.DTYPES)
@pytest.mark.parametrize("mask", workloads.MASKS)
def test_the_formula_in_16_bit_agrees_with_cuattn(dtype, mask):
    workload = Workload("grid", 2, 40, 40, 3, 16, mask, dtype)
    those = [host_peer("cuattn", ours), host_formula()]
    rows = list(half.measure_speed(HostCupy(), workload, those))
    assert [row["peer"] for row in rows if row["kind"] == "speed"] == ["cuattn", "formula"] * 2


def test_products_go_matrix_by_matrix_in_rows():
    rng = np.random.default_rng(0)
    a, b = (
        rng.standard_normal(shape).astype("float16").view(HostArray)
        for shape in ((2, 3, 4, 5), (2, 3, 7, 5))
    )
    out = np.full((2, 3, 4, 7), np.nan, np.float32).view(HostArray)
    half_formula.multiply(HostCupy(), a, b, out, transpose_b=True, alpha=0.5)
    assert np.allclose(out, 0.5 * np.einsum("bhik,bhjk->bhij", a, b, dtype=np.float32), rtol=1e-5)
    other = np.full((2, 3, 5, 5), np.nan, np.float32).view(HostArray)
    half_formula.multiply(HostCupy(), b, b, other, transpose_a=True)
    assert np.allclose(other, np.einsum("bhki,bhkj->bhij", b, b, dtype=np.float32), rtol=1e-5)


def test_the_formula_is_left_out_where_its_matrices_are_too_large(monkeypatch):
    monkeypatch.setattr(peers, "FORMULA_BYTES", 8 * TINY.num_scores)
    ours, formula = peers.find(HostCupy(), ["formula"])[0]
    rows = list(half.measure_memory(HostCupy(), TINY, [ours, formula]))
    assert [row["peer"] for row in rows if row["kind"] == "memory"][2:] == ["formula"] * 2
    monkeypatch.setattr(peers, "FORMULA_BYTES", 8 * TINY.num_scores - 1)
    rows = list(half.measure_speed(HostCupy(), TINY, [ours, formula]))
    reasons = [row["reason"] for row in rows if row["kind"] == "left out"]
    assert reasons == ["its matrices need 18,432 bytes, more than 18,431"] * 2


# peers -----------------------------------------------------------------------------------------


def test_a_peer_that_is_not_installed_is_missing_with_its_reason(monkeypatch):
    for name in ("torch", "flash_attn", "fa3_fwd_interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    found, missing = peers.find(HostCupy(), list(peers.TITLES))
    assert [peer.name for peer in found] == ["cuattn", "formula"]
    assert missing.keys() == peers.TITLES.keys() - {"cuattn", "formula"}
    assert all("torch" in why for why in missing.values())


def module(name, **contents):
    made = ModuleType(name)
    made.__dict__.update(contents)
    return made


@pytest.mark.parametrize("there", ["fa3_fwd_interface", "flash_attn_interface"])
def test_flash_attention_3_goes_by_either_name(monkeypatch, there):
    for name in ("fa3_fwd_interface", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, there, module(there, flash_attn_func=len))
    function, version = peers._flash_attn_func("fa3")
    assert function is len
    assert version.endswith("of unknown version")
    monkeypatch.setitem(sys.modules, there, None)
    with pytest.raises(LackError, match=f"{there}: ModuleNotFoundError"):
        peers._flash_attn_func("fa3")


class Tensor:
    """What Autograd asks of a tensor."""

    def detach(self):
        return self

    def requires_grad_(self):
        return self


@pytest.mark.parametrize("splits", [True, False])
def test_few_queries_are_split_where_that_is_possible(monkeypatch, splits):
    monkeypatch.setattr(peers, "to_torch", lambda torch, array: Tensor())
    torch = SimpleNamespace(no_grad=warnings.catch_warnings)
    asked = []

    def flash_attn_func(q, k, v, causal, **options):
        if options and not splits:
            raise NotImplementedError
        asked.append(options)
        return "out", "lse"

    for seqlen_q in (8, 16):
        workload = Workload("", 1, seqlen_q, 16, 1, 8, "full", "float16")
        assert peers._start_flash(torch, flash_attn_func, workload, [0] * 4).forward() == "out"
    assert asked[-1] == {}
    assert asked[-2] == ({"num_splits": 0} if splits else {})


@pytest.mark.parametrize("dtype", workloads.DTYPES)
def test_arrays_and_tensors_share_memory(dtype):
    torch = pytest.importorskip("torch")
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4).astype(dtype)
    tensor = peers.to_torch(torch, array)
    assert tensor.dtype == getattr(torch, dtype)
    assert tensor.float().tolist() == array.astype(np.float32).tolist()
    back = peers.from_torch(np, tensor.transpose(0, 1).requires_grad_())
    assert back.dtype == array.dtype
    assert np.shares_memory(back, array)
    assert np.array_equal(back, array.swapaxes(0, 1))


def test_torch_differentiates_the_same_function():
    torch = pytest.importorskip("torch")
    arrays = workloads.normal_on_device(HostCupy(), TINY)
    ours, its = Ours(*arrays, causal=True), peers._start_sdpa(torch, "MATH", TINY, arrays)
    for name in ("forward", "backward", "both"):
        results = (getattr(each, name)() for each in (ours, its))
        for wanted, tensor in zip(*map(half._as_tuple, results), strict=True):
            array = peers.from_torch(np, tensor.transpose(1, 2)).astype(np.float32)
            assert abs(array - wanted.astype(np.float32)).max() < half.DIFFERENCE / 2


# measuring -------------------------------------------------------------------------------------


def late_rows_times_two(workload, arrays):
    """A peer that computes something else."""
    right = ours(workload, arrays)

    def forward():
        out = right.forward()
        out[:, -8:] *= 2
        return out

    return SimpleNamespace(forward=forward, backward=right.backward)


def without_a_backward(workload, arrays):
    def backward():
        warnings.warn("not on this device", stacklevel=1)
        raise RuntimeError("no\nkernel")

    return SimpleNamespace(forward=ours(workload, arrays).forward, backward=backward)


def nothing(workload, arrays):
    raise LackError("not today")


def test_every_pass_of_every_peer_that_takes_it_is_timed():
    cupy = HostCupy()
    beside = {"fa4": ours, "fa3": without_a_backward, "fa2": late_rows_times_two, "cudnn": nothing}
    those = [host_peer("cuattn", ours), *itertools.starmap(host_peer, beside.items())]
    rows = list(half.measure_speed(cupy, TINY, those, repeats=3))
    speed = [row for row in rows if row["kind"] == "speed"]
    timed = {name: [row["peer"] for row in speed if row["pass"] == name] for name in TINY.passes}
    assert timed == {
        "forward": ["cuattn", "fa4", "fa3"],
        "backward": ["cuattn", "fa4", "fa2"],
    }
    seconds = 2e-3 / timing.CALLS
    for row in speed:
        assert row["seconds"] == pytest.approx(seconds)
        assert row["rounds"] == pytest.approx([seconds] * 3)
        assert row["tflops"] == pytest.approx(TINY.flops(row["pass"]) / seconds / 1e12)
        assert row["ratio_to_cuattn"] == 1
        assert row.items() >= TINY.facts().items()
    out = {(row["peer"], row["pass"]): row["reason"] for row in rows if row not in speed}
    assert out["fa2", "forward"].startswith("differs from cuattn by ")
    assert out["fa3", "backward"] == "RuntimeError: no kernel; not on this device"
    assert out["cudnn", "forward"] == out["cudnn", "backward"] == "not today"
    assert len(out) == 4


def test_a_ratio_is_of_a_peers_time_to_that_of_cuattn(monkeypatch):
    monkeypatch.setattr(half, "rounds", lambda *_, **__: [[0.5, 0.1, 0.2], [0.1, 0.9, 0.3]])
    cell = Workload("grid", 1, 8, 8, 1, 8, "full", "float16", ("forward",))
    those = [host_peer("cuattn", ours), host_peer("fa4", ours)]
    own, its = half.measure_speed(HostCupy(), cell, those)
    assert (own["seconds"], its["seconds"]) == (0.2, 0.3)
    assert its["ratio_to_cuattn"] == pytest.approx(1.5)
    assert own["tflops"] == pytest.approx(4 * 8**3 / 0.2 / 1e12)


def test_cuattn_is_timed_as_it_is_launched_when_repeated(monkeypatch):
    calls = []
    runner = SimpleNamespace(forward=lambda: calls.append(1) or np.ones(1, np.float32))
    monkeypatch.setattr(half, "rounds", lambda *_, **__: [[len(calls)]])
    cell = Workload("grid", 1, 8, 8, 1, 8, "full", "float16", ("forward",))
    (row,) = half.measure_speed(HostCupy(), cell, [host_peer("cuattn", lambda *_: runner)])
    assert row["seconds"] > AFTER_CALLS


def test_a_peer_that_gives_nan_is_left_out():
    def nan(workload, arrays):
        return SimpleNamespace(forward=lambda: ours(workload, arrays).forward() * np.float32("nan"))

    workload = Workload("grid", 1, 8, 8, 1, 8, "full", "float16", ("forward",))
    those = [host_peer("cuattn", ours), host_peer("x", nan)]
    rows = half.measure_speed(HostCupy(), workload, those)
    assert [(row["kind"], row["peer"]) for row in rows] == [("left out", "x"), ("speed", "cuattn")]


def test_an_error_of_cuattn_is_not_left_out():
    with pytest.raises(LackError, match="not today"):
        list(half.measure_speed(HostCupy(), TINY, [host_peer("cuattn", nothing)]))


def test_memory_is_what_was_taken_less_the_outputs():
    those = [host_peer("cuattn", ours), host_peer("fa3", without_a_backward)]
    rows = list(half.measure_memory(HostCupy(), TINY, those))
    array = 2 * math.prod(TINY.shapes[0])
    assert [(row["kind"], row["peer"], row["pass"]) for row in rows] == [
        ("memory", "cuattn", "forward"),
        ("memory", "cuattn", "forward+backward"),
        ("memory", "fa3", "forward"),
        ("left out", "fa3", "forward+backward"),
    ]
    for row, outputs in zip(rows, (1, 4, 1), strict=False):
        assert row["input_bytes"] == 4 * array
        assert row["output_bytes"] == outputs * array
        assert row["extra_bytes"] == POOL_BYTES - outputs * array
        assert row["score_matrix_bytes"] == 4 * 2 * 2 * 24 * 24


# with a device ---------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", workloads.DTYPES)
def test_a_cell_is_measured_beside_what_is_there(dtype):
    cupy = importlib.import_module("cupy")
    found, missing = peers.find(cupy, list(peers.TITLES))
    assert {peer.name for peer in found} | missing.keys() == set(peers.TITLES)
    cell = Workload("grid", 2, 256, 256, 2, 64, "causal", dtype)
    rows = list(half.measure_speed(cupy, cell, found, repeats=1))
    timed = {(row["peer"], row["pass"]) for row in rows if row["kind"] == "speed"}
    assert timed >= set(itertools.product(("cuattn", "formula"), cell.passes))
    assert not [row for row in rows if row.get("reason", "").startswith("differs")]


@pytest.mark.gpu
def test_memory_is_counted_beside_what_is_there():
    cupy = importlib.import_module("cupy")
    found, _ = peers.find(cupy, list(peers.TITLES))
    long = Workload("long", 1, 2048, 2048, 2, 64, "causal", "bfloat16", (), memory=True)
    rows = [row for row in half.measure_memory(cupy, long, found) if row["kind"] == "memory"]
    extra = {(row["peer"], row["pass"]): row["extra_bytes"] for row in rows}
    assert extra["cuattn", "forward"] >= 0
    assert extra["cuattn", "forward+backward"] < long.num_scores
    # In a forward, scores and weights lie where out does afterwards.
    assert extra["formula", "forward"] > 5 * long.num_scores
    assert extra["formula", "forward+backward"] >= 8 * long.num_scores
    # What torch counts beyond results is its own; of one peer it was once negative.
    assert all(size >= 0 for (name, _), size in extra.items() if name in ("cuattn", "formula"))
