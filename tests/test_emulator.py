"""What the emulator sees that a GPU hides: each fault in a kernel of a few lines."""

import dataclasses

import needs
import numpy as np
import pytest
from emulator import build
from emulator.launch import EmulationError, settings
from instructions import Emulated, unit_of


@pytest.fixture
def run():
    return Emulated()


@pytest.fixture
def set_to(monkeypatch):
    """Other settings of launches, for one test."""

    def change(**values):
        for name, value in values.items():
            monkeypatch.setattr(settings, name, value)

    return change


#: 64 float32 in shared memory, and this thread's place among them.
PLACE = "f32* place = reinterpret_cast<f32*>(shared); place[thread] = thread;\n"
COPY = "const u32 mine = ptx::shared_address(shared) + 16 * thread;\nu32 four[4];\n"

#: By name: the lines, and what the message must say.
FAULTS = {
    "a read races with a write": (
        PLACE + "its.out[thread] = place[(thread + 32) % 64];",
        r"shared memory at \d+ is read, and no(body has| barrier)",
    ),
    "a read races with a write of another warp": (
        PLACE + "ptx::sync_cta(); place[thread] = 1; ptx::sync_warp();\n"
        "its.out[thread] = place[(thread + 32) % 64];",
        r"no barrier is between that and the (write|read) of thread \d+: a race",
    ),
    "a write races with a read": (
        PLACE + "ptx::sync_cta(); its.out[thread] = place[(thread + 1) % 64];\nplace[thread] = 7;",
        r"no barrier is between that and the (read|write) of thread \d+: a race",
    ),
    "two threads write one place": (
        PLACE + "ptx::sync_cta(); place[thread % 8] = thread;",
        r"written, and no barrier is between that and the write of thread \d+: a race",
    ),
    "the barrier is another pair's": (
        PLACE + "ptx::sync_named(1 + thread / 32, 32);\n"
        "its.out[thread] = place[(thread + 32) % 64];",
        r"is read, and no",
    ),
    "nobody has written what is read": (
        "its.out[thread] = reinterpret_cast<f32*>(shared)[thread];",
        r"shared memory at \d+ is read, and nobody has written it",
    ),
    "past the end of shared memory": (
        "reinterpret_cast<f32*>(shared)[thread + 512] = 1;",
        r"writes 4 bytes of shared memory at \d+: the CTA has 2048",
    ),
    "before shared memory, by its address": (
        "ptx::store_shared(ptx::shared_address(shared) - 4, 1u);",
        r"writes 4 bytes of shared memory at -4: the CTA has 2048",
    ),
    "misaligned in shared memory": (
        "ptx::store_shared(ptx::shared_address(shared) + 4 + 16 * thread, {1, 2, 3, 4});",
        r"writes 16 bytes of shared memory at \d+: the address is no multiple of 16",
    ),
    "past the end of an array": (
        "its.out[thread + 1] = 1;",
        r"writes 4 bytes outside of every array; the nearest is out, of 256 bytes: this is at byte "
        r"256 of it",
    ),
    "before an array": (
        "its.out[thread] = its.a[-1];",
        r"reads 4 bytes outside of every array; the nearest is a, of 256 bytes: this is 4 before",
    ),
    "into an input": ("its.a[thread] = 1;", r"writes 4 bytes of a at byte \d+: an input"),
    "a misaligned vector": (
        "reinterpret_cast<float4*>(its.out + 1)[0] = make_float4(0, 0, 0, 0);",
        r"an address is no multiple of 16",
    ),
    "an index of registers": (
        "f32 r[4]; for (int i = 0; i <= its.a[63]; ++i) r[i] = i; its.out[thread] = r[2];",
        r"index 4 is out of the bounds of an array",
    ),
    "a copy is read before its wait": (
        COPY + "ptx::async_copy_16(mine, its.a + thread / 4 * 4); ptx::async_commit();\n"
        "ptx::load_shared(four, mine);",
        r"is read while a copy to it is under way, which ends with a wait of thread \d+",
    ),
    "the wait is for a group before": (
        COPY + "ptx::async_copy_16(mine, its.a + thread / 4 * 4); ptx::async_commit();\n"
        "ptx::async_wait<1>(); ptx::load_shared(four, mine);",
        r"is read while a copy to it is under way",
    ),
    "the copy is of no group yet": (
        COPY + "ptx::async_copy_16(mine, its.a + thread / 4 * 4);\n"
        "ptx::async_wait<0>(); ptx::load_shared(four, mine);",
        r"is read while a copy to it is under way",
    ),
    "a copy of another thread, without a barrier": (
        COPY + "ptx::async_copy_16(mine, its.a + thread / 4 * 4); ptx::async_commit();\n"
        "ptx::async_wait<0>(); ptx::load_shared(four, mine ^ 512);",
        r"is read",
    ),
    "a copy into what another still reads": (
        COPY + "ptx::store_shared(mine, 1u); ptx::sync_cta(); ptx::load_shared(mine ^ 512);\n"
        "ptx::async_copy_16(mine, its.a + thread / 4 * 4);",
        r"written, and no barrier is between that and the read|read while a copy to it is under",
    ),
    "a copy from past the end of an array": (
        COPY + "ptx::async_copy_16(mine, its.a + 64);",
        r"reads 16 bytes outside of every array; the nearest is a",
    ),
    "a matrix is read that other lanes wrote": (
        "const u32 mine = ptx::shared_address(shared) + 512 * (thread / 32);\n"
        "if (thread % 4 == 0) for (int k = 0; k < 4; ++k) {\n"
        "ptx::store_shared(mine + 128 * k + thread % 32 / 4 * 16, {1, 1, 1, 1});\n}\n"
        "u32 r[4]; ptx::load_matrix(r, mine + 16 * (thread % 32));",
        r"shared memory at \d+ is read, and no(body has| barrier)",
    ),
    "past the registers of a struct": (
        "struct { f32 data[4] = {}; f32 at(int i) const { return data[i]; } } held;\n"
        "its.out[thread] = held.at(int(its.a[0]) + 2);",
        r"index 6 is out of the bounds of an array",
    ),
    "a barrier of those that are left": (
        PLACE + "if (thread < 32) return;\n"
        "ptx::sync_named(1, 32); its.out[thread] = place[thread - 32];",
        r"shared memory at \d+ is read, and no(body has| barrier)",
    ),
    "a barrier of a number below 0": (
        "ptx::sync_named(1, int(its.a[0]) - 36);",
        r"barrier 1 of -32 threads",
    ),
    "some do not come to a barrier": (
        "if (thread < 32) ptx::sync_named(1, 64);",
        r"nobody can go on\n  threads 0 to 31 wait at barrier 1 \(32 of 64 threads\) at .*:\d+\n"
        r"  threads 32 to 63 ended",
    ),
    "half a warp does not come to a shuffle": (
        "f32 x = thread; if (thread % 32 < 16) x = ptx::shuffle_xor(x, 1); its.out[thread] = x;",
        r"nobody can go on\n  threads 0 to 15 wait in shfl.sync at .*\n  threads 16 to 31 ended",
    ),
    "two instructions at once": (
        "if (thread % 2) ptx::sync_warp(); else ptx::any_of_warp(true);",
        r"executes (\S+), while lane \d+ of its warp executes (?!\1)\S+ at .*: all lanes must",
    ),
    "a warp divided at a barrier": (
        "if (thread % 2) {\nptx::sync_cta();\n} else {\nptx::sync_cta();\n}",
        r"barrier 0: lanes of warp \d wait at it in .* and ",
    ),
    "a barrier of half a warp": (
        "ptx::sync_named(1, 48);",
        r"barrier 1 of 48 threads: no multiple",
    ),
    "a barrier that is none": ("ptx::sync_named(16, 64);", r"barrier 16: there are 0 to 15"),
    "two numbers of threads at one barrier": (
        "if (thread < 32) ptx::sync_named(1, 64); else ptx::sync_named(1, 32);",
        r"waits at barrier 1 for another number of threads than thread \d+|nobody can go on",
    ),
    "two CTAs write one place": (
        "its.out[thread] = blockIdx.x;",
        r"writes byte \d+ of out, which CTA \d has written in this launch: a race",
    ),
    "a CTA reads what another writes": (
        "if (blockIdx.x == 0) its.out[thread] = 1; else its.out[32] = its.out[thread] + 1;",
        r"(reads|writes) byte \d+ of out, which CTA \d has (written|read) in this launch: a race",
    ),
    "a CTA writes what another adds to": (
        "if (blockIdx.x == 0) its.out[0] = 0;\nptx::add_global(its.out, 1, 1, 1, 1);",
        r"writes byte \d+ of out, which CTA \d has written in this launch: a race",
    ),
    "a CTA reads what both add to": (
        "ptx::add_global(its.out, 1, 1, 1, 1);\nif (blockIdx.x == 1) its.out[8] = its.out[0];",
        r"byte \d+ of out, which (CTA \d has|several CTAs have) (written|read) in this launch",
    ),
    "a CTA reads what another adds to": (
        "if (blockIdx.x == 0) ptx::add_global(its.out, 1, 1, 1, 1);\n"
        "else its.out[32 + thread % 32] = its.out[0];",
        r"byte \d+ of out, which CTA \d has (written|read) in this launch: a race",
    ),
}


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_the_launch(run, set_to, name, seed):
    body, message = FAULTS[name]
    set_to(seed=seed)
    grid = 2 if "CTA" in name else 1
    a, out = np.full(64, 4, np.float32), np.zeros(64, np.float32)
    with pytest.raises(EmulationError, match=message):
        run(body, {"out": out}, threads=64, grid=grid, smem=2048, name="fault", a=a)


