"""Gradients: against finite differences, and in a gradient step that lowers a loss.

Runs on a GPU where CuPy finds one, else on NumPy arrays:  python examples/02_gradients.py
"""

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:
    xp = np
print(f"arrays: {xp.__name__}")

# float64, so that finite differences have digits left.
rng = np.random.default_rng(0)
q, k, v, target = (xp.asarray(rng.standard_normal((1, 50, 2, 16))) for _ in range(4))


def loss(q, k, v):
    """Half the squared distance between causal attention and a target."""
    return 0.5 * float(((cuattn.attention(q, k, v, causal=True) - target) ** 2).sum())


# attention_vjp returns the result and a function that pulls gradients back through it.
out, vjp = cuattn.attention_vjp(q, k, v, causal=True)
gradients = vjp(out - target)  # the gradient of the loss by out
print(f"dq {gradients.dq.shape}, dk {gradients.dk.shape}, dv {gradients.dv.shape}")

# Along any direction, the slope of the loss is the gradient's component.
step = 1e-5
for name in ("q", "k", "v"):
    arrays = {"q": q, "k": k, "v": v}
    direction = xp.asarray(rng.standard_normal(q.shape))
    ahead = loss(**arrays | {name: arrays[name] + step * direction})
    behind = loss(**arrays | {name: arrays[name] - step * direction})
    slope = (ahead - behind) / (2 * step)
    component = float((getattr(gradients, "d" + name) * direction).sum())
    print(f"d{name} along a direction: {component:+.8f}, finite difference {slope:+.8f}")
    assert abs(component - slope) < 1e-6 * max(1.0, abs(slope))

# wrt asks for less: the rest is None and is not computed.
only = vjp(out - target, wrt={"v"})
assert only.dq is None
assert only.dk is None
assert bool((only.dv == gradients.dv).all())

# lse is a result like out, so it has a gradient too; here that of lse.sum(), with none for out.
(_, lse), vjp_both = cuattn.attention_vjp(q, k, v, causal=True, return_lse=True)
of_lse = vjp_both(None, xp.ones_like(lse))
assert float(xp.abs(of_lse.dq).max()) > 0.0
assert float(xp.abs(of_lse.dv).max()) == 0.0, "lse does not depend on v"

# Gradient descent on all three.
before = loss(q, k, v)
for _ in range(20):
    out, vjp = cuattn.attention_vjp(q, k, v, causal=True)
    gradients = vjp(out - target)
    q, k, v = q - 0.1 * gradients.dq, k - 0.1 * gradients.dk, v - 0.1 * gradients.dv
after = loss(q, k, v)
print(f"loss before {before:.1f}, after 20 steps {after:.1f}")
assert after < 0.9 * before
