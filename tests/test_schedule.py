"""The range schedule: its tile rule is its element rule, and the transpose is the same rule."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuattn.planning.problem import AttentionProblem, Band, Layouts
from cuattn.planning.schedule import RangeSchedule, TileKind, ceil_div, num_visible


@st.composite
def schedules(draw: st.DrawFn) -> RangeSchedule:
    seqlen_q = draw(st.integers(0, 40))
    seqlen_k = draw(st.integers(0, 40))
    bounds = sorted(draw(st.lists(st.integers(-60, 60), min_size=2, max_size=2)))
    lower = None if draw(st.booleans()) else bounds[0]
    upper = None if draw(st.booleans()) else bounds[1]
    band = Band.clamped(lower, upper, seqlen_q, seqlen_k)
    return RangeSchedule(
        seqlen_q, seqlen_k, band, draw(st.integers(1, 12)), draw(st.integers(1, 12))
    )


def seen(schedule: RangeSchedule) -> np.ndarray:
    """The element rule as a matrix."""
    return np.array(
        [
            [schedule.visible(i, j) for j in range(schedule.seqlen_k)]
            for i in range(schedule.seqlen_q)
        ],
        bool,
    ).reshape(schedule.seqlen_q, schedule.seqlen_k)


@given(schedules())
def test_tile_rule_equals_element_rule(schedule: RangeSchedule) -> None:
    pairs = seen(schedule)
    for m_block in range(schedule.num_m_blocks):
        visited = dict(schedule.key_tiles(m_block))
        assert list(visited) == sorted(visited)
        for n_block in range(schedule.num_n_blocks):
            tile = pairs[slice(*schedule.rows(m_block)), slice(*schedule.keys(n_block))]
            assert (n_block in visited) == tile.any()
            if visited.get(n_block) is TileKind.FULL:
                assert tile.all()
                assert (n_block + 1) * schedule.block_n <= schedule.seqlen_k
            elif n_block in visited and tile.shape[1] == schedule.block_n:
                assert not tile.all()


@given(schedules())
def test_transpose_visits_the_same_tiles(schedule: RangeSchedule) -> None:
    by_rows = {
        (m_block, n_block, kind)
        for m_block in range(schedule.num_m_blocks)
        for n_block, kind in schedule.key_tiles(m_block)
    }
    by_keys = {
        (m_block, n_block, kind)
        for n_block in range(schedule.num_n_blocks)
        for m_block, kind in schedule.query_tiles(n_block)
    }
    assert by_rows == by_keys
    assert schedule.num_tiles() == len(by_rows)


@given(schedules())
def test_num_visible_counts_the_pairs(schedule: RangeSchedule) -> None:
    strides = (0, 0, 0, 0)
    problem = AttentionProblem(
        op="forward",
        dtype="float32",
        out_dtype="float32",
        batch=1,
        seqlen_q=schedule.seqlen_q,
        seqlen_k=schedule.seqlen_k,
        num_heads_q=1,
        num_heads_kv=1,
        head_dim=1,
        head_dim_v=1,
        band=schedule.band,
        softmax_scale=1.0,
        deterministic=None,
        layouts=Layouts(strides, strides, strides, strides),
    )
    assert num_visible(problem) == seen(schedule).sum()


@given(st.integers(0, 30), st.integers(0, 30), st.integers(-99, 99), st.integers(-99, 99))
def test_clamping_a_band_keeps_its_meaning(sq: int, sk: int, lower: int, upper: int) -> None:
    given_rule = RangeSchedule(sq, sk, Band(lower, upper), 4, 4)
    clamped = RangeSchedule(sq, sk, Band.clamped(lower, upper, sq, sk), 4, 4)
    if lower <= upper:
        assert np.array_equal(seen(given_rule), seen(clamped))


def test_ceil_div() -> None:
    assert [ceil_div(a, 4) for a in (0, 1, 4, 5)] == [0, 1, 1, 2]
