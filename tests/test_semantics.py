"""One test per line of the design's Semantics that this version covers, on every engine."""

import itertools

import numpy as np
import pytest
from calls import EVERYTHING, draw, gradients, like_lse, qkv, run, same_bits
from compare import assert_backward, assert_forward
from strategies import DTYPES

import cuattn
from cuattn.planning.problem import Band

# Positions -----------------------------------------------------------------------------------


def visible(engine, seqlen_q, seqlen_k, **options):
    """Which key each row sees, read off a uniform attention over one-hot values."""
    q = np.zeros((seqlen_q, 1), np.float64)
    k, v = np.zeros((seqlen_k, 1)), np.eye(seqlen_k)
    return run(engine, q, k, v, layout="sd", **options)[0] > 0


def test_causal_keeps_key_positions_up_to_the_query_position(engine):
    rows, keys = np.arange(5)[:, None], np.arange(8)
    for q_offset, k_offset in itertools.product((-3, 0, 2, 10), (-2, 0, 3)):
        seen = visible(engine, 5, 8, causal=True, q_offset=q_offset, k_offset=k_offset)
        assert np.array_equal(seen, k_offset + keys <= q_offset + rows)


@pytest.mark.parametrize("base", [10**6, 2**31, -(2**40), 2**63, -(10**30)])
def test_offsets_may_be_of_any_size(engine, base):
    seen = visible(engine, 5, 8, causal=True, q_offset=base + 2, k_offset=base)
    assert np.array_equal(seen, np.tri(5, 8, 2, dtype=bool))
    assert visible(engine, 5, 8, causal=True, q_offset=abs(base)).all()
    assert not visible(engine, 5, 8, causal=True, q_offset=-abs(base)).any()


def test_offsets_may_be_numpy_integers(engine):
    seen = visible(engine, 5, 8, causal=True, q_offset=np.int32(2), k_offset=np.uint8(1))
    assert np.array_equal(seen, np.tri(5, 8, 1, dtype=bool))


@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (6, 6)])
def test_align_bottom_right_lets_the_last_row_see_the_last_key(engine, lengths):
    seen = visible(engine, *lengths, causal=True, align="bottom_right")
    assert np.array_equal(seen, np.tri(*lengths, lengths[1] - lengths[0], dtype=bool))


@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (6, 6)])
def test_align_top_left_is_no_offset(engine, lengths):
    seen = visible(engine, *lengths, causal=True, align="top_left")
    assert np.array_equal(seen, np.tri(*lengths, dtype=bool))


@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (1, 2)])
def test_different_lengths_need_align_or_offsets_and_the_error_names_both(engine, lengths):
    with pytest.raises(cuattn.ArgumentError, match=r"causal: .*align=.*q_offset"):
        visible(engine, *lengths, causal=True)
    visible(engine, *lengths, causal=True, q_offset=0)
    visible(engine, *lengths, causal=True, k_offset=0)


@pytest.mark.parametrize("offset", [{"q_offset": 0}, {"k_offset": 0}, {"q_offset": 3}])
def test_align_together_with_an_offset_is_an_error(engine, offset):
    for causal in (False, True):
        with pytest.raises(cuattn.ArgumentError, match=f"align: .*{next(iter(offset))}"):
            visible(engine, 5, 8, causal=causal, align="top_left", **offset)


def test_options_that_cannot_act_are_errors(engine):
    with pytest.raises(cuattn.ArgumentError, match=r"align: .*causal=True"):
        visible(engine, 5, 8, align="top_left")
    with pytest.raises(cuattn.ArgumentError, match=r"q_offset: .*causal=True"):
        visible(engine, 5, 8, q_offset=1)
    with pytest.raises(cuattn.ArgumentError, match=r"k_offset: .*causal=True"):
        visible(engine, 5, 5, k_offset=-1)


@pytest.mark.parametrize(
    "options",
    [
        {"align": "bottom_right"},
        {"align": "top_left"},
        {"q_offset": 0},
        {"k_offset": 0, "q_offset": 0},
        {"seed": 3},
        {"seed": np.uint64(2**64 - 1), "dropout_p": 0},
        {"dropout_p": 0.0},
        {"deterministic": True},
    ],
    ids=repr,
)
def test_trivially_satisfied_options_are_accepted(engine, options):
    assert visible(engine, 5, 5, **options).all()


def test_one_and_true_are_different_values_of_an_option(engine):
    visible(engine, 5, 5, causal=True)
    with pytest.raises(cuattn.DTypeError, match="causal"):
        visible(engine, 5, 5, causal=1)
    visible(engine, 5, 5, causal=True, q_offset=1)
    with pytest.raises(cuattn.DTypeError, match="q_offset"):
        visible(engine, 5, 5, causal=True, q_offset=True)