#: Which threads may rely on which: nothing of this is a fault.
ORDERS = {
    "a thread after itself": "place[thread] = 2; its.out[thread] = place[thread];",
    "lanes after the barrier of a warp": (
        "place[thread] = 2; ptx::sync_warp(); its.out[thread] = place[thread ^ 1];"
    ),
    "through two barriers": (
        "if (thread < 64) ptx::sync_named(1, 64);\n"
        "if (thread / 32 == 1) ptx::sync_warp();\n"
        "if (thread >= 32) ptx::sync_named(2, 64);\n"
        "its.out[thread] = thread < 64 ? 0 : place[thread - 64];"
    ),
    "many readers": "ptx::sync_cta(); its.out[thread] = place[0] + place[thread / 2];",
    "again and again": (
        "for (int i = 0; i < 5; ++i) {\n"
        "  ptx::sync_cta(); its.out[thread] = place[(thread + i) % 96];\n"
        "  ptx::sync_cta(); place[thread] = i;\n}"
    ),
    "who ends early": "if (thread >= 64) return;\nptx::sync_cta(); its.out[thread] = place[64];",
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ORDERS)
def test_what_a_barrier_orders_is_no_race(run, set_to, name, seed):
    set_to(seed=seed)
    out = {"out": np.zeros(96, np.float32)}
    run(PLACE + ORDERS[name], out, threads=96, smem=2048, name="order")


