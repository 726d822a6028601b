"""cuattn.execute without a GPU: what is launched, in which order, with which pointers."""

import ctypes
import importlib
import inspect
import re
import sys
import threading
from types import SimpleNamespace

import needs
import numpy as np
import pytest
import record

from cuattn import execute
from cuattn._arrays import LAYOUTS
from cuattn.abi import structs
from cuattn.abi.template import Template
from cuattn.jit import launch
from cuattn.jit.launch import Kernel
from cuattn.jit.replay import Replay
from cuattn.planning.device import known_device
from cuattn.planning.plan import parameters
from cuattn.planning.select import plan_for

H200 = known_device("sm_90a")
BSHD = LAYOUTS["bshd"]
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
ARRAYS = {name: 256 * (i + 1) for i, name in enumerate((*TENSORS, "lse"))}
FRESH = 1 << 40
STREAM = 77


class FakeArray:
    """What execute reads of a CuPy array."""

    def __init__(self, pointer, dtype=np.float32):
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.dtype = np.dtype(dtype)


class FakeCupy:
    """What execute asks of CuPy: memory, each time at another address, and a stream."""

    def __init__(self):
        self.made, self.waited, self.met = [], [], []
        self.cuda = SimpleNamespace(
            alloc=self.alloc,
            get_current_stream=lambda: SimpleNamespace(ptr=STREAM),
            runtime=SimpleNamespace(
                memGetInfo=lambda: self.met.append(threading.get_ident()),
                streamSynchronize=self.waited.append,
                streamIsCapturing=lambda stream: False,
            ),
            driver=SimpleNamespace(launchKernel=self.launch_kernel),
        )
        self.launches = []

    def alloc(self, nbytes):
        self.made.append(("alloc", nbytes))
        return SimpleNamespace(ptr=FRESH * len(self.made))

    def zeros(self, size, dtype):
        self.made.append(("zeros", size, np.dtype(dtype)))
        return FakeArray(FRESH * len(self.made), dtype)

    def launch_kernel(self, function, gx, gy, gz, bx, by, bz, smem_bytes, stream, params, extra):
        self.launches.append((function, (gx, gy, gz), (bx, by, bz), smem_bytes, stream, params))
        assert extra == 0


@pytest.fixture
def launched(monkeypatch):
    """The launches of every call, as (kernel name, grid, pointers); nothing is compiled."""
    launches = []

    def load(unit, arch, smem_bytes):
        assert arch == "sm_90a"

        def launcher(grid):
            struct = structs.FwdParams if "FwdParams" in unit.text else structs.BwdParams

            def launch(stream, arguments, extra):
                assert (stream, extra) == (STREAM, 0)
                launches.append((unit.name, grid, pointers(struct, arguments)))

            return launch

        return SimpleNamespace(launcher=launcher)

    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(launch, "_thread", launch._Thread())
    monkeypatch.setattr(execute, "load", load)
    monkeypatch.setattr(execute, "build", lambda units, options: ())
    monkeypatch.setattr(execute, "cuda_device", lambda device_id: H200)
    execute.forget()
    yield launches
    execute.forget()


def pointers(struct, arguments):
    """Every pointer of the struct that a list of one argument leads to, by its template name."""
    address = ctypes.c_uint64.from_address(arguments).value
    memory = (ctypes.c_uint8 * struct.dtype.itemsize).from_address(address)
    values = np.frombuffer(bytes(memory), struct.dtype)[0]
    sizes = ("shape", "softmax_scale", "num_splits", "dq_sum_size")
    names = [name for name in struct.dtype.names if name not in sizes]
    return {name: int(values[name]["data"] if name in TENSORS else values[name]) for name in names}


def run(op, dtype="float32", **how):
    asked = record.problem(op, dtype, **how)
    arrays = {name: FakeArray(pointer) for name, pointer in ARRAYS.items()}
    q, k, v, out, lse = (arrays[name] for name in ("q", "k", "v", "out", "lse"))
    if op == "forward":
        execute.forward(asked, BSHD, q, k, v, out, lse)
    else:
        gradients = (arrays["d" + name] if name in asked.wrt else None for name in "qkv")
        execute.backward(asked, BSHD, q, k, v, out, lse, arrays["dout"], None, *gradients)
    return asked


