"""Each function of ``kernels_cu/ptx`` against NumPy: emulated, and as a GPU executes it."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from instructions import Emulated, OnGpu, bits_of_every_kind, declared, mapped, ulps

from cuattn.jit.source import kernels_dir

EMULATED = kernels_dir().parent / "tests" / "emulator" / "cuda" / "ptx"

LANES = np.arange(32)
GROUP, LANE_OF_GROUP = LANES // 4, LANES % 4


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    return Emulated() if request.param == "emulated" else OnGpu()


@pytest.mark.parametrize("path", sorted((kernels_dir() / "ptx").glob("*")), ids=lambda p: p.stem)
def test_every_function_is_emulated(path):
    wanted = declared(path.read_text(encoding="utf-8"))
    assert wanted
    assert wanted <= declared((EMULATED / path.name).read_text(encoding="utf-8"))


def result_places():
    """Row and column of each of a lane's four results of a 16 x 8 block."""
    rows = np.stack([GROUP, GROUP, GROUP + 8, GROUP + 8], 1)
    cols = np.stack([2 * LANE_OF_GROUP, 2 * LANE_OF_GROUP + 1] * 2, 1)
    return rows, cols


def multiplied(run, a, b, d, *, name, call, registers):
    """d + a b as the instruction gives it, from whole matrices."""
    places = result_places()
    a_of_lanes, b_of_lanes = registers(a, b)
    out = np.zeros((32, 4), d.dtype)
    body = f"""
      auto *a = its.a + 4 * thread, *b = its.b + 2 * thread;
      auto d = its.d + 4 * thread, out = its.out + 4 * thread;
      for (int i = 0; i < 4; ++i) out[i] = d[i];
      {call}
    """
    (out,) = run(body, {"out": out}, name=name, a=a_of_lanes, b=b_of_lanes, d=d[places])
    whole = np.empty((16, 8), d.dtype)
    whole[places] = out
    return whole


def pairs(matrix, row, col, down):
    """Two neighbours, along a row or down a column, in one register: the first one below."""
    bits = matrix.view(np.uint16).astype(np.uint32)
    return bits[row, col] | bits[row + down, col + 1 - down] << 16


def registers_16bit(a, b):
    g, t = GROUP, 2 * LANE_OF_GROUP
    places = ((g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8))
    return (
        np.stack([pairs(a, *place, 0) for place in places], 1),
        np.stack([pairs(b, t + 8 * i, g, 1) for i in range(2)], 1),
    )


def registers_of_8(dtype):
    def registers(a, b):
        g, t = GROUP, LANE_OF_GROUP
        places = ((g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4))
        a_of_lanes = np.stack([a[place] for place in places], 1)
        return a_of_lanes.view(dtype), np.stack([b[t + 4 * i, g] for i in range(2)], 1).view(dtype)

    return registers


CALL_16BIT = """u32 r[4] = {{a[0], a[1], a[2], a[3]}};
      ptx::mma_16bit<{}>(out[0], out[1], out[2], out[3], r, b[0], b[1]);"""
CALL_OF_8 = """{0} r[4] = {{a[0], a[1], a[2], a[3]}}, s[2] = {{b[0], b[1]}};
      ptx::{1}(out[0], out[1], out[2], out[3], r, s);"""

#: By name: dtypes of a and d, depth, eps of the sum, and the call.
PRODUCTS = {
    "f16": (np.float16, np.float32, 16, 2**-21, CALL_16BIT.format("Float16"), registers_16bit),
    "bf16": (
        *(ml_dtypes.bfloat16, np.float32, 16, 2**-21),
        *(CALL_16BIT.format("BFloat16"), registers_16bit),
    ),
    "tf32": (
        *(np.float32, np.float32, 8, 2**-21),
        *(CALL_OF_8.format("u32", "mma_tf32"), registers_of_8(np.uint32)),
    ),
    "f64": (
        *(np.float64, np.float64, 8, 2**-51),
        *(CALL_OF_8.format("f64", "mma_f64"), registers_of_8(np.float64)),
    ),
}


@pytest.mark.parametrize("kind", PRODUCTS)
@pytest.mark.parametrize("whole", [True, False])
def test_products_of_tensor_cores(run, kind, whole):
    """Whole numbers show who holds what, to the last bit; others how sums round."""
    dtype, sum_dtype, depth, eps, call, registers = PRODUCTS[kind]
    rng = np.random.default_rng(3)
    draw = (lambda *n: rng.integers(-8, 9, n)) if whole else (lambda *n: rng.standard_normal(n))
    a, b = draw(16, depth).astype(dtype), draw(depth, 8).astype(dtype)
    d = (draw(16, 8) * 4).astype(sum_dtype)
    got = multiplied(run, a, b, d, name=f"mma_{kind}", call=call, registers=registers)
    if kind == "tf32":  # the unit takes the upper 19 bits
        a, b = ((each.view(np.uint32) & 0xFFFFE000).view(np.float32) for each in (a, b))
    a, b, wide = a.astype(np.float64), b.astype(np.float64), d.astype(np.float64)
    bound = 0 if whole else eps * (np.abs(wide) + np.abs(a) @ np.abs(b))
    assert (np.abs(got - (wide + a @ b)) <= bound).all()


