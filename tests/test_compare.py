"""The tolerance rule accepts what a good kernel gives and rejects small, plausible faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from compare import as_stored, assert_accepted, assert_forward
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Problem, problems

from cuattn.cpu import reference
from cuattn.cpu.tolerance import (
    Expected,
    compare,
    expected_backward,
    expected_forward,
    in_order,
)
from cuattn.planning.problem import Band

DTYPES = ("float16", "bfloat16", "float32", "float64")
SEQLEN, SCALE = 200, 0.2
CAUSAL = Band(-SEQLEN, 0)


class Case:
    """One causal problem with what must come out, and the `low` results a good kernel gives."""

    def __init__(self, dtype: str) -> None:
        rng = np.random.default_rng(1)
        self.q, self.k, self.v, self.dout = (
            rng.standard_normal((1, SEQLEN, 2, 24)).astype(dtype) for _ in range(4)
        )
        self.wide = np.float64 if dtype == "float64" else np.float32
        self.dlse = rng.standard_normal((1, 2, SEQLEN)).astype(self.wide)
        given = {"band": CAUSAL, "softmax_scale": SCALE}
        out, lse = expected_forward(self.q, self.k, self.v, **given)
        low = {"dtype": self.wide, "operand_dtype": self.q.dtype, "product": in_order}
        low_out, low_lse = reference.forward(self.q, self.k, self.v, **given, **low)
        stored = low_out.astype(dtype)
        inputs = (self.q, self.k, self.v)
        gradients = expected_backward(*inputs, stored, self.dout, self.dlse, **given)
        low_gradients = reference.backward(
            *inputs, self.dout, self.dlse, out=stored, **given, **low
        )
        self.expected = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        self.expected.update(out=out, lse=lse)
        self.low = {
            name: low_gradient.astype(dtype)
            for name, low_gradient in zip(("dq", "dk", "dv"), low_gradients, strict=True)
        }
        self.low.update(out=stored, lse=low_lse)
        self.low_out = low_out  # before it is rounded


@pytest.fixture(scope="module", params=DTYPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


RESULTS = ("out", "lse", "dq", "dk", "dv")

#: Half-ulps of the result's largest value that a bound may reach here, (16-bit, wide inputs).
LARGEST_BOUND = {"out": (3, 25), "lse": (30, 30), "dq": (5, 130), "dk": (5, 300), "dv": (4, 60)}


@pytest.mark.parametrize("name", RESULTS)
def test_accepts_low_and_the_exact_result(case: Case, name: str) -> None:
    assert_accepted(name, case.low[name], case.expected[name])
    assert_accepted(name, as_stored(case.expected[name]), case.expected[name])


@pytest.mark.parametrize("name", RESULTS)
def test_rejects_just_over_the_bound_and_accepts_just_under(case: Case, name: str) -> None:
    expected = case.expected[name]
    for factor, accepted in ((0.99, True), (1.01, False)):
        x = expected.value + factor * expected.bound
        assert compare(x, replace(expected, dtype=x.dtype)).accepted is accepted


def test_bound_of_out_is_the_rule_spelled_out(case: Case) -> None:
    """max(2 max|low - ref|, luck) + 4 eps max(terms) + max(half unit), per head and block."""
    expected = case.expected["out"]
    half = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(case.q.dtype.name, 0.0)
    eps = np.finfo(case.wide).eps
    q, k, v = (a.astype(np.float64)[0].swapaxes(0, 1) for a in (case.q, case.k, case.v))
    scores = np.where(np.tri(SEQLEN, dtype=bool), SCALE * q @ k.swapaxes(1, 2), -np.inf)
    P = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    A = SCALE * np.abs(q) @ np.abs(k).swapaxes(1, 2) / 4
    terms = (P * (1 + A)) @ np.abs(v) + (P * A).sum(axis=2, keepdims=True) * np.abs(P @ v)
    lucky = np.minimum(4 * np.sqrt(P**2 @ v**2 / 3), P @ np.abs(v)).swapaxes(0, 1)[None]
    terms = terms.swapaxes(0, 1)[None]
    for head in range(2):
        for rows in (slice(0, 128), slice(128, SEQLEN)):
            block = (0, rows, head)
            low_error = np.abs(case.low_out[block].astype(np.longdouble) - expected.value[block])
            bound = max(2 * low_error.max(), half * lucky[block].max())
            bound += 4 * eps * terms[block].max()
            bound += half * np.abs(expected.value[block]).max()
            np.testing.assert_allclose(
                np.broadcast_to(expected.bound, expected.value.shape)[block].astype(float),
                float(bound),
                rtol=1e-6,
            )


def fused(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """``a b^T`` from the last term to the first, each product and sum rounded together."""
    total = np.zeros((len(a), len(b)), a.dtype)
    for left, right in zip(a.T[::-1].astype(np.float64), b.T[::-1].astype(np.float64), strict=True):
        total = (total + np.multiply.outer(left, right)).astype(a.dtype)
    return total


@settings(max_examples=200)
@given(problem=problems())
def test_accepts_sums_in_another_order(problem: Problem) -> None:
    """Also where one row and one head dim are all that low can be judged by."""
    problem = replace(problem, dtype="float32", out_dtype=None)
    q, k, v = map(problem.canonical, problem.arrays())
    dout, dlse = problem.cotangents()
    dout = None if dout is None else problem.canonical(dout)
    dlse = None if dlse is None else problem.canonical_lse(dlse)
    how = {"dtype": np.float32, "product": fused, **problem.oracle}
    out, lse = reference.forward(q, k, v, **how)
    gradients = reference.backward(q, k, v, dout, dlse, out=out, **how)
    wanted = expected_forward(q, k, v, **problem.oracle)
    wanted += expected_backward(q, k, v, out, dout, dlse, **problem.oracle)
    for name, x, expected in zip(RESULTS, (out, lse, *gradients), wanted, strict=True):
        assert_accepted(name, x, expected)


class AtAnotherScale:
    """Weights rounded as a kernel does whose running maximum is not the row's: another draw."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype

    def __call__(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        rounded = (a * np.float32(0.7)).astype(self.dtype).astype(a.dtype) / np.float32(0.7)
        return in_order(rounded, b)


def out_at_another_scale(q, k, v, band: Band, softmax_scale: float) -> np.ndarray:
    """Out of such a kernel, not yet rounded."""
    q32, k32, v32 = (each.astype(np.float32) for each in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]), np.float32)
    visible = reference.visible_pairs(band, q.shape[1], k.shape[1])
    for b in range(q.shape[0]):
        for h, h_kv in reference.query_heads(q.shape[2], k.shape[2]):
            weights = reference.softmax_rows(
                q32[b, :, h], k32[b, :, h_kv], visible, softmax_scale, in_order
            )
            total = reference.visible_product(
                weights.W, v32[b, :, h_kv], weights.visible, AtAnotherScale(q.dtype)
            )
            out[b, :, h] = weights.normalised(total)
    return out