# Scores --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [0, 0.0, -1.5, 3, np.float32(0.25), np.float64(-0.1), 1e-30, 60.0]
)
def test_softmax_scale_is_any_finite_real(engine, scale):
    q, k, v = qkv()
    oracle = {"band": Band(-7, 7), "softmax_scale": float(scale)}
    dout, dlse = draw(q.shape, (1, 2, 7))
    out, lse = run(engine, q, k, v, softmax_scale=scale)
    assert_forward(out, lse, q, k, v, **oracle)
    grads = gradients(engine, q, k, v, dout, dlse, softmax_scale=scale)
    assert_backward(grads, q, k, v, out, dout, dlse, **oracle)


@pytest.mark.parametrize("sizes", [(1e20, 1e-20), (1e-20, 1e20)])
def test_softmax_scale_multiplies_scores_and_not_one_of_their_factors(engine, sizes):
    q, k, v = qkv()
    q[...], k[...] = sizes
    out, lse = run(engine, q, k, v, softmax_scale=1e20)
    assert_forward(out, lse, q, k, v, band=Band(-7, 7), softmax_scale=1e20)


def check_both(engine, q, k, v, softmax_scale):
    """Forward and backward against the oracle, every pair visible."""
    oracle = {"band": Band(-9999, 9999), "softmax_scale": softmax_scale}
    (dout,) = draw(q.shape, dtype=q.dtype.name)
    out, lse = run(engine, q, k, v, softmax_scale=softmax_scale)
    assert_forward(out, lse, q, k, v, **oracle)
    grads = gradients(engine, q, k, v, dout, softmax_scale=softmax_scale)
    assert_backward(grads, q, k, v, out, dout, None, **oracle)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("low", [-1e3, -1e4, -1e9, -3e37])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scores_far_below_all_others_leave_no_trace(engine, dtype, low, backwards):
    """Padding, longer than a tile, that one feature of its keys hides."""
    q, k, v = qkv(40, 700, 1, 1, dtype=dtype)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :500, :, 0] = low
    if backwards:
        k, v = k[:, ::-1], v[:, ::-1]
    check_both(engine, q, k, v, 1.0)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e3, 1e5])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_weights_of_the_backward_are_those_of_the_forward(engine, dtype, size):
    """Where one key outweighs all others its weight is 1, however large the scores."""
    q, k, v = (each * each.dtype.type(size) for each in qkv(70, 90, 2, 2, 64, dtype=dtype))
    check_both(engine, q, k, v / v.dtype.type(size), 0.125)


def test_softmax_scale_is_by_default_one_over_sqrt_head_dim(engine):
    q, k, v = qkv(head_dim=64)
    assert same_bits(run(engine, q, k, v)[0], run(engine, q, k, v, softmax_scale=0.125)[0])


def test_lse_is_the_log_of_the_sum_over_visible_keys(engine):
    q = k = v = np.zeros((1, 4, 1, 2))
    out, lse = run(engine, q, k, v, causal=True)
    assert_forward(out, lse, q, k, v, band=Band(-4, 0), softmax_scale=2**-0.5)
    assert [round(each) for each in np.exp(lse[0, 0])] == [1, 2, 3, 4]  # no other base gives that


@pytest.mark.parametrize("size", [1, 1e4, -1e4])
def test_large_scores_do_not_overflow(engine, size):
    q, k, v = qkv()
    q[...], k[...] = 1, size
    out, lse = run(engine, q, k, v, softmax_scale=1.0)
    assert_forward(out, lse, q, k, v, band=Band(-7, 7), softmax_scale=1.0)


