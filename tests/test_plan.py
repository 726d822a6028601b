"""cuattn.planning: who takes a problem, with which kernels and grids; a device is plain data."""

import re
from dataclasses import replace

import needs
import pytest
import record
from plans import DEVICES, H200, LARGE, OPS, SMALL, deterministic, kernels, plan
from strategies import DTYPES
from tiles import RANKS

from cuattn.abi.structs import Wrt
from cuattn.errors import ArgumentError, CompileError, UnsupportedError
from cuattn.execute import unit_of
from cuattn.jit.compile import CompileOptions, compile_unit
from cuattn.planning.device import Device, known_device
from cuattn.planning.families import FAMILIES, every_spec
from cuattn.planning.plan import ITEMSIZE
from cuattn.planning.schedule import ceil_div
from cuattn.planning.select import MAX_GRID, plan_for
from cuattn.planning.simt import grid
from cuattn.planning.sm80 import SM80
from cuattn.planning.tuning import SM80_TILES, TILES
from cuattn.precompile import default_specs

TESLA_V100 = Device("sm_70", 80, 96 << 10)
BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [LARGE, SMALL, (1, 300, 200, 4, 2, 264, 33)])
def test_every_dtype_has_a_family_on_every_device(op, dtype, device, shape):
    made = plan(op, dtype, device, shape)
    assert made.launches
    for launch in made.launches:
        assert 0 < launch.grid <= MAX_GRID
        assert launch.kernel.smem_bytes <= device.smem_per_block
        assert launch.kernel.num_threads in range(32, 1025, 32)


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_what_a_plan_chooses_is_among_what_is_compiled_ahead(device):
    known, default = set(every_spec(device)), set(default_specs(device))
    assert default <= known
    for asked in record.problems():
        chosen = {launch.kernel for launch in plan_for(asked, device).launches}
        assert chosen <= known
        if asked.dtype == asked.out_dtype and asked.wrt in ((), ("q", "k", "v")):
            assert chosen <= default


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(("dtype", "family"), [("float32", "tf32x3"), ("float64", "dmma")])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"])
def test_long_accumulators_go_to_tensor_cores_where_there_are_some(op, dtype, family, arch):
    made = plan(op, dtype, known_device(arch))
    lacking = ("sm_75",) if dtype == "float32" else ("sm_75", "sm_86", "sm_120")
    assert made.family == ("simt" if arch in lacking else family)


@pytest.mark.parametrize("dims", [(65, 64), (64, 65), (256, 256)])
def test_long_heads_in_float32_keep_to_sums_that_round_to_nearest(dims):
    plan = plan_for(record.problem("forward", "float32", shape=(2, 512, 512, 8, 8, *dims)), H200)
    assert plan.family == "simt"
    assert dict(plan.refusals)["tf32x3"] == f"needs head dims of at most 64, got {max(dims)}"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_90a", "sm_120"])
def test_16_bit_goes_to_tensor_cores_from_sm_80_on(op, dtype, arch):
    for dims in ((1, 1), (64, 64), (192, 128), (33, 256)):
        made = plan(op, dtype, known_device(arch), (2, 512, 512, 8, 8, *dims))
        assert made.family == ("simt" if arch == "sm_75" else "sm80")
    longer = plan(op, dtype, known_device(arch), (2, 512, 512, 8, 8, 257, 64))
    assert longer.family == "simt"
    why = "sm_80 or later, got sm_75" if arch == "sm_75" else "head dims of at most 256, got 257"
    assert dict(longer.refusals)["sm80"] == f"needs {why}"


@pytest.mark.parametrize("op", OPS)
def test_the_plan_says_why_a_family_declined(op):
    assert plan(op, "float16", known_device("sm_75")).refusals == (
        ("sm80", "needs sm_80 or later, got sm_75"),
        ("tf32x3", "needs float32, got float16"),
        ("dmma", "needs float64, got float16"),
    )
    refusals = dict(plan(op, "float32", known_device("sm_75")).refusals)
    assert refusals["tf32x3"] == "needs sm_80 or later, got sm_75"
    refusals = dict(plan(op, "float64", known_device("sm_86")).refusals)
    assert refusals["dmma"] == "needs float64 at half the rate of float32, got sm_86"
    assert plan(op, "float32").refusals == (("sm80", "needs float16 or bfloat16, got float32"),)
    assert plan(op, "float16").refusals == ()


