"""What others' users reported of attention kernels, as tests here: devices, streams, compiling.

As in ``test_bug_reports.py``, by number of the report.
"""

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path

import needs
import numpy as np
import pytest
from calls import draw, qkv, refused, same_bits
from checked import CAUSAL, call, check_arrays, dtype_within
from strategies import dtype_of

import cuattn
from cuattn.bench import timing
from cuattn.jit.compile import arch_for_device
from cuattn.planning.device import known_device

ROOT = Path(__file__).parents[1]

# Devices and streams -------------------------------------------------------------------------


def test_bc56_arrays_of_another_device_are_computed_there():
    """Dao-AILab/flash-attention#54 and #1793, flashinfer-ai/flashinfer#452 and #924."""
    cupy = needs.gpus(2)
    arrays = draw((1, 33, 4, 32), *[(1, 40, 2, 32)] * 2, (1, 33, 4, 32), dtype="float16")
    results = []
    for device, current in itertools.product((1, 0), (0, 1)):
        with cupy.cuda.Device(device):
            held = list(map(cupy.asarray, arrays))
        with cupy.cuda.Device(current):
            got = call(*held, deterministic=True, **CAUSAL)
            one = cuattn.attention(held[0][:, :1], *held[1:3])
            assert cupy.cuda.runtime.getDevice() == current
        assert {each.device.id for each in (*got, one)} == {device}
        results.append(list(map(cupy.asnumpy, (*got, one))))
    assert all(all(map(same_bits, results[0], each)) for each in results[1:])


def test_bc59_arrays_of_two_devices_are_refused():
    """NVIDIA/cudnn-frontend#557."""
    cupy = needs.gpus(2)
    here, there = [], []
    for device, into in ((0, here), (1, there)):
        with cupy.cuda.Device(device):
            into += map(cupy.asarray, qkv())
    for number, name in ((1, "k"), (2, "v")):
        arrays = list(here)
        arrays[number] = there[number]
        run = lambda arrays=arrays: cuattn.attention(*arrays)  # noqa: E731
        refused(cuattn.ArgumentError, name, "device 0 like q", run=run)


def test_bc59_arrays_that_do_not_go_together_are_refused_by_name(engine):
    """NVIDIA/cudnn-frontend#557, but of masks, biases and a second device."""
    arrays = qkv(9, 9, 2, 2, 32, dtype="float16")

    def refuses(error, name, *parts, **others):
        held = dict(zip("qkv", arrays, strict=True)) | others
        held = {name: engine.asarray(np.ascontiguousarray(each)) for name, each in held.items()}
        refused(error, name, *parts, run=lambda: cuattn.attention(**held))
        check_arrays(engine, *map(engine.asarray, qkv(3, 5)))  # the next call is right

    q, k, v = arrays
    refuses(cuattn.DTypeError, "k", "bfloat16", "float16 like q", k=k.astype(dtype_of("bfloat16")))
    integers = {name: each.astype("int32") for name, each in zip("qkv", arrays, strict=True)}
    refuses(cuattn.DTypeError, "q", "int32", **integers)
    refuses(cuattn.ArgumentError, "q", "2 axes", "4 axes", q=q[0, 0])
    refuses(cuattn.ArgumentError, "k", "head_dim 32 like q", k=k[..., :16])
    refuses(cuattn.ArgumentError, "k", "batch 1 like q", k=k.repeat(3, 0), v=v.repeat(3, 0))
    if engine.name != "numpy":
        mixed = engine.asarray(q), k, engine.asarray(v)
        run = lambda: cuattn.attention(*mixed)  # noqa: E731
        refused(cuattn.DTypeError, "k", "host memory", "CUDA device", run=run)


def decode_and_train(engine):
    """Two sets of (arrays of a decode, arrays of a training step), and their results."""
    dtype, sets = dtype_within(engine, "bfloat16"), []
    for negate in (False, True):
        decode = draw((1, 1, 8, 64), *[(1, 3000, 2, 64)] * 2, (1, 1, 8, 64), dtype=dtype)
        train = draw((1, 257, 4, 64), *[(1, 257, 2, 64)] * 2, (1, 257, 4, 64), dtype=dtype)
        sets.append(
            [
                [engine.asarray(-each if negate else each) for each in those]
                for those in (decode, train)
            ]
        )
    return sets, [results_of(engine, each) for each in sets]


def enqueue(arrays):
    decode, train = arrays
    out = cuattn.attention(*decode[:3])
    return [out, *call(*train, causal=True, deterministic=True)]


def results_of(engine, arrays):
    return list(map(engine.asnumpy, enqueue(arrays)))


def test_bc58_threads_do_not_overwrite_each_others_results(engine):
    """cupy/cupy#8068 and #5069."""
    sets, expected = decode_and_train(engine)
    start, got = threading.Barrier(2), {0: [], 1: []}
    times = 2 if engine.name == "numpy" else 10

    def work(which):
        start.wait(60)
        for _ in range(times):
            got[which].append(results_of(engine, sets[which]))

    threads = [threading.Thread(target=work, args=(which,)) for which in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for which, results in got.items():
        assert len(results) == times
        assert all(all(map(same_bits, expected[which], each)) for each in results)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["simt", "sm80"], indirect=True, scope="module")