def test_a_message_names_the_lines(run):
    """The innermost first: a tile of 16 rows of an array that has 2."""
    body = """
      const tile::SharedTile<f32, 16, 32, 4> tile{reinterpret_cast<f32*>(shared)};
      const tile::GlobalRows<const f32> rows(its.a, 32);
      tile::load<64>(tile, rows, 0, 16, 0, 32);
    """
    a, includes = np.zeros(64, np.float32), ("tile/shared_tile.cuh",)
    lines = r"reads 16 bytes outside of every array.*, in tile/shared_tile\.cuh:\d+, in .*line:\d+"
    with pytest.raises(EmulationError, match=lines):
        run(body, {}, threads=64, smem=4096, name="line", includes=includes, a=a)


MISSING_BARRIER = PLACE + "its.out[thread] = place[63 - thread];"


def test_the_order_of_threads_is_the_seeds(run, set_to):
    """Without the search for races a missing barrier shows in what comes out."""
    set_to(finds_races=False)

    def result(seed):
        set_to(seed=seed)
        out = {"out": np.zeros(64, np.float32)}
        (got,) = run(MISSING_BARRIER, out, threads=64, smem=2048, name="missing")
        return got.tobytes()

    results = [result(seed) for seed in range(8)]
    assert results == [result(seed) for seed in range(8)]
    assert len(set(results)) > 2