def test_a_forward_launches_its_plan_with_every_pointer(launched):
    asked = run("forward")
    (planned,) = plan_for(asked, H200).launches
    ((name, grid, given),) = launched
    assert (name, grid) == (planned.kernel.name, planned.grid)
    assert (given.pop("part_out"), given.pop("part_lse")) == (0, 0)
    assert given == {name: ARRAYS[name] for name in ("q", "k", "v", "out", "lse")}


def test_a_split_forward_launches_the_merge_with_the_same_workspace(launched):
    asked = run("forward", "bfloat16", shape=(1, 64, 65536, 4, 4, 64, 64))
    plan = plan_for(asked, H200)
    assert [name for name, _, _ in launched] == [each.kernel.name for each in plan.launches]
    assert "fwd_merge" in launched[1][0]
    (_, out_size), (_, lse_size) = plan.workspace
    for _, _, given in launched:
        assert given["part_out"] == FRESH
        assert given["part_lse"] == FRESH + 4 * out_size
    assert sys.modules["cupy"].made == [("alloc", 4 * (out_size + lse_size))]


def test_buffers_of_a_workspace_are_aligned_and_do_not_meet(launched):
    asked = run("backward", "bfloat16", shape=(1, 3, 5, 1, 1, 64, 64), out_dtype="float32")
    sizes = [(name, 4 * size) for name, size in plan_for(asked, H200).workspace]
    assert [name for name, _ in sizes] == ["delta", "dout_cast", "dq_sum"]
    ((_, taken),) = sys.modules["cupy"].made
    for _, _, given in launched:
        end = FRESH
        for name, size in sizes:
            assert given[name] % 256 == 0
            assert end <= given[name] < end + 256
            end = given[name] + size
        assert end <= FRESH + taken < end + 256


def test_a_backward_launches_its_plan_in_order_with_every_pointer(launched):
    asked = run("backward")
    planned = plan_for(asked, H200).launches
    assert [(name, grid) for name, grid, _ in launched] == [
        (launch.kernel.name, launch.grid) for launch in planned
    ]
    for _, _, given in launched:
        assert given.pop("delta") == FRESH
        assert given.pop("dlse") == 0
        assert (given.pop("dq_sum"), given.pop("dout_cast")) == (0, 0)
        assert given == {name: ARRAYS[name] for name in given}
    rows = asked.batch * asked.num_heads_q * asked.seqlen_q
    assert sys.modules["cupy"].made == [("alloc", 4 * rows)]


def test_a_gradient_that_is_not_asked_for_has_no_pointer(launched):
    run("backward", wrt=("k",))
    for _, _, given in launched:
        assert (given["dq"], given["dk"], given["dv"]) == (0, ARRAYS["dk"], 0)


def test_a_missing_dout_is_one_zero(launched):
    asked = record.problem("backward", "float16", out_dtype="float32")
    half, single = FakeArray(512, np.float16), FakeArray(1024)
    execute.backward(asked, BSHD, *[half] * 3, single, single, None, single, *[half] * 3)
    assert ("zeros", 1, np.dtype("float32")) in sys.modules["cupy"].made
    for _, _, given in launched:
        assert given["dout"] >= FRESH
        assert given["dlse"] == 1024


@pytest.mark.parametrize("op", ["forward", "backward"])
def test_an_empty_problem_launches_nothing(launched, op):
    run(op, shape=(0, 8, 8, 2, 2, 8, 8))
    assert launched == []


def test_every_address_that_execute_gives_has_a_place():
    """A name that the struct lacked would be a KeyError at the first launch."""
    few_rows = (1, 64, 65536, 4, 4, 64, 64)
    for op, struct in (("forward", structs.FwdParams), ("backward", structs.BwdParams)):
        given = {"q", "k", "v", "out", "lse"}
        if op == "backward":
            given |= {"dout", "dlse", "dq", "dk", "dv"}
        for asked in (
            record.problem(op, "float32"),
            record.problem(op, "bfloat16", out_dtype="float32", shape=few_rows),
        ):
            plan = plan_for(asked, H200)
            given |= {name for name, _ in plan.workspace}
        assert set(Template(struct, parameters(plan)).pointers) == given


def test_the_next_call_like_this_one_finds_its_plan(launched):
    asked = run("forward")
    assert execute.loaded_plan(asked, 0) is execute.loaded_plan(asked, 0)
    assert execute.loaded_plan(asked, 0) is not execute.loaded_plan(asked, 1)


