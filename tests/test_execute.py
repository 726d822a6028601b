"""cuattn.execute without a GPU: what is launched, in which order, with which pointers."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import record

from cuattn import execute
from cuattn._arrays import LAYOUTS
from cuattn.abi import structs
from cuattn.abi.template import Template
from cuattn.jit.launch import Kernel
from cuattn.planning.device import known_device
from cuattn.planning.plan import parameters
from cuattn.planning.select import plan_for

H200 = known_device("sm_90a")
BSHD = LAYOUTS["bshd"]
TENSORS = ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "dlse")
ARRAYS = {name: 256 * (i + 1) for i, name in enumerate((*TENSORS, "lse"))}
FRESH = 1 << 40


class FakeArray:
    """What execute reads of a CuPy array."""

    def __init__(self, pointer, dtype=np.float32):
        self.data = SimpleNamespace(ptr=pointer, device_id=0)
        self.dtype = np.dtype(dtype)


class FakeCupy:
    """What execute asks of CuPy: memory, each time at another address."""

    def __init__(self):
        self.made = []
        self.cuda = SimpleNamespace(alloc=self.alloc)

    def alloc(self, nbytes):
        self.made.append(("alloc", nbytes))
        return SimpleNamespace(ptr=FRESH + len(self.made))

    def zeros(self, size, dtype):
        self.made.append(("zeros", size, np.dtype(dtype)))
        return FakeArray(FRESH + len(self.made), dtype)


@pytest.fixture
def launched(monkeypatch):
    """The launches of every call, as (kernel name, grid, pointers); nothing is compiled."""
    launches = []

    def load(unit, arch, smem_bytes):
        assert arch == "sm_90a"

        def launcher(grid):
            struct = structs.FwdParams if "FwdParams" in unit.text else structs.BwdParams
            return lambda args: launches.append((unit.name, grid, pointers(struct, *args)))

        return SimpleNamespace(launcher=launcher)

    monkeypatch.setitem(sys.modules, "cupy", FakeCupy())
    monkeypatch.setattr(execute, "load", load)
    monkeypatch.setattr(execute, "build", lambda units, options: ())
    monkeypatch.setattr(execute, "cuda_device", lambda device_id: H200)
    execute.forget()
    yield launches
    execute.forget()


def pointers(struct, params):
    """Every pointer of a packed struct by its template name."""
    values = np.frombuffer(params.tobytes(), struct.dtype)[0]
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
        gradients = {"d" + name: arrays["d" + name] for name in asked.wrt}
        execute.backward(asked, BSHD, q, k, v, out, lse, arrays["dout"], None, gradients)
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
    for _, _, given in launched:
        assert (given["part_out"], given["part_lse"]) == (FRESH + 1, FRESH + 2)
    assert sys.modules["cupy"].made == [("alloc", 4 * size) for _, size in plan.workspace]


def test_a_backward_launches_its_plan_in_order_with_every_pointer(launched):
    asked = run("backward")
    planned = plan_for(asked, H200).launches
    assert [(name, grid) for name, grid, _ in launched] == [
        (launch.kernel.name, launch.grid) for launch in planned
    ]
    for _, _, given in launched:
        assert given.pop("delta") == FRESH + 1
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
    gradients = {"dq": half, "dk": half, "dv": half}
    execute.backward(asked, BSHD, half, half, half, single, single, None, single, gradients)
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


def test_the_next_call_like_this_one_finds_its_executable(launched):
    asked = run("forward")
    assert execute.executable(asked, 0) is execute.executable(asked, 0)
    assert execute.executable(asked, 0) is not execute.executable(asked, 1)


def test_executables_are_bounded(launched, monkeypatch):
    monkeypatch.setattr(execute, "_MAX_EXECUTABLES", 3)
    made = [run("forward", shape=(1, 8, 8, 1, 1, 8, dim)) for dim in range(1, 7)]
    assert len(launched) == 6
    kept = [each.plan.problem for each in execute._executables.values()]
    assert kept == made[-3:]  # the oldest went


def test_a_unit_names_its_kernel_configuration_and_launch_bounds():
    spec = plan_for(record.problem("forward", "float32"), H200).launches[0].kernel
    unit = execute.unit_of(spec)
    assert unit.name == spec.name
    assert unit.num_threads == spec.num_threads
    bounds = f"__launch_bounds__({spec.num_threads}, {spec.min_blocks})"
    for part in (spec.name, bounds, spec.header, f".smem_bytes = {spec.smem_bytes}"):
        assert part in unit.text


class FakeFunction:
    """What CuPy's function takes."""

    def __init__(self):
        self.calls = []

    def __call__(self, grid, block, args, shared_mem):
        self.calls.append((grid, block, args, shared_mem))


@pytest.mark.parametrize("synchronize", [False, True])
def test_a_launcher_passes_what_it_was_made_for_and_waits_when_asked(monkeypatch, synchronize):
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append(1))
    cuda = SimpleNamespace(get_current_stream=lambda: stream)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    function = FakeFunction()
    launch = Kernel("cuattn_x", function, (64, 1, 1), 512, synchronize).launcher(7)
    launch(("params",))
    assert function.calls == [((7, 1, 1), (64, 1, 1), ("params",), 512)]
    assert waited == [1] * synchronize


@pytest.mark.parametrize("grid", [-1, 0, 2**31])
def test_a_grid_that_no_device_launches_is_refused(grid):
    kernel = Kernel("cuattn_x", FakeFunction(), (64, 1, 1), 0, synchronize=False)
    with pytest.raises(ValueError, match=f"cuattn_x: got a grid of {grid}; expected 1 to"):
        kernel.launcher(grid)