@pytest.mark.parametrize("op", OPS)
def test_a_problem_that_nobody_takes_lists_every_refusal(op):
    with pytest.raises(UnsupportedError) as caught:
        plan(op, "float32", TESLA_V100)
    message = str(caught.value)
    assert message.startswith(f"no kernel family takes this {op} on sm_70: ")
    for family in FAMILIES:
        assert f"{family.name}: needs " in message


@pytest.mark.parametrize("op", OPS)
def test_a_grid_beyond_the_launch_limit_is_refused_by_sentence(op):
    heads = 2**31 // 16  # seqlen 512 makes at least 16 tiles of 32 rows
    with pytest.raises(UnsupportedError, match=rf"needs at most {MAX_GRID} blocks, got \d+ in cua"):
        plan(op, "float32", shape=(heads, 4096, 4096, 1, 1, 64, 64))


def test_the_launch_limit_itself_is_taken():
    tile = TILES["tf32x3", "fwd", "float32"][0]
    made = plan("forward", "float32", shape=(MAX_GRID, 1, 1, 1, 1, 64, 64))
    assert made.launches[0].grid == MAX_GRID == grid("fwd", tile, made.problem)


@pytest.mark.parametrize(
    ("wrt", "expected"),
    [
        (("q", "k", "v"), ["prepare", "q", "kv"]),
        (("q",), ["prepare", "q"]),
        (("k",), ["prepare", "kv"]),
        (("k", "v"), ["prepare", "kv"]),
    ],
)
def test_a_backward_launches_what_it_is_asked_for_and_delta_first(wrt, expected):
    made = plan("backward", "float32", wrt=wrt)
    steps = [re.match(r"cuattn_bwd_([a-z]+)", launch.kernel.name)[1] for launch in made.launches]
    assert steps == expected


def test_a_forward_is_one_launch_and_needs_no_workspace():
    for dtype, family in (("bfloat16", "sm80_bf16"), ("float32", "tf32x3_f32")):
        made = plan("forward", dtype)
        assert kernels(made) == [f"cuattn_fwd_{family}"]
        assert made.workspace == ()
        assert made.num_splits == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_workspace_is_one_number_a_row(dtype):
    asked = record.problem("backward", dtype, shape=LARGE)
    rows = 2 * 16 * 4096
    made = plan_for(deterministic(asked), H200)
    assert made.workspace == (("delta", rows),)
    assert made.workspace_bytes == rows * ITEMSIZE[made.problem.accumulator]
    if dtype in ("float16", "bfloat16"):
        summed = dict(plan_for(asked, H200).workspace)
        assert summed == {"delta": rows, "dq_sum": rows * 64}
        wide = dict(plan("backward", dtype, out_dtype="float32").workspace)
        assert wide == summed | {"dout_cast": rows * 64 // 2}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0, 8, 8, 2, 2, 8, 8), (2, 8, 8, 0, 0, 8, 8)])
def test_nothing_to_write_is_no_launch(op, shape):
    assert plan(op, shape=shape).launches == ()


def test_without_rows_keys_still_get_their_zeros():
    made = plan("backward", shape=(2, 0, 8, 2, 2, 8, 8))
    assert [name.split("_")[2] for name in kernels(made)] == ["kv"]
    assert kernels(plan("forward", shape=(2, 0, 8, 2, 2, 8, 8))) == []


def test_without_keys_rows_still_get_their_zeros():
    assert len(plan("forward", shape=(2, 8, 0, 2, 2, 8, 8)).launches) == 1
    made = plan("backward", shape=(2, 8, 0, 2, 2, 8, 8))
    assert [name.split("_")[2] for name in kernels(made)] == ["prepare", "q"]
    made = plan("backward", "float16", shape=(2, 8, 0, 2, 2, 8, 8))
    assert [name.split("_")[2] for name in kernels(made)] == ["both"]
    made = plan("backward", "float16", shape=(2, 8, 0, 2, 2, 8, 8), out_dtype="float32")
    assert [name.split("_")[2] for name in kernels(made)] == ["prepare", "finish"]


@pytest.mark.parametrize("key", TILES, ids="-".join)
def test_small_problems_take_small_tiles_and_large_ones_large(key):
    """The smallest where no tile gives every SM a block, the largest where all do."""
    family, kernel, accumulator = BY_NAME[key[0]], *key[1:]
    tiles = TILES[key]
    op = "forward" if kernel == "fwd" else "backward"
    large, small = (record.problem(op, accumulator, shape=shape) for shape in (LARGE, SMALL))
    assert family.choose_tile(kernel, large, H200) == tiles[0]
    assert family.choose_tile(kernel, small, H200) == tiles[-1]


@pytest.mark.parametrize("key", TILES, ids="-".join)
def test_a_table_of_tiles_goes_from_large_to_small(key):
    family = BY_NAME[key[0]]
    tiles = TILES[key]
    areas = [tile.block_m * tile.block_n * tile.block_d for tile in tiles]
    assert areas == sorted(areas, reverse=True)
    assert len(tiles) <= len(RANKS)  # the shared suites reach every one
    its = [device for device in DEVICES if family.lacking(device) is None]
    smallest = min(device.smem_per_block for device in its)
    assert family.smem_bytes(key[1], tiles[-1], key[2]) <= smallest


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.arch)
def test_names_are_unique_symbols(device):
    specs = list(every_spec(device))
    names = [spec.name for spec in specs]
    assert len(set(names)) == len(names) == len(set(specs))
    assert all(re.fullmatch(r"cuattn_[a-z0-9_]+", name) for name in names)


