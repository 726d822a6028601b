"""Attention, causal attention, and lse, against the formula that they stand for.

Runs on a GPU where CuPy finds one, else on NumPy arrays:  python examples/01_first_attention.py
"""

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:
    xp = np
print(f"arrays: {xp.__name__}")

# (batch, seqlen, heads, head_dim) is the default layout. Two query heads share each key head.
rng = np.random.default_rng(0)
seqlen, head_dim = 500, 64
q = xp.asarray(rng.standard_normal((2, seqlen, 4, head_dim), dtype=np.float32))
k = xp.asarray(rng.standard_normal((2, seqlen, 2, head_dim), dtype=np.float32))
v = xp.asarray(rng.standard_normal((2, seqlen, 2, head_dim), dtype=np.float32))


def formula(q, k, v, visible):
    """The definition, with every score in memory: seqlen x seqlen numbers a head, in float64."""
    q, k, v = (array.astype(np.float64) for array in (q, k.repeat(2, axis=2), v.repeat(2, axis=2)))
    scores = xp.einsum("bihd,bjhd->bhij", q, k) / head_dim**0.5
    scores = xp.where(visible, scores, -xp.inf)
    peak = scores.max(axis=-1, keepdims=True)
    weights = xp.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True)
    return xp.einsum("bhij,bjhd->bihd", weights / total, v), (peak + xp.log(total))[..., 0]


def largest_difference(a, b):
    """As a Python float, whatever the arrays are."""
    return float(xp.abs(a - b).max())


# Every query sees every key.
out = cuattn.attention(q, k, v)
expected, _ = formula(q, k, v, xp.ones((seqlen, seqlen), bool))
print(f"full    out {out.shape} {out.dtype}, off by {largest_difference(out, expected):.1e}")
assert out.shape == q.shape
assert largest_difference(out, expected) < 1e-5

# Query i sees keys 0 to i. lse is the logarithm of the softmax denominator, one number a row.
out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
expected, expected_lse = formula(q, k, v, xp.tri(seqlen, dtype=bool))
print(f"causal  out {out.shape} {out.dtype}, off by {largest_difference(out, expected):.1e}")
print(f"        lse {lse.shape} {lse.dtype}, off by {largest_difference(lse, expected_lse):.1e}")
assert largest_difference(out, expected) < 1e-5
assert largest_difference(lse, expected_lse) < 1e-5
# The first row sees one key, so it is that key's value, in both query heads of the key head.
assert largest_difference(out[:, 0, ::2], v[:, 0]) < 1e-5

# With fewer queries than keys, say which corner the diagonal meets. A decoding step, for example,
# brings the last query alone: it sees all that came before it.
last = cuattn.attention(q[:, -1:], k, v, causal=True, align="bottom_right")
print(f"last row alone, off by {largest_difference(last, out[:, -1:]):.1e}")
assert largest_difference(last, out[:, -1:]) < 1e-5

# What cannot be meant raises, and says what to do.
try:
    cuattn.attention(q[:, -1:], k, v, causal=True)
except cuattn.ArgumentError as error:
    print(f"refused: {error}")
else:
    raise AssertionError("different lengths need align or offsets")