@pytest.mark.parametrize("kind", PRODUCTS)
def test_what_is_no_number_stays_one_row_or_column(run, kind):
    dtype, sum_dtype, depth, _, call, registers = PRODUCTS[kind]
    a, b = np.ones((16, depth), dtype), np.ones((depth, 8), dtype)
    a[3, 5], b[2, 6] = np.nan, np.inf
    d = np.zeros((16, 8), sum_dtype)
    got = multiplied(run, a, b, d, name=f"mma_{kind}", call=call, registers=registers)
    want = np.full((16, 8), depth, sum_dtype)
    want[:, 6], want[3] = np.inf, np.nan
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("transposed", ["", "_transposed"])
def test_load_matrix(run, transposed):
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 2**16, (32, 8), np.uint16)
    order = rng.permutation(32).astype(np.int32)  # whose row a lane gives the address of
    body = f"""
      const u32 first = ptx::shared_address(shared);
      const u32* row = its.rows + 4 * thread;
      ptx::store_shared(first + 16 * thread, {{row[0], row[1], row[2], row[3]}});
      ptx::sync_warp();
      u32 r[4];
      ptx::load_matrix{transposed}(r, first + 16 * its.order[thread]);
      for (int i = 0; i < 4; ++i) its.out[4 * thread + i] = r[i];
    """
    out = {"out": np.zeros((32, 4), np.uint32)}
    given = {"rows": rows.view(np.uint32), "order": order}
    (got,) = run(body, out, smem=512, name=f"ldmatrix{transposed}", **given)
    matrices = rows[order].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    want = matrices.reshape(4, 32, 2).astype(np.uint32)
    np.testing.assert_array_equal(got, (want[..., 0] | want[..., 1] << 16).T)


def test_shared_memory_by_addresses(run):
    words = np.random.default_rng(0).integers(0, 2**32, (32, 4), np.uint32)
    body = """
      const u32 first = ptx::shared_address(shared), mine = first + 32 * thread;
      const u32* w = its.words + 4 * thread;
      ptx::store_shared(mine, {w[0], w[1], w[2], w[3]});
      ptx::store_shared(mine + 16, w[3]);
      ptx::store_shared(mine + 20, __uint_as_float(w[2]));
      ptx::sync_warp();
      const u32 other = first + 32 * (31 - thread);
      u32 four[4], *out = its.out + 8 * thread;
      f32 x, y;
      ptx::load_shared(four, other);
      ptx::load_shared(x, y, other + 16);
      for (int i = 0; i < 4; ++i) out[i] = four[i];
      out[4] = __float_as_uint(x), out[5] = __float_as_uint(y);
      out[6] = __float_as_uint(ptx::load_shared(other + 4)), out[7] = 32 * thread;
    """
    words &= 0xBF7FFFFF  # no NaN: a register of floats may change its bits
    out = {"out": np.zeros((32, 8), np.uint32)}
    (got,) = run(body, out, smem=1024, name="shared", words=words)
    other = words[::-1]
    want = np.column_stack([other, other[:, 3], other[:, 2], other[:, 1], 32 * LANES])
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_shuffles(run, dtype):
    values = np.random.default_rng(0).integers(-1000, 1000, 64).astype(dtype)
    body = """
      const auto x = its.values[thread];
      auto out = its.out + 7 * thread;
      for (int i = 0; i < 5; ++i) out[i] = ptx::shuffle_xor(x, 1 << i);
      out[5] = ptx::shuffle(x, 17);
      out[6] = ptx::shuffle(x, (thread + 3) % 32);
    """
    out = {"out": np.zeros((64, 7), dtype)}
    (got,) = run(body, out, threads=64, name=f"shuffle_{dtype}", values=values)
    warps = values.reshape(2, 32)
    froms = [LANES ^ 1 << i for i in range(5)] + [np.full(32, 17), (LANES + 3) % 32]
    want = np.stack([warps[:, each] for each in froms], 2).reshape(64, 7)
    np.testing.assert_array_equal(got, want)