def test_what_nobody_has_written_is_nan(run, set_to):
    set_to(finds_races=False)
    body = "its.out[thread] = reinterpret_cast<f32*>(shared)[thread];"
    (got,) = run(body, {"out": np.zeros(32, np.float32)}, smem=2048, name="unwritten")
    assert np.isnan(got).all()


def test_a_copy_lands_at_its_wait_or_before(run, set_to):
    set_to(finds_races=False)
    body = (
        COPY
        + """
      ptx::async_copy_16(mine, its.a + 4 * thread);
      ptx::async_commit();
      ptx::load_shared(four, mine);
      its.out[thread] = four[0];
      ptx::async_wait<0>();
      ptx::load_shared(four, mine);
      its.out[32 + thread] = four[0];
    """
    )
    a = np.arange(128, dtype=np.uint32)
    landed = set()
    for seed in range(6):
        set_to(seed=seed)
        (got,) = run(body, {"out": np.zeros(64, np.uint32)}, smem=512, name="lands", a=a)
        np.testing.assert_array_equal(got[32:], a[::4])
        is_early = got[:32] == a[::4]
        assert (is_early | (got[:32] == 0xFFFFFFFF)).all()
        assert is_early.any() == (seed != 0)
        landed.add(is_early.tobytes())
    assert len(landed) > 3


def test_a_unit_that_is_no_cpp_is_refused_with_the_compilers_words():
    Emulated()
    unit = unit_of("broken", "no such thing;", {}, 32)
    with pytest.raises(build.BuildError, match="error"):
        build.build(unit)


def test_a_unit_is_built_once(tmp_path, monkeypatch):
    Emulated()
    monkeypatch.setenv("CUATTN_EMULATOR_DIR", str(tmp_path))
    build.machine.cache_clear()
    try:
        unit = unit_of("once", "", {}, 32)
        first = build.build(unit)
        made = first.stat().st_mtime_ns
        assert build.build(unit) == first
        assert first.stat().st_mtime_ns == made
        changed = dataclasses.replace(unit, text=unit.text + "// other\n")
        assert build.build(changed) != first
        assert not list(tmp_path.rglob("*.o"))
    finally:
        build.machine.cache_clear()


def test_without_a_compiler_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: None)
    build._identity.cache_clear()
    with pytest.raises(build.BuildError, match=r"no C\+\+20 compiler: install g\+\+"):
        build.build(unit_of("none", "", {}, 32))


@pytest.mark.parametrize("ci", ["true", ""])
def test_without_a_compiler_tests_skip_but_in_ci(monkeypatch, ci):
    monkeypatch.setattr(build, "compiler", lambda: None)
    monkeypatch.setenv("CI", ci)
    outcome = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(outcome, match=r"needs a C\+\+20 compiler: install g\+\+ 12 or newer"):
        needs.cxx()


def test_lanes_wrap_and_of_two_zeros_the_positive_is_the_larger(run):
    body = """
      its.out[thread] = ptx::shuffle(f32(thread), thread - 1);
      its.zeros[0] = ptx::max(0.0f, -0.0f), its.zeros[1] = ptx::max(-0.0f, 0.0f);
    """
    out = {"out": np.zeros(32, np.float32), "zeros": np.full(2, -1, np.float32)}
    got, zeros = run(body, out, name="lanes_and_zeros")
    np.testing.assert_array_equal(got, np.roll(np.arange(32), 1))
    assert not np.signbit(zeros).any()


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("block", {"threads": 48}),
        ("block", {"threads": 2048}),
        ("smem_bytes", {"smem": 4 << 20}),
        ("grid", {"grid": -1}),
    ],
)
def test_a_grid_that_no_device_has_is_refused(run, name, launch):
    with pytest.raises(ValueError, match=rf"^{name}: got .*; expected "):
        run("its.out[0] = 1;", {"out": np.zeros(1, np.float32)}, name="refused", **launch)