@settings(max_examples=300)
@given(problem=problems(), dtype=st.sampled_from(("float16", "bfloat16")))
def test_accepts_weights_rounded_at_another_scale(problem: Problem, dtype: str) -> None:
    """Few elements too, where low may have been lucky."""
    problem = replace(problem, dtype=dtype, out_dtype=None)
    q, k, v = map(problem.canonical, problem.arrays())
    out = out_at_another_scale(q, k, v, **problem.oracle)
    wanted, _ = expected_forward(q, k, v, **problem.oracle)
    assert_accepted("out", out.astype(q.dtype), wanted)


@pytest.mark.parametrize("out_dtype", ["float16", "float32"])
def test_accepts_a_weight_below_the_normal_numbers_that_decides(out_dtype: str) -> None:
    """A key of value 0 has weight 1; out is the small weight of the other, times 1000."""
    q, v = np.ones((1, 1, 1, 1), np.float16), np.array([0, 1000], np.float16).reshape(1, 2, 1, 1)
    given = {"band": Band(-9, 9), "softmax_scale": 1.0}
    for score in np.arange(-13, -9, 0.01):
        k = np.array([0, score], np.float16).reshape(1, 2, 1, 1)
        out = out_at_another_scale(q, k, v, **given).astype(out_dtype)
        wanted, _ = expected_forward(q, k, v, **given, out_dtype=out_dtype)
        assert_accepted("out", out, wanted)
        assert not compare(out * np.dtype(out_dtype).type(1.25), wanted).accepted


def test_accepts_weights_below_the_normal_numbers() -> None:
    """Key 128 is seen by one row, with a weight that float16 holds to one digit or two."""
    causal = {"causal": True, "softmax_scale": 1.0}
    problem = Problem("float16", "bshd", 1, 129, 129, 1, 1, 33, 33, **causal)
    q, k, v = problem.arrays()
    dout, _ = problem.cotangents()
    oracle = problem.oracle
    out = reference.forward(q, k, v, **oracle, dtype=np.float32)[0].astype(q.dtype)
    expected = expected_backward(q, k, v, out, dout, None, **oracle)
    Q, K, V, dO, its_out = (a[0, :, 0].astype(np.float32) for a in (q, k, v, dout, out))
    visible = reference.visible_pairs(oracle["band"], 129, 129)
    weights = reference.softmax_rows(Q, K, visible, oracle["softmax_scale"])
    P = weights.normalised(weights.W).astype(np.float16)
    assert 0 < P[128, 128] < np.finfo(np.float16).smallest_normal
    delta = (dO * its_out).sum(axis=1, keepdims=True)
    dS = (P.astype(np.float32) * (dO @ V.T - delta)).astype(np.float16)
    dk = (dS.T.astype(np.float32) @ Q)[None, :, None].astype(np.float16)
    assert_accepted("dk", dk, expected[1])
    dk[0, 128] *= np.float16(2)
    assert not compare(dk, expected[1]).accepted


def test_sums_rounded_towards_zero_double_eps_and_nothing_else(case: Case) -> None:
    given = {"band": CAUSAL, "softmax_scale": SCALE}
    usual = expected_forward(case.q, case.k, case.v, **given)[0].bound
    to_zero = expected_forward(case.q, case.k, case.v, **given, rounds_to_zero=True)[0].bound
    low_error = 2 * usual - to_zero
    assert (low_error >= 0).all()
    assert (to_zero > usual).all()
    assert (to_zero <= 2 * usual).all()


