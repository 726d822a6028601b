"""merge_states is an algebra: associative, commutative, with an identity."""

import numpy as np
import pytest
from calls import draw, qkv, same_bits
from compare import assert_backward, assert_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DTYPES, LAYOUTS, dtype_of, to_canonical

import cuattn
from cuattn._typing import ACCUMULATOR
from cuattn.planning.problem import Band

SHAPE = (2, 3, 2, 4)
INF = np.inf

#: Beyond this size lse cannot hold ln(2): the state keeps its peak and forgets its mass.
#: Subnormal numbers are left to the library, whose arithmetic may take them for 0.
lses = st.one_of(
    st.floats(-100, 100, width=32, allow_subnormal=False), st.sampled_from((-INF, -INF, 0.0))
)


def draw_parts(rng, count, lse_values, dtype="float32"):
    """Parts of random out, with lse from the given values; out is 0 where lse is -inf."""
    wide = ACCUMULATOR[dtype]
    parts = []
    for _ in range(count):
        lse = rng.choice(lse_values, (2, 2, 3)).astype(wide)
        out = rng.standard_normal(SHAPE) * np.isfinite(lse).transpose(0, 2, 1)[..., None]
        parts.append((out.astype(dtype_of(dtype)), lse))
    return parts


def merged(engine, parts, **options):
    held = [tuple(map(engine.asarray, part)) for part in parts]
    return tuple(map(engine.asnumpy, cuattn.merge_states(held, **options)))


def exact(parts):
    """The formula of the module's head, in extended precision."""
    wide = [(out.astype(np.longdouble), lse.astype(np.longdouble)) for out, lse in parts]
    with np.errstate(invalid="ignore"):
        lse = np.logaddexp.reduce([lse for _, lse in wide])
        weights = [np.where(np.isneginf(each), 0, np.exp(each - lse)) for _, each in wide]
    rows = [weight.transpose(0, 2, 1)[..., None] for weight in weights]
    return sum(row * out for row, (out, _) in zip(rows, wide, strict=True)), lse


def assert_near(got, parts):
    """Rounding, and no more: lse is off by eps of itself, and so is, relatively, a later weight.

    A mass exp(x), x <= 0, is off by eps * (|x| + 1) * exp(x) < 2 eps; the sums add as much.
    """
    out, lse = got
    want_out, want_lse = exact(parts)
    eps = np.finfo(lse.dtype).eps
    finite = np.isfinite(want_lse)
    assert np.array_equal(lse[~finite], want_lse[~finite])
    size = len(parts) + np.abs(want_lse[finite]).max(initial=0)
    assert (np.abs(lse[finite] - want_lse[finite]) <= 4 * eps * size).all()
    largest = max(np.abs(part.astype(np.longdouble)).max(initial=0) for part, _ in parts)
    rounding = np.abs(want_out) * float(ml_eps(out.dtype))
    assert (np.abs(out - want_out) <= 4 * eps * size * largest + rounding).all()


def ml_eps(dtype):
    return np.exp2(-8) if dtype.name == "bfloat16" else np.finfo(dtype).eps


@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**16),
    values=st.lists(lses, min_size=1, max_size=6),
    count=st.integers(1, 5),
    dtype=st.sampled_from(DTYPES),
)
def test_merge_is_the_formula(engine, seed, values, count, dtype):
    parts = draw_parts(np.random.default_rng(seed), count, values, dtype)
    assert_near(merged(engine, parts), parts)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**16), values=st.lists(lses, min_size=1, max_size=6))
def test_merge_is_commutative(engine, seed, values):
    first, second = draw_parts(np.random.default_rng(seed), 2, values)
    forwards, backwards = merged(engine, [first, second]), merged(engine, [second, first])
    assert all(map(same_bits, forwards, backwards))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**16), values=st.lists(lses, min_size=1, max_size=6))
def test_merge_is_associative(engine, seed, values):
    a, b, c = draw_parts(np.random.default_rng(seed), 3, values)
    for tree in (
        merged(engine, [merged(engine, [a, b]), c]),
        merged(engine, [a, merged(engine, [b, c])]),
        merged(engine, [b, merged(engine, [c, a])]),
    ):
        assert_near(tree, [a, b, c])


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**16),
    values=st.lists(lses, min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    identities=st.integers(0, 3),
    at=st.integers(0, 3),
)
def test_identity_changes_no_bit(engine, seed, values, dtype, identities, at):
    (part,) = draw_parts(np.random.default_rng(seed), 1, values, dtype)
    part[0][0, 0] *= -1  # -0.0 too
    if np.isneginf(part[1]).any():
        part[0][...] = np.where(np.isneginf(part[1]).transpose(0, 2, 1)[..., None], 0, part[0])
    identity = np.zeros_like(part[0]), np.full_like(part[1], -INF)
    parts = [identity] * identities
    parts.insert(at, part)
    assert all(map(same_bits, merged(engine, parts), part))


