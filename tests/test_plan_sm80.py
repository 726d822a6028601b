"""cuattn.planning.sm80 and its cost: tiles, splits and kernels of 16-bit problems."""

import itertools
import re
from dataclasses import replace

import pytest
import record
from plans import DEVICES, H200, LARGE, OPS, SMALL, deterministic, kernels, plan
from tiles import RANKS

from cuattn.planning import sm80
from cuattn.planning.cost import blocks_of_sm
from cuattn.planning.device import known_device
from cuattn.planning.problem import Band
from cuattn.planning.schedule import RangeSchedule, ceil_div
from cuattn.planning.select import plan_for
from cuattn.planning.sm80 import SM80, grid, loop, smem_bytes
from cuattn.planning.tuning import BUCKETS, SM80_TILES


def test_16_bit_gradients_are_summed_together_unless_bits_must_repeat():
    def steps(asked):
        names = (launch.kernel.name for launch in plan_for(asked, H200).launches)
        return [re.match(r"cuattn_bwd_(\w+?)_f16", name)[1] for name in names]

    asked = record.problem("backward", "float16", shape=LARGE)
    together = ["prepare", "sm80", "finish_sm80"]
    apart = ["prepare", "q_sm80", "kv_sm80"]
    assert steps(asked) == steps(replace(asked, deterministic=False)) == together
    assert steps(deterministic(asked)) == apart
    for wrt, expected in ((("q",), apart[:2]), (("k", "v"), [apart[0], apart[2]])):
        some = record.problem("backward", "float16", shape=LARGE, wrt=wrt)
        assert steps(some) == steps(deterministic(some)) == expected
    some = record.problem("backward", "float16", shape=LARGE, wrt=("q", "v"))
    assert steps(some) == together


@pytest.mark.parametrize("block_d", BUCKETS)
def test_where_one_tile_holds_all_keys_a_16_bit_backward_is_one_kernel(block_d):
    """The smallest that does, for any gradients and whether bits must repeat or not."""
    tiles = SM80_TILES["bwd_one", block_d]
    for seqlen_k in (1, *(tile.block_n + past for tile in tiles for past in (0, 1))):
        shape = (3, 500, seqlen_k, 6, 2, block_d, block_d - 5)
        holding = [tile.block_n for tile in tiles if tile.block_n >= seqlen_k]
        for wrt, repeats in itertools.product((("q", "k", "v"), ("q",), ("k", "v")), (None, True)):
            asked = record.problem("backward", "float16", shape=shape, wrt=wrt)
            made = plan_for(replace(asked, deterministic=repeats), H200)
            if not holding:
                assert "bwd_one" not in made.launches[0].kernel.name
                continue
            (launch,) = made.launches
            assert kernels(made) == ["cuattn_bwd_one_sm80_f16"]
            assert (launch.grid, made.workspace) == (3 * 2, ())
            assert dict(launch.kernel.config)["block_n"] == min(holding)


def test_a_backward_of_few_keys_that_is_more_than_one_kernel():
    """Dout is rounded first, or the device has too little shared memory."""
    few = (1, 64, 64, 2, 2, 256, 256)
    for made in (
        plan("backward", "float16", shape=few, out_dtype="float32"),
        plan("backward", "float16", known_device("sm_86"), few),
    ):
        assert "prepare" in made.launches[0].kernel.name


