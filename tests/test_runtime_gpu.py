"""On a device: processes, fork, other devices, per-thread streams, and CuPy's memory replaced."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import compare
import mixed_calls
import numpy as np
import pytest
from calls import draw, same_bits
from conftest import cuda_devices
from engines import CudaEngine
from strategies import DTYPES

import cuattn
from cuattn import execute
from cuattn.jit import cache, launch
from cuattn.planning.families import FAMILIES

ROOT = Path(__file__).parents[1]
NUM_PROCESSES = 8


class Planned:
    """As a family: whichever each problem is planned for."""

    name, dtypes = "planned", DTYPES


@pytest.fixture(scope="module")
def device():
    """Calls on a device as a user makes them, with their known results."""
    engine = CudaEngine(Planned)
    calls = mixed_calls.mixed_calls(engine)
    rounding = {dtype for each in FAMILIES if each.rounds_to_zero for dtype in each.dtypes}
    with mock.patch.object(compare, "ROUNDS_TO_ZERO", rounding):
        return engine, calls, mixed_calls.known_results(engine, calls)


def are_known(engine, calls, known):
    """Whether every call gives its bits once more."""
    results = [mixed_calls.on_host(engine, call()) for _, call in calls]
    return all(all(map(same_bits, *pair)) for pair in zip(results, known, strict=True))


@contextlib.contextmanager
def nothing_loaded(directory):
    """As in a new process with this cache folder."""
    with (
        mock.patch.dict(os.environ, {"CUATTN_CACHE_DIR": str(directory)}),
        mock.patch.object(launch, "_kernels", {}),
    ):
        execute.forget()
        try:
            yield
        finally:
            execute.forget()


def all_calls(barrier):
    """What a process of many gets, and how many kernels it compiled; in a cache that they share."""
    engine = CudaEngine(Planned)
    calls = mixed_calls.mixed_calls(engine)
    if barrier is not None:
        barrier.wait(timeout=120)
    results = [mixed_calls.on_host(engine, call()) for _, call in calls]
    return results, cache.default_cache().stats.compiles, len(launch._kernels)


def put_all_calls(barrier, results):
    results.put(all_calls(barrier))


@pytest.mark.gpu
def test_processes_that_start_together_with_an_empty_cache_are_right(device, tmp_path):
    _, _, known = device
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(NUM_PROCESSES), context.Queue()
    processes = [
        context.Process(target=put_all_calls, args=(barrier, results)) for _ in range(NUM_PROCESSES)
    ]
    with mock.patch.dict(os.environ, {"CUATTN_CACHE_DIR": str(tmp_path)}):
        for process in processes:
            process.start()
        answers = [results.get(timeout=300) for _ in processes]
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0] * NUM_PROCESSES
    stored = mixed_calls.stored_kernels(tmp_path)
    for got, compiles, kernels in answers:
        assert all(all(map(same_bits, *pair)) for pair in zip(got, known, strict=True))
        assert compiles <= kernels == len(stored)
    with (
        mock.patch.dict(os.environ, {"CUATTN_CACHE_DIR": str(tmp_path)}),
        ProcessPoolExecutor(1, context) as one,
    ):
        _, compiles, _ = one.submit(all_calls, None).result(timeout=120)
    assert compiles == 0  # it found all of them


FORK = """
import os, pickle, sys
import numpy as np
import cuattn
{imports}
drawn = np.random.default_rng(0).standard_normal((4, 1, 512, 2, 64)).astype(np.float16)
on_host = cuattn.attention(*drawn[:3])  # by the CPU engine, whose threads are over by then

def on_device():
    import cupy
    arrays = [cupy.asarray(each) for each in drawn]
    out, vjp = cuattn.attention_vjp(*arrays[:3], deterministic=True)
    gradients = vjp(arrays[3])
    return [cupy.asnumpy(each) for each in (out, gradients.dq, gradients.dk, gradients.dv)]

read, write = os.pipe()
child = os.fork()
if child == 0:
    with open(write, "wb") as pipe:
        pickle.dump(on_device(), pipe)
    os._exit(0)
os.close(write)
with open(read, "rb") as pipe:
    in_child = pickle.load(pipe)