def test_one_part_comes_back_as_new_memory(engine):
    out, lse = map(engine.asarray, draw_parts(np.random.default_rng(0), 1, [0.0])[0])
    got_out, got_lse = cuattn.merge_states([(out, lse)])
    got_out[...], got_lse[...] = 7, 7
    assert not (engine.asnumpy(out) == 7).any()
    assert not (engine.asnumpy(lse) == 7).any()


def test_all_parts_empty_is_empty(engine):
    identity = np.zeros(SHAPE, np.float32), np.full((2, 2, 3), -INF, np.float32)
    out, lse = merged(engine, [identity] * 3)
    assert same_bits(out, identity[0])
    assert same_bits(lse, identity[1])


def test_what_an_empty_part_holds_reaches_nothing(engine):
    part, empty = draw_parts(np.random.default_rng(0), 2, [1.5])
    empty[0][...], empty[1][...] = np.nan, -INF
    assert all(map(same_bits, merged(engine, [empty, part]), part))


def test_nan_propagates(engine):
    first, second = draw_parts(np.random.default_rng(0), 2, [1.5])
    first[1][0, 1, 2] = np.nan
    out, lse = merged(engine, [first, second])
    assert np.isnan(lse).sum() == 1
    assert np.isnan(out[0, 2, 1]).all()
    assert np.isnan(out).sum() == SHAPE[-1]


def test_infinite_lse_outweighs_all_finite_ones(engine):
    first, second = draw_parts(np.random.default_rng(0), 2, [1.5])
    first[1][...] = INF
    out, lse = merged(engine, [first, second])
    assert np.isposinf(lse).all()
    assert np.array_equal(out, first[0])


def test_large_lse_keeps_the_weights_accurate(engine):
    """Weights come from differences of lse, so a common shift changes nothing."""
    first, second = draw_parts(np.random.default_rng(0), 2, [0.0, 1.0, 2.0])
    want, _ = merged(engine, [first, second])
    first[1][...] += 4096
    second[1][...] += 4096
    assert same_bits(merged(engine, [first, second])[0], want)


@pytest.mark.parametrize("letters", LAYOUTS)
def test_layout(engine, letters):
    sizes = {"b": 2, "s": 3, "h": 2, "d": 4}
    lse_letters = "".join(axis for axis in "bhs" if axis in letters)
    outs = draw([2, *(sizes[axis] for axis in letters)], dtype="float32")[0]
    lse_parts = draw([2, *(sizes[axis] for axis in lse_letters)], dtype="float32")[0]
    got_out, got_lse = merged(engine, list(zip(outs, lse_parts, strict=True)), layout=letters)
    canonical = [
        (to_canonical(out, letters), to_canonical(lse, lse_letters, "bhs"))
        for out, lse in zip(outs, lse_parts, strict=True)
    ]
    want_out, want_lse = merged(engine, canonical)
    assert same_bits(to_canonical(got_out, letters), want_out)
    assert same_bits(to_canonical(got_lse, lse_letters, "bhs"), want_lse)


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16", "float32", None])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_out_dtype(engine, dtype, out_dtype):
    parts = draw_parts(np.random.default_rng(0), 3, [0.0, 1.0], dtype)
    out, lse = merged(engine, parts, out_dtype=out_dtype)
    assert out.dtype == dtype_of(out_dtype or dtype)
    assert lse.dtype == np.float32
    assert_near((out, lse), parts)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=20)
