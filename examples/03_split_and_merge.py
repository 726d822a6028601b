"""Keys in pieces: attend to each, merge the results, and send gradients back through the merge.

This is how a key space that does not fit in one place is attended to: piece by piece as it is
read, device by device, step by step of a ring. The result is exact, because attention over a set
of keys, written as (out, lse), merges with that over any other set.

Runs on a GPU where CuPy finds one, else on NumPy arrays:  python examples/03_split_and_merge.py
"""

import itertools

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:
    xp = np
print(f"arrays: {xp.__name__}")

rng = np.random.default_rng(0)
seqlen_q, seqlen_k = 64, 6000
q = xp.asarray(rng.standard_normal((1, seqlen_q, 2, 32)).astype(np.float16))
k = xp.asarray(rng.standard_normal((1, seqlen_k, 2, 32)).astype(np.float16))
v = xp.asarray(rng.standard_normal((1, seqlen_k, 2, 32)).astype(np.float16))


def largest_difference(a, b):
    """As a Python float, whatever the arrays are."""
    return float(xp.abs(a.astype(np.float32) - b.astype(np.float32)).max())


# The queries are the last positions of the sequence; k_offset says where a piece of keys begins.
# out_dtype keeps the parts unrounded, so that only the merged result is rounded to float16.
options = {"causal": True, "q_offset": seqlen_k - seqlen_q, "out_dtype": "float32"}
cuts = [0, 1000, 1001, 4500, seqlen_k]
pieces = [slice(begin, end) for begin, end in itertools.pairwise(cuts)]

parts, vjps = [], []
for piece in pieces:
    part, vjp = cuattn.attention_vjp(
        q, k[:, piece], v[:, piece], k_offset=piece.start, return_lse=True, **options
    )
    parts.append(part)
    vjps.append(vjp)
    share = float(xp.exp(part[1].astype(np.float64)).mean())
    print(f"keys {piece.start:4} to {piece.stop:4}: mean softmax mass {share:9.1f}")

(out, lse), merge_vjp = cuattn.merge_states_vjp(parts)
whole, whole_vjp = cuattn.attention_vjp(q, k, v, return_lse=True, **options)
print(f"merged against one call: out off by {largest_difference(out, whole[0]):.1e}, ", end="")
print(f"lse off by {largest_difference(lse, whole[1]):.1e}")
assert largest_difference(out, whole[0]) < 1e-3  # weights are float16 on tensor cores
assert largest_difference(lse, whole[1]) < 1e-4

# The order of the parts does not matter, nor how they are grouped.
later = cuattn.merge_states(parts[2:])
regrouped, _ = cuattn.merge_states([later, parts[1], parts[0]])
assert largest_difference(regrouped, out) < 1e-5

# Backwards the same way: through the merge to every part, and from the part to q and its keys.
# dq is a sum over the parts, dk and dv are pieces.
dout = xp.asarray(rng.standard_normal(out.shape).astype(np.float32))
expected = whole_vjp(dout)
dq = xp.zeros(q.shape, np.float32)
for piece, vjp, (dpart, dlse) in zip(pieces, vjps, merge_vjp(dout), strict=True):
    gradients = vjp(dpart, dlse)
    dq += gradients.dq
    for name in ("dk", "dv"):
        difference = largest_difference(getattr(gradients, name), getattr(expected, name)[:, piece])
        assert difference < 2e-3, f"{name} of keys {piece} is off by {difference}"
print(f"gradients through the merge: dq off by {largest_difference(dq, expected.dq):.1e}")
assert largest_difference(dq, expected.dq) < 2e-3