@pytest.mark.parametrize("name", RESULTS)
def test_bound_is_a_few_roundings(case: Case, name: str) -> None:
    """Small against the result's largest value: a rule loosened tenfold fails here."""
    expected = case.expected[name]
    magnitude = np.abs(expected.value).max()
    eps = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
    eps_of_result = eps[np.dtype(case.wide).name if name == "lse" else case.q.dtype.name]
    roundings = expected.bound.max() / (eps_of_result * magnitude)
    assert roundings < LARGEST_BOUND[name][case.q.dtype.itemsize > 2]


@pytest.mark.parametrize("name", RESULTS)
def test_rejects_late_rows_times_1_05(case: Case, name: str) -> None:
    """Causal rows shrink with their number: only a bound per block sees the late ones."""
    x = as_stored(case.expected[name])
    late = (slice(None), slice(180, None)) if x.ndim == 4 else (..., slice(180, None))
    x[late] = (x[late].astype(np.float64) * 1.05).astype(x.dtype)
    assert compare(x, case.expected[name]).ratio > 1


def dropped_key(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Out and lse with key 60 hidden from row 150."""
    q, k, v = (a.astype(np.float64) for a in (case.q, case.k, case.v))
    row = q[:, 150:151]
    keys = np.delete(np.arange(151), 60)
    return reference.forward(row, k[:, keys], v[:, keys], band=Band(-999, 999), softmax_scale=SCALE)


def test_rejects_one_key_dropped_from_one_row(case: Case) -> None:
    out, lse = (as_stored(case.expected[name]) for name in ("out", "lse"))
    wrong_out, wrong_lse = dropped_key(case)
    out[:, 150:151] = wrong_out.astype(out.dtype)
    lse[:, :, 150:151] = wrong_lse.astype(lse.dtype)
    assert compare(out, case.expected["out"]).ratio > 1
    assert compare(lse, case.expected["lse"]).ratio > 10


@pytest.mark.parametrize("name", ("dk", "dv"))
def test_rejects_one_row_dropped_from_one_key(case: Case, name: str) -> None:
    """The backward's analogue: row 150 gives nothing to key 140."""
    x = as_stored(case.expected[name]).astype(np.float64)
    place = {"dk": 1, "dv": 2}[name]
    row, inputs = slice(150, 151), (case.q, case.k, case.v)
    q, k, v = (a.astype(np.float64) for a in inputs)
    given = {"band": Band(-999, 999), "softmax_scale": SCALE}
    contribution = reference.backward(
        q[:, row],
        k[:, :151],
        v[:, :151],
        case.dout[:, row],
        case.dlse[:, :, row],
        **given,
    )[place][:, 140]
    x[:, 140] -= contribution
    assert compare(x.astype(case.q.dtype), case.expected[name]).ratio > 1


@pytest.mark.parametrize("name", RESULTS)
def test_rejects_two_heads_swapped(case: Case, name: str) -> None:
    x = as_stored(case.expected[name])
    x = x[:, ::-1] if x.ndim == 3 else x[:, :, ::-1]
    assert compare(x, case.expected[name]).ratio > 10


def test_rejects_lse_off_by_1e_3(case: Case) -> None:
    x = as_stored(case.expected["lse"])
    assert compare(x + x.dtype.type(1e-3), case.expected["lse"]).ratio > 10


def test_rejects_a_gradient_without_dlse(case: Case) -> None:
    dq, _, _ = reference.backward(
        case.q, case.k, case.v, case.dout, None, band=CAUSAL, softmax_scale=SCALE
    )
    assert compare(dq.astype(case.q.dtype), case.expected["dq"]).ratio > 10


def test_non_finite_values_must_be_where_the_reference_has_them() -> None:
    value = np.ones((1, 3, 1, 2))
    value[0, 1] = np.nan
    expected = Expected(value, np.full(value.shape, 0.1), np.dtype(np.float32))
    assert compare(value.astype(np.float32), expected).accepted
    for index, wrong in (((0, 1, 0, 0), 0.0), ((0, 1, 0, 0), np.inf), ((0, 2, 0, 1), np.nan)):
        x = value.astype(np.float32)
        x[index] = wrong
        assert compare(x, expected).ratio == np.inf
    minus = Expected(np.full((1, 1, 2), -np.inf), np.ones((1, 1, 2)), np.dtype(np.float32))
    assert compare(np.full((1, 1, 2), -np.inf, np.float32), minus).accepted
    assert not compare(np.full((1, 1, 2), np.inf, np.float32), minus).accepted


def test_the_message_names_the_place() -> None:
    case = Case("float32")
    out = as_stored(case.expected["out"])
    out[0, 130, 1, 3] += 1
    with pytest.raises(AssertionError, match=r"out\[0, 130, 1, 3\].*head 1, rows 128\.\.255"):
        assert_forward(out, None, case.q, case.k, case.v, band=CAUSAL, softmax_scale=SCALE)