def test_votes_and_barriers_that_tell(run):
    said = np.zeros((3, 96), np.int32)
    said[1, 40], said[2] = 1, 1
    body = """
      for (int i = 0; i < 3; ++i) {
        const bool mine = its.said[96 * i + thread];
        its.out[96 * i + thread] = ptx::any_of_warp(mine) + 2 * ptx::sync_cta_or(mine);
      }
    """
    (got,) = run(body, {"out": np.zeros((3, 96), np.int32)}, threads=96, name="votes", said=said)
    warps = np.repeat(said.reshape(3, 3, 32).any(2), 32, axis=1)
    np.testing.assert_array_equal(got, warps + 2 * said.any(1, keepdims=True))


def test_barriers_of_some_warps(run):
    """Two pairs of warps, each by its own barrier, from different places of the code."""
    body = """
      f32* place = reinterpret_cast<f32*>(shared);
      const int pair = thread / 64;
      for (int turn = 0; turn < 3; ++turn) {
        if (thread % 64 < 32) {
          place[thread] = thread + 100 * turn;
          ptx::sync_named(1 + pair, 64);
        } else {
          ptx::sync_named(1 + pair, 64);
          its.out[128 * turn + thread] = place[thread - 32];
        }
        ptx::sync_named(1 + pair, 64);
      }
    """
    (got,) = run(body, {"out": np.zeros((3, 128), np.float32)}, threads=128, smem=512, name="named")
    want = np.zeros((3, 2, 2, 32))
    want[:, :, 1] = 100 * np.arange(3)[:, None, None] + np.array([[0], [64]]) + LANES
    np.testing.assert_array_equal(got, want.reshape(3, 128))


def test_async_copies(run):
    rows = np.random.default_rng(0).integers(0, 2**32, (32, 12), np.uint32)
    body = """
      const u32 mine = ptx::shared_address(shared) + 48 * thread;
      const u32* row = its.rows + 12 * thread;
      ptx::async_copy_16(mine, row);
      ptx::async_commit();
      ptx::async_copy_16(mine + 16, row + 4, thread % 3 != 0);
      ptx::async_commit();
      ptx::async_copy_16(mine + 32, row + 8, true);
      ptx::async_commit();
      u32 four[4], *out = its.out + 12 * thread;
      ptx::async_wait<1>();
      for (int i = 0; i < 3; ++i) {
        if (i == 2) ptx::async_wait<0>();
        ptx::load_shared(four, mine + 16 * i);
        for (int k = 0; k < 4; ++k) out[4 * i + k] = four[k];
      }
    """
    out = {"out": np.zeros((32, 12), np.uint32)}
    (got,) = run(body, out, smem=48 * 32, name="cp_async", rows=rows)
    want = rows.copy()
    want[::3, 4:8] = 0
    np.testing.assert_array_equal(got, want)


def test_additions_in_memory(run):
    body = """
      const f32 x = 1 + blockIdx.x;
      ptx::add_global(its.sums + 4 * (thread % 16), x, 2 * x, 3 * x, thread);
    """
    sums = np.arange(64, dtype=np.float32).reshape(16, 4)
    (got,) = run(body, {"sums": sums}, threads=64, grid=5, name="red")
    each = np.array([1, 2, 3]) * 15 * 4
    want = sums + np.column_stack([np.tile(each, (16, 1)), 5 * (4 * np.arange(16) + 96)])
    np.testing.assert_array_equal(got, want)


def test_special_registers(run):
    body = """
      int x = thread;
      ptx::forget(x);
      its.out[gridDim.x * x + ptx::block_index()] = 1000 * blockIdx.x + x;
    """
    (got,) = run(body, {"out": np.zeros((64, 7), np.int32)}, threads=64, grid=7, name="special")
    np.testing.assert_array_equal(got, 1000 * np.arange(7) + np.arange(64)[:, None])


def test_exp2(run):
    """Within 2 ulp, subnormal numbers as zeros, the ends as IEEE 754 has them."""
    rng = np.random.default_rng(0)
    usual = rng.uniform(-130, 130, 20000).astype(np.float32)
    x = np.concatenate([bits_of_every_kind(20000), usual])
    got = mapped(run, "its.out[i] = ptx::exp2(x);", x, np.float32, "ex2")
    with np.errstate(all="ignore"):
        want = np.exp2(x.astype(np.float64))
    is_nan, is_tiny = np.isnan(x), want < 2.0**-126
    assert np.isnan(got[is_nan]).all()
    # where the result is near the smallest normal number, it may round to it or to 0
    assert ((got[is_tiny] == 0) | (want[is_tiny] > 2.0**-126 * (1 - 2**-21))).all()
    rest = ~is_nan & ~is_tiny
    assert (ulps(got[rest], want[rest], np.float32) <= 2).all()