@pytest.mark.parametrize("lengths", [(5, 2), (70, 33), (130, 1), (200, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_sees_no_key_is_zero_with_lse_minus_infinity(engine, dtype, lengths):
    q, k, v = qkv(*lengths, dtype=dtype)
    blind = lengths[0] - lengths[1]
    out, lse = run(engine, q, k, v, causal=True, align="bottom_right")
    assert not out[:, :blind].any()
    assert np.isneginf(lse[:, :, :blind]).all()
    assert np.isfinite(lse[:, :, blind:]).all()


@pytest.mark.parametrize("lengths", [(5, 2), (70, 33), (130, 1), (200, 64)])
def test_a_row_that_sees_no_key_has_gradient_zero_and_gives_none(engine, lengths):
    q, k, v = qkv(*lengths)
    dout, dlse = draw(q.shape, (1, 2, lengths[0]))
    blind = lengths[0] - lengths[1]
    options = {"causal": True, "align": "bottom_right", "deterministic": True}
    dq, dk, dv = gradients(engine, q, k, v, dout, dlse, **options)
    assert not dq[:, :blind].any()
    spoilt = [np.array(each) for each in (q, dout, dlse)]
    spoilt[0][:, :blind] = spoilt[1][:, :blind] = spoilt[2][:, :, :blind] = np.nan
    again = gradients(engine, spoilt[0], k, v, *spoilt[1:], **options)
    assert not again[0][:, :blind].any()
    for a, b in zip((dq, dk, dv), again, strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("spoilt", ["k", "v"])
@pytest.mark.parametrize("size", [np.nan, np.inf])
def test_a_row_that_sees_no_key_has_gradient_zero_whatever_keys_hold(engine, spoilt, size):
    q, k, v = qkv(70, 33)
    {"k": k, "v": v}[spoilt][:, 0] = size
    dout, dlse = draw(q.shape, (1, 2, 70))
    dq, _, _ = gradients(engine, q, k, v, dout, dlse, causal=True, align="bottom_right")
    assert not dq[:, :37].any()


@pytest.mark.parametrize("spoilt", ["q", "k"])
def test_a_row_of_scores_of_minus_infinity_is_one_that_sees_no_key(engine, spoilt):
    q, k, v = qkv(70, 33, dtype="float64")
    q[0, 3], k[..., 2] = np.abs(q[0, 3]), np.abs(k[..., 2])
    (q[0, 3] if spoilt == "q" else k)[..., 2] = -np.inf
    (dout,) = draw(q.shape, dtype="float64")
    dout[0, 3] = np.nan
    out, lse = run(engine, q, k, v)
    assert not out[0, 3].any()
    assert np.isneginf(lse[0, :, 3]).all()
    grads = gradients(engine, q, k, v, dout)
    assert not grads[0][0, 3].any()
    if spoilt == "q":  # the keys of the other are not finite, and spoil what meets them
        oracle = {"band": Band(-99, 99), "softmax_scale": 8**-0.5}
        assert_backward(grads, q, k, v, out, dout, None, **oracle)


@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
def test_a_nan_of_any_bits_is_one(engine, bits):
    """0x7fffffff is the NaN that a GPU's own arithmetic gives."""
    q, k, v = qkv(70, 70, dtype="float32")
    q.view(np.uint32)[0, 3, 1, 3] = bits
    out, lse = run(engine, q, k, v, causal=True)
    assert np.isnan(out[0, 3, 1]).all()
    assert np.isnan(lse[0, 1, 3])
    assert np.isnan(out).sum() == 8
    v.view(np.uint32)[0, 69, 0, 2] = bits
    out, _ = run(engine, q, k, v, causal=True)
    assert np.isnan(out[0, 69, 0, 2])


def test_a_nan_score_makes_the_gradients_it_enters_nan(engine):
    q, k, v = qkv(70, 70)
    q[0, 69, 1, 3] = np.nan
    dq, dk, dv = gradients(engine, q, k, v, *draw(q.shape), causal=True)
    assert np.isnan(dq[0, 69, 1]).all()
    assert np.isnan(dk[0, :, 1]).all()
    assert np.isnan(dv[0, :, 1]).all()
    for gradient in (dq[0, :, 0], dk[0, :, 0], dv[0, :, 0]):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("element", [np.nan, np.inf])  # with exp(s - max) of inf - inf
@pytest.mark.parametrize(("dtype", "row"), [*itertools.product(DTYPES, [0, 3, 69])])
def test_a_nan_score_makes_its_row_nan_and_no_other(engine, dtype, element, row):
    q, k, v = qkv(70, 70, dtype=dtype)
    q[0, row, 1, 3], k[..., 3] = element, np.abs(k[..., 3])
    out, lse = run(engine, q, k, v, causal=True)
    assert np.isnan(lse[0, 1, row])
    assert np.isnan(out[0, row, 1].astype(np.float64)).all()
    assert np.isnan(out.astype(np.float64)).sum() == 8
    assert np.isnan(lse).sum() == 1


def test_a_nan_key_makes_every_row_that_sees_it_nan(engine):
    q, k, v = qkv(20, 20)
    k[0, 0] = np.nan
    out, lse = run(engine, q, k, v, causal=True)
    assert np.isnan(out).all()
    assert np.isnan(lse).all()


@pytest.mark.parametrize("bits", [np.nan, np.inf, -np.inf])
def test_absent_tiles_reach_nothing(engine, bits):
    """Keys 256 and later are in tiles that no row visits."""
    q, k, v = qkv(20, 600)
    dout, dlse = draw(q.shape, (1, 2, 20))
    options = {"causal": True, "align": "top_left", "deterministic": True}
    clean = [*run(engine, q, k, v, **options), *gradients(engine, q, k, v, dout, dlse, **options)]
    k[:, 256:] = v[:, 256:] = bits
    spoilt = [*run(engine, q, k, v, **options), *gradients(engine, q, k, v, dout, dlse, **options)]
    assert all(np.array_equal(a, b) for a, b in zip(clean, spoilt, strict=True))
    assert not spoilt[3][:, 256:].any()
    assert not spoilt[4][:, 256:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_past_the_end_reaches_nothing(engine, dtype):
    """Every array is a window into NaN."""
    q, k, v, dout = draw(*[(1, 37, 2, 24)] * 4, dtype=dtype)
    framed = []
    for each in (q, k, v, dout):
        around = np.full((3, 80, 4, 50), np.nan, each.dtype)
        around[1:2, 20:57, 1:3, 13:37] = each
        framed.append(engine.asarray(around)[1:2, 20:57, 1:3, 13:37])
    (out, lse), vjp = cuattn.attention_vjp(*framed[:3], return_lse=True)
    grads = vjp(framed[3])
    out, lse = engine.asnumpy(out), engine.asnumpy(lse)
    grads = tuple(engine.asnumpy(each) for each in (grads.dq, grads.dk, grads.dv))
    oracle = {"band": Band(-37, 37), "softmax_scale": 24**-0.5}
    assert_forward(out, lse, q, k, v, **oracle)
    assert_backward(grads, q, k, v, out, dout, None, **oracle)


# Gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrt",
    [{"q"}, ["k"], ("v", "q"), {"q", "k", "v"}, None],
    ids=("set", "list", "tuple", "all", "none"),
)
@pytest.mark.parametrize("seqlen", [7, 150])
def test_wrt_is_a_set_of_argument_names(engine, seqlen, wrt):
    q, k, v = qkv(seqlen, seqlen)
    dout = draw(q.shape)[0]
    everything = gradients(engine, q, k, v, dout, deterministic=True)
    asked = gradients(engine, q, k, v, dout, wrt=wrt, deterministic=True)
    for name, some, one in zip("qkv", asked, everything, strict=True):
        assert some is None if wrt is not None and name not in wrt else same_bits(some, one)


def test_gradients_have_fixed_fields(engine):
    q, k, v = map(engine.asarray, qkv())
    out, vjp = cuattn.attention_vjp(q, k, v)
    grads = vjp(out)
    assert (grads.dbias, grads.dalibi_slopes, grads.dsinks) == (None, None, None)
    with pytest.raises(AttributeError):
        grads.dq = None


def test_dout_none_is_zero(engine):
    q, k, v = qkv()
    dlse = draw((1, 2, 7))[0]
    got = gradients(engine, q, k, v, None, dlse, deterministic=True)
    want = gradients(engine, q, k, v, np.zeros_like(q), dlse, deterministic=True)
    assert all(map(np.array_equal, got, want))
    assert not got[2].any()
    assert not any(each.any() for each in gradients(engine, q, k, v))


def test_every_returned_output_has_a_gradient(engine):
    q, k, v = qkv()
    dout, dlse = draw(q.shape, (1, 2, 7))
    grads = gradients(engine, q, k, v, dout, dlse)
    assert_backward(grads, q, k, v, run(engine, q, k, v)[0], dout, dlse, **EVERYTHING)
    assert not np.array_equal(grads[0], gradients(engine, q, k, v, dout)[0])


def test_vjp_may_be_called_again(engine):
    q, k, v = map(engine.asarray, qkv())
    out, vjp = cuattn.attention_vjp(q, k, v, deterministic=True)
    first, second = vjp(out), vjp(out, None, {"k"})
    assert second.dq is None
    assert same_bits(engine.asnumpy(first.dk), engine.asnumpy(second.dk))


def test_vjp_equals_forward_then_backward(engine):
    q, k, v = qkv()
    dout, dlse = draw(q.shape, (1, 2, 7))
    held = list(map(engine.asarray, (q, k, v)))
    (out, lse), vjp = cuattn.attention_vjp(*held, return_lse=True, deterministic=True)
    grads = vjp(engine.asarray(dout), engine.asarray(like_lse(q, dlse)))
    assert all(map(same_bits, map(engine.asnumpy, (out, lse)), run(engine, q, k, v)))
    want = gradients(engine, q, k, v, dout, dlse, deterministic=True)
    got = (engine.asnumpy(each) for each in (grads.dq, grads.dk, grads.dv))
    assert all(map(same_bits, got, want))