def test_threads_that_come_first_together_get_one_plan(launched, monkeypatch):
    asked, both = record.problem("forward", "float32"), threading.Barrier(2)

    def plan_together(problem, device):
        both.wait(timeout=60)
        return plan_for(problem, device)

    monkeypatch.setattr(execute, "plan_for", plan_together)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(execute.loaded_plan(asked, 0)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] is found[1] is execute.loaded_plan(asked, 0)
    assert found[0].plan.problem is asked  # so that no other object has its identity


@pytest.mark.parametrize("is_done", [False, True])
def test_what_a_graph_has_launched_is_not_launched_again(launched, monkeypatch, is_done):
    given = []

    def launch_graph(graphs, stream, its, arguments):
        words = arguments()
        given.append((stream, its, pointers(structs.BwdParams, words.buffer_info()[0])))
        return is_done

    monkeypatch.setattr(Replay, "launch", launch_graph)
    run("backward")
    ((stream, its, words),) = given
    assert stream == STREAM
    expected = ARRAYS | {"dlse": 0}
    assert {name: words[name] for name in ARRAYS} == expected
    assert sorted(its) == sorted([*expected.values(), FRESH])
    assert len(launched) == (0 if is_done else 3)


def test_one_launch_and_debugging_need_no_graph(launched, monkeypatch):
    def launch_graph(*_):
        raise AssertionError

    monkeypatch.setattr(Replay, "launch", launch_graph)
    run("forward")
    monkeypatch.setenv("CUATTN_DEBUG", "1")
    run("backward")
    assert len(launched) == 1 + 3


def test_loaded_plans_are_bounded(launched, monkeypatch):
    monkeypatch.setattr(execute, "_MAX_LOADED", 3)
    made = [run("forward", shape=(1, 8, 8, 1, 1, 8, dim)) for dim in range(1, 7)]
    assert len(launched) == 6
    kept = [each.plan.problem for each in execute._loaded.values()]
    assert kept == made[-3:]  # the oldest went


def test_a_unit_names_its_kernel_configuration_and_launch_bounds():
    spec = plan_for(record.problem("forward", "float32"), H200).launches[0].kernel
    unit = execute.unit_of(spec)
    assert unit.name == spec.name
    assert unit.num_threads == spec.num_threads
    bounds = f"__launch_bounds__({spec.num_threads}, {spec.min_blocks})"
    for part in (spec.name, bounds, spec.header, f".smem_bytes = {spec.smem_bytes}"):
        assert part in unit.text


@pytest.mark.parametrize("synchronize", [False, True])
def test_a_launcher_passes_what_it_was_made_for_and_waits_when_asked(monkeypatch, synchronize):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    function = SimpleNamespace(ptr=99)
    Kernel("cuattn_x", function, (64, 1, 1), 512, synchronize).launcher(7)(STREAM, 1234, 0)
    assert cupy.launches == [(99, (7, 1, 1), (64, 1, 1), 512, STREAM, 1234)]
    assert cupy.waited == [STREAM] * synchronize


def test_every_thread_meets_the_context_of_a_device_once(monkeypatch):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(launch, "_thread", launch._Thread())

    def launch_twice_on_each():
        for device_id in (0, 1, 0, 1):
            assert launch.current_stream(device_id) == STREAM

    launch_twice_on_each()
    other = threading.Thread(target=launch_twice_on_each)
    other.start()
    other.join()
    assert len(cupy.met) == 4
    assert cupy.met.count(threading.get_ident()) == 2


def test_cupy_has_the_launch_that_is_used():
    """Its parameters by number and order; it needs no device."""
    needs.nvrtc()
    driver = importlib.import_module("cupy_backends.cuda.api.driver")
    assert re.fullmatch(
        r"launchKernel\(.* f, .* grid_dim_x, .* grid_dim_y, .* grid_dim_z, .* block_dim_x, "
        r".* block_dim_y, .* block_dim_z, .* shared_mem_bytes, .* stream, .* kernel_params, "
        r".* extra\)",
        inspect.getdoc(driver.launchKernel) or "",
    )


@pytest.mark.parametrize("grid", [-1, 0, 2**31])
def test_a_grid_that_no_device_launches_is_refused(grid):
    kernel = Kernel("cuattn_x", SimpleNamespace(ptr=99), (64, 1, 1), 0, synchronize=False)
    with pytest.raises(ValueError, match=f"cuattn_x: got a grid of {grid}; expected 1 to"):
        kernel.launcher(grid)
