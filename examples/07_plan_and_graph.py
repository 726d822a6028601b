"""A call made ready once: on a GPU nothing but launches in the loop, and CUDA graphs of it.

`cuattn.plan` gives an executable for arrays of one look. Its calls neither allocate nor compile, so
a step of a simulation or of training can be captured in a CUDA graph with what is around it. On
NumPy arrays it saves the checks, no more.

Runs on a GPU where CuPy finds one, else on NumPy arrays:  python examples/07_plan_and_graph.py
"""

import time

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:
    xp = np
print(f"arrays: {xp.__name__}")

rng = np.random.default_rng(0)
shape = (2, 96, 4, 32)  # batch, seqlen, heads, head_dim
q, k, v, target = (xp.asarray(rng.standard_normal(shape).astype(np.float32)) for _ in range(4))

run = cuattn.plan(q, k, v, causal=True, backward=True)
dout = xp.empty_like(q)


def step():
    """One step of gradient descent of 0.5 * sum((out - target)**2), all of it in place."""
    out = run(q, k, v)
    xp.subtract(out, target, out=dout)
    gradients = run.backward(dout)
    for array, gradient in ((q, gradients.dq), (k, gradients.dk), (v, gradients.dv)):
        xp.multiply(gradient, 0.1, out=gradient)  # its own memory, until the next call
        xp.subtract(array, gradient, out=array)


def loss():
    """As a Python float."""
    return 0.5 * float(((run(q, k, v) - target) ** 2).sum())


before = loss()
if xp is np:
    for _ in range(50):
        step()
else:
    run.release()  # used on CuPy's current stream so far, from here on in another
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        step()  # so that CuPy's own kernels are compiled before the capture
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        begin = time.perf_counter()
        for _ in range(49):
            graph.launch(stream)
        stream.synchronize()
        print(f"49 steps by graph: {1e6 * (time.perf_counter() - begin) / 49:.0f} us each")
    run.release()
after = loss()
print(f"loss: {before:.1f}, after 50 steps {after:.1f}")
assert after < 0.7 * before

# What it computes has the bits of cuattn.attention, and it takes nothing else than was planned.
assert bool((run(q, k, v) == cuattn.attention(q, k, v, causal=True)).all())
try:
    run(q[:, :95], k, v)
except cuattn.ArgumentError as error:
    print(f"refused: {str(error)[:40]} ...")
else:
    raise AssertionError("another shape was taken")