@given(cuts=st.lists(st.integers(0, 150), max_size=4), seed=st.integers(0, 2**16))
def test_any_cut_of_the_keys_is_the_whole(engine, dtype, causal, cuts, seed):
    q, k, v = qkv(70, 150, heads_q=2, heads_kv=1, dtype=dtype)
    q *= np.random.default_rng(seed).uniform(0.1, 4)
    position = {"causal": True, "q_offset": 80} if causal else {}
    parts, ends = [], sorted(cuts)
    # Parts are not rounded to 16 bits: the merged out is, once, as the whole would be.
    wide = "float64" if dtype == "float64" else "float32"
    for begin, end in zip([0, *ends], [*ends, 150], strict=True):
        here = {**position, "k_offset": begin} if causal else {}
        piece = map(engine.asarray, (q, k[:, begin:end], v[:, begin:end]))
        parts.append(cuattn.attention(*piece, return_lse=True, out_dtype=wide, **here))
    out, lse = map(engine.asnumpy, cuattn.merge_states(parts, out_dtype=dtype))
    band = Band(-70, 80 if causal else 150)
    assert_forward(out, lse, q, k, v, band=band, softmax_scale=8**-0.5)


def test_gradients_of_a_cut_are_those_of_the_whole(engine):
    q, k, v = qkv(20, 33, heads_q=4, heads_kv=2, dtype="float32")
    dout, dlse = draw(q.shape, (1, 4, 20), dtype="float32")
    held = [engine.asarray(each) for each in (q, k, v)]
    cuts, residuals = [slice(0, 9), slice(9, 9), slice(9, 33)], []
    for cut in cuts:
        options = {"causal": True, "q_offset": 5, "k_offset": cut.start}
        residuals.append(
            cuattn.attention_forward(held[0], held[1][:, cut], held[2][:, cut], **options)[1]
        )
    (out, _), vjp = cuattn.merge_states_vjp([(res.out, res.lse) for res in residuals])
    pulled = vjp(engine.asarray(dout), engine.asarray(dlse))
    grads = [
        cuattn.attention_backward(res, *cotangents)
        for res, cotangents in zip(residuals, pulled, strict=True)
    ]
    dq = sum(engine.asnumpy(each.dq) for each in grads)
    dk = np.concatenate([engine.asnumpy(each.dk) for each in grads], axis=1)
    dv = np.concatenate([engine.asnumpy(each.dv) for each in grads], axis=1)
    oracle = {"band": Band(-20, 5), "softmax_scale": 8**-0.5}
    assert_backward((dq, dk, dv), q, k, v, engine.asnumpy(out), dout, dlse, **oracle)


def test_vjp_is_finite_differences(engine):
    rng = np.random.default_rng(3)
    parts = draw_parts(rng, 3, [-1.0, 0.5, 2.0], "float64")
    dout, dlse = rng.standard_normal(SHAPE), rng.standard_normal((2, 2, 3))

    def value(moved):
        out, lse = merged(engine, moved)
        return (out * dout).sum() + (lse * dlse).sum()

    held = [tuple(map(engine.asarray, part)) for part in parts]
    _, vjp = cuattn.merge_states_vjp(held)
    pulled = vjp(engine.asarray(dout), engine.asarray(dlse))
    step = 1e-5
    for i, gradient in enumerate(pulled):
        for j in range(2):
            direction = rng.standard_normal(parts[i][j].shape)
            ends = []
            for sign in (1, -1):
                moved = [list(part) for part in parts]
                moved[i][j] = moved[i][j] + sign * step * direction
                ends.append(value(moved))
            slope = (ends[0] - ends[1]) / (2 * step)
            along = engine.asnumpy(gradient[j]) * direction
            # Central differences: O(step^2) of curvature and eps / step of rounding.
            bound = (step**2 + np.finfo(float).eps / step) * (np.abs(along).sum() + dout.size)
            assert abs(slope - along.sum()) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_vjp_gives_each_part_its_dtypes_and_absent_rows_nothing(engine, dtype):
    parts = draw_parts(np.random.default_rng(0), 2, [0.0, 1.0], dtype)
    parts[0][1][0] = -INF
    parts[0][0][0] = np.nan
    held = [tuple(map(engine.asarray, part)) for part in parts]
    (out, lse), vjp = cuattn.merge_states_vjp(held, out_dtype=ACCUMULATOR[dtype])
    for pulled in (vjp(out), vjp(None, lse), vjp(out, lse), vjp(None)):
        for (dout, dlse), (part, part_lse) in zip(pulled, parts, strict=True):
            dout, dlse = engine.asnumpy(dout), engine.asnumpy(dlse)
            assert (dout.shape, dout.dtype) == (part.shape, part.dtype)
            assert (dlse.shape, dlse.dtype) == (part_lse.shape, part_lse.dtype)
            assert np.isfinite(dout.astype(np.float64)).all()
            assert np.isfinite(dlse).all()
        assert not engine.asnumpy(pulled[0][0])[0].any()
        assert not engine.asnumpy(pulled[0][1])[0].any()