@pytest.mark.parametrize("shape", [LARGE, SMALL, (3, 129, 65, 6, 3, 100, 200)])
def test_a_grid_covers_every_row_key_and_head_dim(shape):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, dim, dim_v = shape
    owned = {"fwd": (seqlen_q, heads_q, dim_v), "bwd_q": (seqlen_q, heads_q, dim)}
    owned["bwd_kv"] = (seqlen_k, heads_kv, max(dim, dim_v))
    for launch in (*plan("forward", shape=shape).launches, *plan("backward", shape=shape).launches):
        config = dict(launch.kernel.config)
        if "block_m" not in config:
            rows = batch * heads_q * seqlen_q  # prepare: eight lanes a row
            lanes = launch.kernel.num_threads * config["rows_per_thread"]
            assert launch.grid == ceil_div(rows * 8, lanes)
            continue
        kernel = re.match(r"cuattn_(fwd|bwd_q|bwd_kv)", launch.kernel.name)[1]
        length, heads, dims = owned[kernel]
        own = config["block_n" if kernel == "bwd_kv" else "block_m"]
        blocks = ceil_div(length, own) * ceil_div(dims, config["block_d"])
        assert launch.grid == blocks * heads * batch


def test_only_the_16_bit_loops_may_spill_and_little():
    for spec in every_spec(H200):
        config = dict(spec.config)
        tight = "warp_rows" in config and "finish" not in spec.name
        assert spec.max_spill_bytes == 0 or tight
        assert spec.max_spill_bytes <= 128


def one_of_each_kernel():
    """The smallest tile of every kernel, family and accumulator."""
    for family, kernel, accumulator in TILES:
        wrt = {"fwd": Wrt(0), "bwd_q": Wrt.Dq, "bwd_kv": Wrt.Dk | Wrt.Dv}[kernel]
        tile = TILES[family, kernel, accumulator][-1]
        yield BY_NAME[family].spec(kernel, tile, accumulator, accumulator, wrt)
    for kernel in ("fwd", "bwd", "bwd_one", "bwd_both", "bwd_q", "bwd_kv"):
        table = SM80_TILES["bwd" if kernel == "bwd_kv" else kernel, 64]
        yield SM80.spec(kernel, 64, table[-1], "bfloat16", "bfloat16")


@pytest.mark.parametrize("spec", list(one_of_each_kernel()), ids=lambda spec: spec.name)
def test_a_kernel_asserts_the_shared_memory_of_its_plan(spec):
    """A sum that differs does not compile; that ours does is what test_compile shows."""
    needs.nvrtc()
    config = dict(spec.config) | {"smem_bytes": spec.smem_bytes + 4}
    wrong = replace(spec, config=tuple(config.items()), smem_bytes=spec.smem_bytes + 4)
    with pytest.raises(CompileError, match="the plan and the kernel disagree"):
        compile_unit(unit_of(wrong), CompileOptions("sm_80"))


def test_a_target_is_known_by_its_usual_names():
    assert known_device("sm_90") == known_device("sm_90a") == H200
    assert H200.capability == 90
    assert known_device("sm_121").capability == 121


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(ArgumentError, match=r"device: got 'sm_42'; expected one of .*sm_90a"):
        known_device("sm_42")


def test_a_plan_is_plain_data():
    assert hash(plan()) == hash(plan())
    assert plan("backward") == plan("backward") != plan("forward")