assert os.waitpid(child, 0)[1] == 0
in_parent = on_device()
assert all(a.tobytes() == b.tobytes() for a, b in zip(in_child, in_parent, strict=True))
assert np.isfinite(in_parent[0]).all() and in_parent[0].any()
print("both are right")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("imports", ["", "import cupy"])
def test_a_child_forked_before_the_first_use_uses_the_device(imports):
    """And so does its parent, later; with CuPy imported before the fork, or after it."""
    done = subprocess.run(
        [sys.executable, "-c", FORK.format(imports=imports)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "both are right\n", done.stderr


@pytest.mark.skipif(cuda_devices() < 2, reason="needs 2 GPUs")
def test_arrays_on_another_device_than_the_current_one(device):
    import cupy

    engine, _, known = device
    with cupy.cuda.Device(1):
        its_calls = mixed_calls.mixed_calls(engine)
    cupy.cuda.Device(0).use()
    for (name, call), expected in zip(its_calls, known, strict=True):
        results = call()
        assert {each.device.id for each in results} == {1}, name
        assert cupy.cuda.runtime.getDevice() == 0, name
        with cupy.cuda.Device(1):  # on whose stream they are computed
            assert all(map(same_bits, mixed_calls.on_host(engine, results), expected)), name


@pytest.mark.skipif(cuda_devices() < 2, reason="needs 2 GPUs")
def test_threads_on_two_devices_get_their_own_results(device):
    import cupy

    engine, calls, known = device
    with cupy.cuda.Device(1):
        its_calls = mixed_calls.mixed_calls(engine)
        cupy.cuda.Device(1).synchronize()
    wrong = mixed_calls.wrong_calls(
        *(engine, [*calls, *its_calls], [*known, *known]),
        num_threads=8,
        num_calls=100,
        around=lambda thread: cupy.cuda.Device(thread % 2),
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(cuda_devices() < 2, reason="needs 2 GPUs")
def test_arrays_of_two_devices_are_refused(device):
    import cupy

    (q, k, v), out = draw(*[(1, 8, 1, 8)] * 3), None
    q, k = cupy.asarray(q), cupy.asarray(k)
    with cupy.cuda.Device(1):
        v, out = cupy.asarray(v), cupy.zeros((1, 8, 1, 8), "float32")
    with pytest.raises(cuattn.ArgumentError, match="device"):
        cuattn.attention(q, k, v)
    with pytest.raises(cuattn.ArgumentError, match="device"):
        cuattn.attention(q, k, k, out=out)


def on_per_thread_streams():
    """In a process whose threads each have a default stream: what goes wrong."""
    import cupy

    assert cupy.cuda.get_current_stream().ptr == cupy.cuda.runtime.streamPerThread
    engine = CudaEngine(Planned)
    calls = mixed_calls.mixed_calls(engine)
    cupy.cuda.Device().synchronize()
    known = [mixed_calls.on_host(engine, call()) for _, call in calls]
    cupy.cuda.Device().synchronize()
    wrong = mixed_calls.wrong_calls(
        *(engine, calls, known),
        num_threads=2,
        num_calls=300,
        around=lambda thread: contextlib.nullcontext(),
    )
    return known, wrong


@pytest.mark.gpu
def test_threads_with_a_default_stream_each_get_the_same_bits(device):
    _, _, known = device
    with (
        mock.patch.dict(os.environ, {"CUPY_CUDA_PER_THREAD_DEFAULT_STREAM": "1"}),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
    ):
        got, wrong = process.submit(on_per_thread_streams).result(timeout=300)
    assert not wrong, "\n".join(wrong)
    assert all(all(map(same_bits, *pair)) for pair in zip(got, known, strict=True))


@pytest.fixture
def allocator():
    """CuPy's allocator, put back afterwards."""
    import cupy

    before = cupy.cuda.get_allocator()
    cupy.get_default_memory_pool().free_all_blocks()
    yield
    cupy.cuda.Device().synchronize()
    cupy.cuda.set_allocator(before)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Memory", "MemoryAsync", "PooledMemory"])
def test_memory_comes_from_the_allocator_that_the_user_set(device, allocator, kind):
    """None at all, the driver's asynchronous pool, and a pool of the user's own."""
    import cupy

    engine, calls, known = device
    pool = cupy.cuda.MemoryPool()
    cupy.cuda.set_allocator(
        {
            "Memory": lambda: None,
            "MemoryAsync": lambda: cupy.cuda.MemoryAsyncPool().malloc,
            "PooledMemory": lambda: pool.malloc,
        }[kind]()
    )
    for _ in range(3):
        assert are_known(engine, calls, known)
    (result, *_) = calls[0][1]()
    assert type(result.data.mem).__name__ == kind
    assert (pool.total_bytes() > 0) == (kind == "PooledMemory")


@pytest.mark.gpu
def test_a_thread_with_a_pool_of_its_own_gets_its_memory_there(device):
    import cupy

    engine, calls, known = device
    pool, got = cupy.cuda.MemoryPool(), []

    def run():
        with cupy.cuda.using_allocator(pool.malloc):
            got.append(are_known(engine, calls, known))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(timeout=120)
    assert got == [True]
    assert pool.total_bytes() > 0
    assert pool.used_bytes() == 0  # no result is held, and no workspace


@pytest.mark.gpu
@pytest.mark.parametrize("damage", ["nonsense", "empty"])
def test_an_image_that_the_driver_refuses_is_built_anew(device, tmp_path, damage):
    """One whose checksum is right, so that only the driver can know.

    Half an image is not among them: the driver believes its header and ends the process, so that it
    never gets there is the checksum's to see to.
    """
    engine, calls, known = device
    good, bad = tmp_path / "good", tmp_path / "bad"
    with nothing_loaded(good):
        assert are_known(engine, calls[:3], known[:3])
    shutil.copytree(good, bad)
    names = mixed_calls.stored_kernels(bad)
    for meta_path in bad.glob("*/*/meta.json"):
        cubin_path = meta_path.with_name("kernel.cubin")
        image = cubin_path.read_bytes()
        image = {
            "nonsense": b"?" * len(image),
            "empty": b"",
        }[damage]
        cubin_path.write_bytes(image)
        meta = json.loads(meta_path.read_text(encoding="utf-8"))
        meta["cubin_sha256"] = hashlib.sha256(image).hexdigest()
        meta_path.write_text(json.dumps(meta), encoding="utf-8")
    with nothing_loaded(bad):
        assert are_known(engine, calls[:3], known[:3])
        assert cache.default_cache().stats.compiles == len(names)
    assert mixed_calls.stored_kernels(bad) == names
    images = [
        {each.read_bytes() for each in place.glob("*/*/kernel.cubin")} for place in (good, bad)
    ]
    assert images[0] == images[1]
    assert np.isfinite(known[0][0]).all()
