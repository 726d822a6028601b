"""The range schedule: its tile rule is its element rule, the transpose is the same rule, and the
kernels walk the same tiles.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from instructions import Emulated

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


WALK = """
  if (thread != 0) return;
  Shape shape{};
  shape.seqlen_q = its.given[0], shape.seqlen_k = its.given[1];
  shape.band_lower = its.given[2], shape.band_upper = its.given[3];
  const softmax::RangeSchedule schedule(shape, its.given[4], its.given[5]);
  const int across = its.given[6];
  const auto kind = [&](int m, int n) {
    return 1 + (schedule.kind(m, n) == softmax::TileKind::kFull);
  };
  for (int m = 0; m * schedule.block_m < shape.seqlen_q; ++m) {
    const softmax::Range tiles = schedule.key_tiles(m);
    for (int n = tiles.begin; n < tiles.end; ++n) its.by_rows[m * across + n] = kind(m, n);
  }
  for (int n = 0; n * schedule.block_n < shape.seqlen_k; ++n) {
    const softmax::Range tiles = schedule.query_tiles(n);
    for (int m = tiles.begin; m < tiles.end; ++m) its.by_keys[m * across + n] = kind(m, n);
  }
  for (int row = 0; row < across; ++row) {
    for (int key = 0; key < across; ++key) {
      const softmax::Range keys = schedule.keys_of(row), rows = schedule.rows_of(key);
      its.seen[row * across + key] = (keys.begin <= key && key < keys.end) +
                                     2 * (rows.begin <= row && row < rows.end);
    }
  }
"""


@settings(deadline=None)  # the first one builds
@given(schedules())
def test_kernels_walk_the_same_tiles(schedule: RangeSchedule) -> None:
    """softmax/schedule.cuh, with rows and keys past the end too: nobody sees such a key."""
    run, across = Emulated(), 45
    band = schedule.band
    sizes = (schedule.seqlen_q, schedule.seqlen_k, band.lower, band.upper)
    out = {name: np.zeros((across, across), np.int32) for name in ("by_rows", "by_keys", "seen")}
    by_rows, by_keys, by_elements = run(
        WALK,
        out,
        name="schedule",
        includes=("softmax/schedule.cuh",),
        given=np.array([*sizes, schedule.block_m, schedule.block_n, across], np.int32),
    )
    want = np.zeros((across, across), np.int32)
    for m_block in range(schedule.num_m_blocks):
        for n_block, kind in schedule.key_tiles(m_block):
            want[m_block, n_block] = 1 + (kind is TileKind.FULL)
    np.testing.assert_array_equal(by_rows, want)
    np.testing.assert_array_equal(by_keys, want)
    rows, keys = np.indices((across, across))
    visible = (band.lower <= keys - rows) & (keys - rows <= band.upper)
    visible &= keys < schedule.seqlen_k
    np.testing.assert_array_equal(by_elements, 3 * visible)


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