@pytest.mark.parametrize(
    ("expression", "function", "dtype", "most"),
    [
        ("ptx::exp(x)", np.exp, "float64", 1.5),
        ("ptx::log(x)", np.log, "float64", 1.5),
        ("ptx::log(x)", np.log, "float32", 2),
        ("ptx::log2(x)", np.log2, "float32", 2),
    ],
)
def test_functions_of_the_compiler(run, expression, function, dtype, most):
    rng = np.random.default_rng(0)
    special = [0, -0.0, 1, np.inf, -np.inf, np.nan, -1, 1e-40, 3e38]
    x = np.concatenate([np.exp(rng.uniform(-80, 80, 5000)), rng.uniform(-80, 80, 5000), special])
    x = x.astype(dtype)
    name = f"{function.__name__}_{dtype}"
    got = mapped(run, f"its.out[i] = {expression};", x, dtype, name)
    wide = np.longdouble if dtype == "float64" else np.float64
    with np.errstate(all="ignore"):
        want = function(x.astype(wide))
        rounded = want.astype(dtype)
    ends = ~np.isfinite(rounded)
    np.testing.assert_array_equal(got[ends], rounded[ends])
    assert (ulps(got[~ends], want[~ends], dtype) <= most).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_maximum_is_the_number_beside_a_nan(run, dtype):
    edges = np.array([0, 1, -1, np.nan, np.inf, -np.inf, 1e-40], dtype)
    a, b = (each.ravel() for each in np.meshgrid(edges, edges))
    body = f"for (int i = thread; i < {a.size}; i += 32) its.out[i] = ptx::max(its.a[i], its.b[i]);"
    (got,) = run(body, {"out": np.zeros(a.size, dtype)}, name=f"max_{dtype}", a=a, b=b)
    np.testing.assert_array_equal(got, np.fmax(a, b))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_fma_rounds_once(run, dtype):
    a, b = np.random.default_rng(0).standard_normal((2, 500)).astype(dtype)
    c = (-a * b).astype(dtype)  # what is left is what the product was rounded by
    body = """
      for (int i = thread; i < 500; i += 32) its.out[i] = ptx::fma(its.a[i], its.b[i], its.c[i]);
    """
    (got,) = run(body, {"out": np.zeros(500, dtype)}, name=f"fma_{dtype}", a=a, b=b, c=c)
    exact = [
        Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for x, y, z in zip(a, b, c, strict=True)
    ]
    np.testing.assert_array_equal(got, np.array([float(each) for each in exact], dtype))


KINDS = {"Float16": np.float16, "BFloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("kind", KINDS)
def test_widening(run, kind):
    bits = np.arange(2**16, dtype=np.uint16)
    got = mapped(run, f"its.out[i] = ptx::widen({kind}{{x}});", bits, np.float32, f"widen_{kind}")
    np.testing.assert_array_equal(got, bits.view(KINDS[kind]).astype(np.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_narrowing(run, kind):
    """To nearest, ties to even; with numbers half way between two."""
    some = np.arange(2**16, dtype=np.uint16).view(KINDS[kind])
    below = some.astype(np.float32)
    with np.errstate(all="ignore"):
        middle = ((below[:-1].astype(np.float64) + below[1:]) / 2).astype(np.float32)
        above = np.nextafter(middle, np.float32(np.inf))
        x = np.concatenate([bits_of_every_kind(20000), below, middle, above])
        want = x.astype(KINDS[kind])
    expression = f"{kind} y; ptx::narrow(x, y); its.out[i] = y.bits;"
    got = mapped(run, expression, x, np.uint16, f"narrow_{kind}").view(KINDS[kind])
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(x)].all()


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_of_16_bit_numbers(run, kind):
    x = bits_of_every_kind(4000)
    x = x[~np.isnan(x)]
    expression = f"""
      its.out[2 * i] = ptx::pack<{kind}>(x, -2 * x);
      f32 first, second;
      ptx::unpack<{kind}>(its.out[2 * i], first, second);
      its.out[2 * i + 1] = ptx::pack<{kind}>(second, first);
    """
    body = f"for (int i = thread; i < {x.size}; i += 32) {{ const f32 x = its.x[i]; {expression} }}"
    out = {"out": np.zeros((x.size, 2), np.uint32)}
    (got,) = run(body, out, name=f"pack_{kind}", x=x)
    with np.errstate(over="ignore"):
        first, second = (each.astype(KINDS[kind]).view(np.uint16) for each in (x, -2 * x))
    want = np.stack([first, second, second, first], 1)
    np.testing.assert_array_equal(got.view(np.uint16).reshape(-1, 4), want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_mul_is_rounded_before_a_sum(run, dtype):
    a, b = np.random.default_rng(0).standard_normal((2, 500)).astype(dtype)
    loop = "for (int i = thread; i < 500; i += 32)"
    body = f"{loop} its.out[i] = ptx::mul(its.a[i], its.b[i]) - its.c[i];"
    (got,) = run(body, {"out": np.ones(500, dtype)}, name=f"mul_{dtype}", a=a, b=b, c=a * b)
    np.testing.assert_array_equal(got, 0)