@pytest.mark.parametrize("block_d", BUCKETS)
@pytest.mark.parametrize("wrt", [("q", "k", "v"), ("q",), ("k", "v"), ("v",)])
def test_where_both_loops_fit_the_device_a_16_bit_backward_is_one_kernel(block_d, wrt):
    """Each has its blocks, those that own keys before those that own queries."""
    asked = record.problem(
        "backward", "float16", shape=(1, 300, 200, 4, 2, block_d, block_d - 5), wrt=wrt
    )
    made = plan_for(asked, H200)
    assert plan_for(deterministic(asked), H200).launches == made.launches
    (launch,) = made.launches
    assert kernels(made) == ["cuattn_bwd_both_sm80_f16"]
    assert made.workspace == ()
    config = dict(launch.kernel.config)
    keys = ceil_div(200, config["block_n"]) * 2
    queries = ceil_div(300, launch.kernel.num_threads // 32 * 16) * 4
    assert launch.grid == keys * (wrt != ("q",)) + queries * ("q" in wrt) <= H200.num_sms


def first_kernel(*shape, **how):
    return plan("backward", "float16", shape=shape, **how).launches[0].kernel.name


def test_both_loops_run_side_by_side_only_where_that_is_short():
    """Not where blocks wait for others, nor where one has many rows, many heads or many keys."""
    assert "bwd_both" in first_kernel(1, 512, 256, 1, 1, 64, 64)
    assert "prepare" in first_kernel(8, 512, 512, 16, 16, 64, 64)
    assert "prepare" in first_kernel(1, 4096, 256, 1, 1, 64, 64)
    assert "prepare" in first_kernel(1, 512, 256, 8, 1, 64, 64)
    assert "prepare" in first_kernel(1, 16, 4096, 1, 1, 64, 64)


def test_a_loop_that_does_not_run_limits_nothing():
    assert "bwd_both" in first_kernel(1, 4096, 256, 1, 1, 64, 64, wrt=("q",))
    assert "bwd_both" in first_kernel(1, 16, 4096, 1, 1, 64, 64, wrt=("k", "v"))


def test_blocks_that_share_an_sm_may_not_be_long():
    """The third row of head_dim 64 has three an SM: 64 heads of 192 keys take it, not 48 of 384."""
    tile = SM80_TILES["bwd_both", 64][2]
    assert tile.min_blocks == 3
    few, many = (
        record.problem("backward", "float16", shape=(1, seqlen, seqlen, heads, heads, 64, 64))
        for seqlen, heads in ((192, 64), (384, 32))
    )
    assert grid("bwd_both", tile, many) <= grid("bwd_both", tile, few) <= 3 * H200.num_sms
    assert SM80.both_tile(few, H200) == tile
    assert SM80.both_tile(many, H200) is None


def test_an_sm_holds_as_many_blocks_as_its_shared_memory():
    """An A100 has 164 KB: two blocks of 81.5, one of 96."""
    tile = SM80_TILES["fwd", 128][0]
    assert tile.min_blocks == 2
    size = smem_bytes("fwd", 128, tile)
    assert size == 96 << 10
    assert blocks_of_sm(tile, size, H200) == 2
    assert blocks_of_sm(tile, size, known_device("sm_80")) == 1
    assert blocks_of_sm(tile, 81 << 10, known_device("sm_80")) == 2


@pytest.mark.parametrize("head_dim_v", [8, 61, 128, 129, 200, 256])
def test_a_merge_has_room_for_every_number_of_a_row(head_dim_v):
    made = plan("forward", "bfloat16", shape=(1, 3, 9000, 1, 2, 8, head_dim_v))
    # The problem of test_forward.test_many_parts_of_the_keys: of more parts than a warp has lanes.
    assert made.num_splits > 32 or head_dim_v == 8
    config = dict(made.launches[1].kernel.config)
    assert config["block_d"] == (128 if head_dim_v <= 128 else 256)


def test_few_query_tiles_split_the_keys_to_fill_the_device():
    made = plan("forward", "bfloat16", shape=(1, 128, 65536, 16, 16, 128, 128))
    assert made.num_splits > 1
    own, merge = made.launches
    assert 132 <= own.grid <= 2 * 132
    assert "fwd_merge" in merge.kernel.name
    rows = 16 * 128
    sizes = {"part_out": made.num_splits * rows * 128, "part_lse": made.num_splits * rows}
    assert dict(made.workspace) == sizes
    short = plan("forward", "bfloat16", shape=(1, 128, 128, 1, 1, 128, 128))
    assert short.num_splits == 1  # a split of so few keys would not pay


def test_a_part_of_the_keys_may_be_empty_for_some_rows():
    """The problem of test_forward.test_rows_that_see_nothing_of_a_part_of_the_keys."""
    asked = record.problem("forward", "bfloat16", shape=(1, 1030, 1030, 1, 1, 64, 64))
    made = plan_for(asked, H200)
    config = dict(made.launches[0].kernel.config)
    schedule = RangeSchedule.of(asked, config["block_m"], config["block_n"])
    assert len(list(schedule.key_tiles(0))) < made.num_splits


@pytest.mark.parametrize("shape", [LARGE, SMALL, (3, 129, 65, 6, 3, 100, 200)])
@pytest.mark.parametrize("repeats", [False, True])
def test_a_16_bit_grid_covers_every_row_and_key(shape, repeats):
    batch, seqlen_q, seqlen_k, heads_q, heads_kv, *_ = shape
    forward, backward = (record.problem(op, "bfloat16", shape=shape) for op in OPS)
    plans = plan_for(forward, H200), plan_for(replace(backward, deterministic=repeats), H200)
    for made in plans:
        for launch in made.launches:
            config, name = dict(launch.kernel.config), launch.kernel.name
            if "warp_rows" not in config:
                continue
            rows = ceil_div(seqlen_q, config["block_m"]) * heads_q * batch
            keys = ceil_div(seqlen_k, config["block_n"]) * heads_kv * batch
            if "finish" in name:
                numbers = config["block_m"] * config["block_d"]
                assert launch.grid * launch.kernel.num_threads * 4 == rows * numbers
            elif "fwd" in name or "bwd_q" in name:
                assert launch.grid == rows * made.num_splits
            elif "bwd_both" in name:
                own = launch.kernel.num_threads // 32 * 16
                assert launch.grid == keys + ceil_div(seqlen_q, own) * heads_q * batch
            else:
                assert launch.grid == keys


@pytest.mark.parametrize("key", SM80_TILES, ids=lambda key: f"{key[0]}-{key[1]}")
def test_16_bit_tiles_go_from_large_to_small_and_the_last_fits_all(key):
    kernel, block_d = key
    tiles = SM80_TILES[key]
    assert len(tiles) <= len(RANKS)
    if kernel == "bwd_both":  # in the order in which they are tried
        return
    areas = [tile.block_m * tile.block_n for tile in tiles]
    assert areas == sorted(areas, reverse=True)
    if kernel == "bwd_one":  # chosen by another rule, and nothing depends on its fitting
        return
    smallest = min(device.smem_per_block for device in DEVICES if SM80.lacking(device) is None)
    assert smem_bytes(kernel, block_d, tiles[-1]) <= smallest
    op = "forward" if kernel == "fwd" else "backward"

    def chosen(batch, seqlen, device=H200):
        shape = (batch, seqlen, seqlen, 16, 16, block_d, block_d)
        return SM80.choose_tile(kernel, record.problem(op, "bfloat16", shape=shape), device)

    assert chosen(2, 4096) == tiles[0]
    assert {
        chosen(batch, seqlen, device)
        for batch, seqlen in itertools.product((1, 4, 64, 512), (8, 32, 64, 300, 1024))
        for device in DEVICES
        if SM80.lacking(device) is None
    } >= set(tiles[1:])  # no row is there for nothing


@pytest.mark.parametrize(("larger", "rank"), [(1.015, 0), (1.025, 1)])
def test_of_estimates_that_are_equal_the_larger_tile_counts(monkeypatch, larger, rank):
    tiles = SM80_TILES["fwd", 64]
    times = dict(zip(tiles, (larger, 1.0, 3.0), strict=True))
    monkeypatch.setattr(sm80, "best_splits", lambda tile, *_: (times[tile], 1))
    asked = record.problem("forward", "bfloat16", shape=LARGE)
    assert SM80.choose_tile("fwd", asked, H200) == tiles[rank]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_few_blocks_fewer_than_sms_are_better_than_twice_as_many_small_ones(head_dim):
    heads = 2048 // head_dim
    shape = (1, 1024, 1024, heads, heads, head_dim, head_dim)
    asked = record.problem("backward", "bfloat16", shape=shape)
    asked = replace(asked, band=Band.clamped(None, None, 1024, 1024))
    tile = SM80.choose_tile("bwd", asked, H200)
    assert tile == SM80_TILES["bwd", head_dim][0]
    assert grid("bwd", tile, asked) == 128 < H200.num_sms


def test_keys_are_split_where_that_pays():
    """Not to fill a device that is nearly full, as merging many rows takes longer than it saves."""
    full = plan("forward", "bfloat16", shape=(1, 1024, 1024, 16, 16, 128, 128))
    assert full.num_splits == 1
    assert dict(full.launches[0].kernel.config)["block_m"] == 64
    long = plan("forward", "bfloat16", shape=(1, 1, 65536, 4, 4, 128, 128))
    assert 32 <= long.num_splits <= 264


@pytest.mark.parametrize("kernel", ["fwd", "bwd", "bwd_q", "bwd_kv"])
def test_the_estimate_grows_with_heads_and_seqlen(kernel):
    def microseconds(heads, seqlen):
        shape = (1, seqlen, seqlen, heads, heads, 64, 64)
        asked = record.problem("forward", "bfloat16", shape=shape)
        tile = SM80.fitting_tiles(kernel, 64, H200)[0]
        return loop(kernel, tile, asked, H200).microseconds()

    by_seqlen = [microseconds(8, seqlen) for seqlen in (128, 1024, 1100, 4096, 16384)]
    assert by_seqlen == sorted(by_seqlen)
    few, some, many = [
        loop(kernel, SM80.fitting_tiles(kernel, 64, H200)[0], grouped, H200).microseconds()
        for grouped in (
            record.problem("forward", "bfloat16", shape=(1, 1024, 1024, heads, 64, 64, 64))
            for heads in (64, 128, 512)
        )
    ]
    # More heads, or longer blocks, of as many key heads; what a block costs once is in neither.
    assert many - some == pytest.approx(6 * (some - few))
    by_heads = [microseconds(heads, 1024) for heads in (1, 8, 64, 512)]
    assert by_heads == sorted(by_heads)
    assert by_heads[-1] > 4 * by_heads[1]


def test_the_estimate_of_a_full_device_is_what_the_table_says():
    """Of a kernel at its measured rate: FLOPs over FLOP/s, but for the last blocks."""
    shape = (4, 4096, 4096, 33, 33, 128, 128)
    asked = record.problem("forward", "bfloat16", shape=shape)
    tile = SM80_TILES["fwd", 128][0]
    flops = 4 * 4 * 33 * 4096 * (4096 * 128) / 2  # causal
    estimate = loop("fwd", tile, asked, H200).microseconds()
    assert estimate == pytest.approx(flops / tile.tflops / 1e6, rel=0.05)
