"""cuattn.explain: the text names what runs and why, from shapes alone."""

import re

import needs
import numpy as np
import pytest
from calls import refused
from strategies import dtype_of

import cuattn
from cuattn import precompile
from cuattn.errors import CompileError
from cuattn.planning.problem import Band
from cuattn.planning.schedule import RangeSchedule


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """The kernels that these tests compile stay out of the user's cache, and serve them all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUATTN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


def arrays(shape_q=(1, 64, 2, 32), shape_k=None, dtype="float32"):
    q = np.zeros(shape_q, dtype_of(dtype))
    k = np.zeros(shape_k or shape_q, dtype_of(dtype))
    return q, k, k


def lines(text, label):
    return [line[12:] for line in text.splitlines() if line.startswith(f"  {label:10}")]


@pytest.fixture
def no_compiler(monkeypatch):
    """A machine without NVRTC."""

    def missing():
        raise CompileError("NVRTC: does not load; install it")

    monkeypatch.setattr("cuattn.jit.cache.nvrtc_version", missing)


def test_numpy_arrays_are_explained_with_the_cpu_engine():
    text = cuattn.explain(*arrays((2, 1000, 4, 64)))
    forward, backward = text.split("\n\n")
    assert forward.startswith("forward on the CPU: float32, NumPy engine\n")
    assert backward.startswith("backward on the CPU: float32, NumPy engine\n")
    assert re.search(r"tiles +\d+ queries x \d+ keys; \d+ x \d+ a head", forward)
    assert re.search(r"batching +\d+ batches of up to \d+ key heads, .*B of working memory", text)


def test_kernels_of_a_target_are_explained_without_a_gpu():
    needs.nvrtc()
    text = cuattn.explain(*arrays(), causal=True, device="sm_90a")
    forward, backward = text.split("\n\n")
    assert forward.startswith("forward on sm_90a: float32, family tf32x3\n")
    assert backward.startswith("backward on sm_90a: float32, family tf32x3\n")
    assert lines(forward, "kernel") == ["cuattn_fwd_tf32x3_f32_m32n32d64"]
    assert [name.split("_")[2] for name in lines(backward, "kernel")] == ["prepare", "q", "kv"]
    assert "32 queries x 32 keys x 64 dims, 4 blocks of 64 threads" in forward
    uses = r"of shared memory a block, \d+ registers a thread, no spills"
    assert len(re.findall(uses, text)) == 4


def test_the_text_is_the_same_every_time():
    needs.nvrtc()
    first, second = (cuattn.explain(*arrays(), device="sm_90a") for _ in range(2))
    assert first == second


def test_the_reasons_of_families_before_are_given(no_compiler):
    text = cuattn.explain(*arrays((1, 64, 2, 300), dtype="float16"), device="sm_90a")
    reasons = [
        "sm80 needs head dims of at most 256, got 300",
        "tf32x3 needs float32, got float16",
        "dmma needs float64, got float16",
    ]
    assert lines(text, "declined") == reasons * 2
    text = cuattn.explain(*arrays(), device="sm_75")
    reasons = [
        "sm80 needs float16 or bfloat16, got float32",
        "tf32x3 needs sm_80 or later, got sm_75",
        "dmma needs float64, got float32",
    ]
    assert lines(text, "declined") == reasons * 2


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_host_strides_that_a_device_cannot_load_are_refused_as_on_the_device(no_compiler, name):
    packed = np.zeros((1, 32, 2, 8), np.dtype([("a", "f4"), ("b", "i1")]))["a"]
    fine = np.zeros(packed.shape, np.float32)
    given = {each: fine.copy() for each in ("q", "k", "v", "out")} | {name: packed}
    cuattn.explain(**given)
    with pytest.raises(cuattn.ArgumentError, match=f"{name}: .*multiples of the itemsize 4"):
        cuattn.explain(**given, device="sm_90a")


def test_without_a_compiler_everything_but_registers_is_said(no_compiler):
    text = cuattn.explain(*arrays(), device="sm_90a")
    assert lines(text, "registers") == ["not known: NVRTC: does not load; install it"] * 2
    assert "registers a thread" not in text
    assert len(lines(text, "kernel")) == 4


def test_flops_are_counted_from_the_schedule(no_compiler):
    """4 head_dim for every pair that is seen, of every head; 2.5 times that for the backward."""
    seen = sum(
        RangeSchedule(200, 200, Band(-200, 0), 1, 1).visible(row, key)
        for row in range(200)
        for key in range(200)
    )
    flops = 2 * 3 * 4 * 64 * seen
    text = cuattn.explain(*arrays((2, 200, 3, 64)), causal=True)
    assert f"{seen:,} of 40,000 (row, key) pairs a head (50.2 %)" in text
    forward, backward = lines(text, "work")
    assert forward == f"{flops / 1e6:.1f} MFLOP, 2 (head_dim + head_dim_v) a pair"
    assert backward == f"{2.5 * flops / 1e6:.1f} MFLOP, by convention 2.5 x the forward"


@pytest.mark.parametrize("device", [None, "sm_80"])
def test_bytes_count_every_array_once(no_compiler, device):
    q, k, v = arrays((2, 512, 8, 64), (2, 256, 2, 64), "float16")
    forward, backward = lines(cuattn.explain(q, k, v, device=device), "memory")
    rows = 2 * 8 * 512
    inputs, out, lse = q.nbytes + 2 * k.nbytes, q.nbytes, 4 * rows
    mebi = 2**20
    assert forward.startswith(f"{inputs / mebi:.1f} MiB read, {(out + lse) / mebi:.1f} MiB written")
    read = inputs + 2 * out + lse
    assert backward.startswith(f"{read / mebi:.1f} MiB read, {inputs / mebi:.1f} MiB written")


def test_an_axis_of_stride_zero_counts_once():
    q, k, v = arrays((1, 512, 8, 64))
    text = cuattn.explain(q, np.broadcast_to(k[:, :, :1], k.shape), v)
    distinct = q.nbytes + k.nbytes // 8 + v.nbytes
    assert lines(text, "memory")[0].startswith(f"{distinct / 2**20:.1f} MiB read")


def test_the_workspace_is_delta(no_compiler):
    text = cuattn.explain(*arrays((2, 512, 8, 64)), device="sm_90a")
    assert lines(text, "workspace") == ["0 bytes", "32.0 KiB"]


def test_split_keys_are_explained(no_compiler):
    few, many = (1, 64, 4, 64), (1, 65536, 4, 64)
    forward, backward = cuattn.explain(*arrays(few, many, "float16"), device="sm_90a").split("\n\n")
    (splits,) = lines(forward, "splits")
    assert re.fullmatch(r"\d\d parts of the keys, merged", splits)
    assert [name.split("_")[2] for name in lines(forward, "kernel")] == ["sm80", "merge"]
    assert not lines(backward, "splits")


def test_blocks_of_both_loops_are_told_apart(no_compiler):
    _, backward = cuattn.explain(*arrays((1, 256, 4, 64), dtype="float16"), device="sm_90a").split(
        "\n\n"
    )
    assert "24 blocks of 256 threads: 16 own 64 keys each, 8 own 128 queries each" in backward
    large = cuattn.explain(*arrays((8, 4096, 16, 64), dtype="float16"), device="sm_90a")
    assert " own " not in large


@pytest.mark.parametrize("device", [None, "sm_90a"])
@pytest.mark.parametrize("shape", [(0, 8, 2, 4), (1, 0, 2, 4), (1, 8, 0, 4)])
def test_empty_problems_are_explained(no_compiler, shape, device):
    text = cuattn.explain(*arrays(shape), device=device)
    assert text.count("\n\n") == 1
    assert "none: " in text


def test_a_call_is_checked_like_attention():
    q, k, v = arrays()
    refused(cuattn.ArgumentError, "k", run=lambda: cuattn.explain(q, k[:, :, :, :5], v))
    refused(cuattn.UnsupportedError, "bias", run=lambda: cuattn.explain(q, k, v, bias=q))
    small = np.zeros(3, np.float32)
    refused(cuattn.ArgumentError, "out", run=lambda: cuattn.explain(q, k, v, out=small))
    with pytest.raises(TypeError, match="nonsense"):
        cuattn.explain(q, k, v, nonsense=1)


def test_an_unknown_device_names_those_there_are():
    refused(
        cuattn.ArgumentError, "device", "sm_90a", run=lambda: cuattn.explain(*arrays(), device="x")
    )
    refused(cuattn.DTypeError, "device", run=lambda: cuattn.explain(*arrays(), device=90))


def test_a_call_can_be_explained_by_changing_its_name():
    """return_lse and out are taken, and out's strides and dtype count."""
    q, k, v = arrays((1, 64, 2, 32), dtype="float16")
    out = np.empty(q.shape, np.float32)
    text = cuattn.explain(q, k, v, out=out, out_dtype="float32", return_lse=True)
    read, written = lines(text, "memory")[0].split(", ")[:2]
    assert written == f"{(out.nbytes + 4 * 2 * 64) / 1024:.1f} KiB written"
    assert read == f"{3 * q.nbytes / 1024:.1f} KiB read"


def test_a_refused_kernel_does_not_hide_the_plan(monkeypatch):
    needs.nvrtc()

    def refuse(spec):
        raise CompileError("this kernel is refused", kernel_name=spec.name)

    monkeypatch.setattr(precompile, "unit_of", refuse)
    text = cuattn.explain(*arrays(), device="sm_90a")
    assert "not known: this kernel is refused" in text


@pytest.mark.gpu
def test_cupy_arrays_are_explained_with_their_device():
    import cupy

    q, k, v = map(cupy.asarray, arrays())
    text = cuattn.explain(q, k, v)
    assert re.match(r"forward on sm_\d+a?: float32, family \w+\n", text)
    assert text.count("registers a thread") == 4
    cuattn.attention(q, k, v)


@pytest.mark.gpu
def test_cupy_arrays_can_be_explained_for_another_target():
    import cupy

    text = cuattn.explain(*map(cupy.asarray, arrays()), device="sm_75")
    assert text.startswith("forward on sm_75: float32, family simt\n")