def test_bc58_two_streams_do_not_overwrite_each_others_results(engine):
    """Calls in turn, none of which is waited for, their results kept."""
    import cupy

    sets, expected = decode_and_train(engine)
    cupy.cuda.Device().synchronize()
    streams, kept = [cupy.cuda.Stream(non_blocking=True) for _ in sets], []
    for _ in range(20):
        for which, stream in enumerate(streams):
            with stream:
                kept.append((which, enqueue(sets[which])))
    cupy.cuda.Device().synchronize()
    for which, results in kept:
        assert all(map(same_bits, expected[which], map(cupy.asnumpy, results)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "engine", ["simt", "sm80", "tf32x3", "dmma"], indirect=True, scope="module"
)
@pytest.mark.parametrize("seqlens", [(60, 70), (1, 3000)], ids=("dense", "decode"))
def test_bc60_a_captured_graph_reads_what_its_inputs_hold_at_the_replay(engine, seqlens):
    """Dao-AILab/flash-attention#165 and #379, thu-ml/SageAttention#371."""
    import cupy

    seqlen_q, seqlen_k = seqlens
    shapes = (2, seqlen_q, 4, 64), *[(2, seqlen_k, 2, 64)] * 2, (2, seqlen_q, 4, 64)
    held = list(map(engine.asarray, draw(*shapes)))
    pool, stream = cupy.cuda.MemoryPool(), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.using_allocator(pool.malloc), stream:  # memory that the graph may keep
        call(*held, deterministic=True, **CAUSAL)
        stream.synchronize()
        stream.begin_capture()
        try:
            results = call(*held, deterministic=True, **CAUSAL)
        finally:
            graph = stream.end_capture()
    for seed in (1, 2):
        rng = np.random.default_rng(seed)
        for each in held:
            each[...] = cupy.asarray(rng.standard_normal(each.shape).astype(each.dtype))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        eager = call(*held, deterministic=True, **CAUSAL)
        assert all(map(same_bits, map(cupy.asnumpy, results), map(cupy.asnumpy, eager)))


# Compiling -----------------------------------------------------------------------------------

#: One call on NumPy arrays, and a small kernel through the cache, which needs no GPU.
COMPILES = """
import sys, warnings
import numpy as np
import cuattn
from cuattn.planning.device import known_device
from cuattn.planning.families import every_spec
from cuattn.precompile import build

x = np.ones((1, 3, 1, 4), np.float32)
assert (cuattn.attention(x, x, x) == 1).all()
spec = next(every_spec(known_device("sm_90a")))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    (built,) = build([spec], "sm_90a")
print(len(built.compiled.cubin), built.stored, len(caught))
"""


def compiled_in_a_child(**environment):
    """(bytes of the kernel, whether it was stored, warnings) of a process with these variables."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    run = subprocess.run(
        [sys.executable, "-c", COMPILES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    size, stored, warned = run.stdout.split()
    return int(size), stored == "True", int(warned)


@pytest.mark.parametrize("where", ["below a file", "below a device", "read-only", "new and deep"])
def test_bc62_a_cache_that_cannot_be_is_done_without(where, tmp_path):
    """cupy/cupy#2296 and #3144, DiamondLightSource/httomo#243."""
    needs.nvrtc()
    (tmp_path / "file").touch()
    read_only = tmp_path / "read-only"
    read_only.mkdir(0o555)
    folder = {
        "below a file": tmp_path / "file" / "cache",
        "below a device": Path(os.devnull) / "cache",
        "read-only": read_only,
        "new and deep": tmp_path / "new" / "and" / "deep",
    }[where]
    size, stored, warned = compiled_in_a_child(CUATTN_CACHE_DIR=str(folder))
    assert size > 1000
    may_write = where == "new and deep" or (where == "read-only" and os.access(read_only, os.W_OK))
    assert (stored, warned) == ((True, 0) if may_write else (False, 1))


def test_bc64_no_toolkit_is_needed_to_compile(tmp_path):
    """cupy/cupy#8466, #8146, #1651 and #9475, NVIDIA/cuda-python#844."""
    needs.nvrtc()
    nowhere = {name: str(tmp_path / "none") for name in ("CUDA_PATH", "CUDA_HOME", "CUDA_ROOT")}
    size, _, warned = compiled_in_a_child(**nowhere, PATH="", CUATTN_CACHE_DIR=str(tmp_path))
    assert size > 1000
    assert warned == 0


@pytest.mark.parametrize("capability", [(5, 2), (99, 0)])
def test_bc64_a_device_that_nothing_compiles_for_is_named(capability):
    needs.nvrtc()
    target = "sm_{}{}".format(*capability)
    with pytest.raises(cuattn.CompileError, match=f"^{target}: .*(older|install)"):
        arch_for_device(*capability)
    refused(cuattn.ArgumentError, "device", target, "sm_90a", run=lambda: known_device(target))


# Speed ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["sm80"], indirect=True, scope="module")
def test_bc73_no_batch_of_a_decode_is_slower_than_larger_ones(engine):
    """Dao-AILab/flash-attention#1095, huggingface/transformers#48633."""
    import cupy

    batches = (8, 16, 24, 31, 32, 33, 40, 48)

    def decode(batch, heads_kv):
        q = engine.xp.zeros((batch, 1, 40, 128), "float16")
        k, v = (engine.xp.zeros((batch, 1024, heads_kv, 128), "float16")[:, :512] for _ in "kv")
        return lambda: cuattn.attention(q, k, v)

    functions = [*(decode(batch, 8) for batch in batches), decode(32, 40)]
    *seconds, all_heads = map(min, timing.rounds(*functions, cupy=cupy, calls=20, repeats=15))
    for number, its in enumerate(seconds[:-1]):
        assert its <= 1.6 * max(seconds[number + 1 :]), dict(zip(batches, seconds, strict=True))
    assert seconds[batches.index(32)] <= 1.1 * all_heads
