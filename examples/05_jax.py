"""cuattn as a differentiable function of JAX, beside functions that JAX compiles.

Arrays go in as they are, without a copy, and results come back over DLPack. For a project of your
own, copy all that stands between the two lines below that say so: as_jax, attention_with, imports.

cuattn needs arrays that have values, so it runs between jitted functions, not within one: there it
says so. On the host a jitted function can call back: a custom_vjp that calls cuattn within
jax.pure_callback, keeps q, k and v, and has one callback for attention_vjp and its gradients.

Runs on a GPU where JAX and CuPy find one, else on the CPU:  python examples/05_jax.py
"""

# To copy: from here ---------------------------------------------------------------------------

import os

import numpy as np

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception:
    cupy = None
# When it starts, JAX takes three quarters of a GPU's memory, unless it is told not to.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import cuattn


def as_jax(array):
    """The same memory as a JAX array, where JAX can use it; else a copy."""
    if not isinstance(array, np.ndarray):
        # JAX frees memory without knowing what cuattn still does with it: so nothing.
        cupy.cuda.get_current_stream(array.device.id).synchronize()
    elif array.dtype.name == "bfloat16":  # which NumPy does not share
        return jnp.from_dlpack(array.view(np.uint16)).view(jnp.bfloat16)
    return jnp.from_dlpack(array)


def attention_with(*, return_lse=False, **options):
    """``cuattn.attention`` with these options, as a function of q, k and v that JAX can pull back.

    Options go here: ``attention = attention_with(causal=True)``, then ``attention(q, k, v)``.
    ``custom_vjp`` calls the functions below with arrays, not tracers, as long as nobody jits.
    """
    if "out" in options:
        raise TypeError("out= cannot be differentiated: JAX would not see that it is written")

    def as_results(results):
        return jax.tree.map(as_jax, results)  # of out, or of out and lse

    @jax.custom_vjp
    def attention(q, k, v):
        return as_results(cuattn.attention(q, k, v, return_lse=return_lse, **options))

    def forward(q, k, v):
        results, vjp = cuattn.attention_vjp(q, k, v, return_lse=return_lse, **options)
        # What is kept must be a tree of arrays; a Partial is one, without any.
        return as_results(results), jax.tree_util.Partial(vjp)

    def backward(vjp, cotangents):
        gradients = vjp(*cotangents) if return_lse else vjp(cotangents)
        return as_results((gradients.dq, gradients.dk, gradients.dv))

    attention.defvjp(forward, backward)
    return attention


# To copy: up to here. What follows shows it at work. --------------------------------------------


@jax.jit
def formula(q, k, v):
    """Causal attention and its lse as JAX computes them, with every score in memory."""
    with jax.default_matmul_precision("highest"):
        scores = jnp.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tri(q.shape[1], dtype=bool), scores, -jnp.inf)
        lse = jax.scipy.special.logsumexp(scores, axis=-1)
        return jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - lse[..., None]), v), lse


def draw(count, *shape):
    """So many arrays of float32, the same every time."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((count, *shape), np.float32))


def largest_difference(a, b):
    """Over all arrays of two trees, as a Python float."""
    worst = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), a, b)
    return max(jax.tree.leaves(worst))


def compare_gradients():
    """Results and gradients, those through lse too, against JAX's own."""
    q, k, v, weights = draw(4, 2, 100, 4, 32)

    def loss(attention, q, k, v):
        out, lse = attention(q, k, v)
        return (weights * out).sum() + (lse**2).sum(), (out, lse)

    def gradients(attention):
        grad = jax.grad(loss, argnums=(1, 2, 3), has_aux=True)
        return grad(attention, q, k, v)

    ours, results = gradients(attention_with(causal=True, return_lse=True))
    theirs, expected = gradients(formula)
    worst = largest_difference(results, expected)
    worst_gradient = largest_difference(ours, theirs)
    print(f"beside the formula: results off by {worst:.1e}, gradients by {worst_gradient:.1e}")
    assert max(worst, worst_gradient) < 1e-4


def use_bfloat16():
    """Gradients have the dtype of their arrays; lse and all sums are float32."""
    q, k, v = draw(3, 2, 100, 4, 32).astype(jnp.bfloat16)
    attention = attention_with(causal=True)
    out, pull = jax.vjp(attention, q, k, v)
    gradients = pull(jnp.ones_like(out))
    expected, _ = formula(*(each.astype(jnp.float32) for each in (q, k, v)))
    worst = largest_difference(out.astype(jnp.float32), expected)
    print(f"bfloat16: out {out.dtype}, off by {worst:.1e}")
    assert worst < 3e-2
    assert {each.dtype for each in (out, *gradients)} == {jnp.dtype(jnp.bfloat16)}


def see_what_tracing_says():
    """Within jit and vmap arrays have no values: an error, with what to do."""
    q, k, v = draw(3, 2, 10, 4, 32)
    attention = attention_with()
    for transform in (jax.jit, jax.vmap):
        try:
            transform(attention)(q, k, v)
        except cuattn.DTypeError as error:
            print(f"{transform.__name__}: {error}")
            assert "call cuattn outside of the traced function" in str(error)
        else:
            raise AssertionError(f"{transform.__name__} has no values to give")


def descend(steps=60):
    """One attention layer that learns its weights; around it JAX compiles."""
    x, target = draw(2, 4, 32, 64)
    weights = {"qkv": draw(1, 64, 3, 4, 16)[0] / 8, "out": draw(1, 4, 16, 64)[0] / 8}
    attention = attention_with(causal=True)

    @jax.jit
    def project(weights):
        return jnp.unstack(jnp.einsum("bsw,wthd->tbshd", x, weights["qkv"]))

    @jax.jit
    def distance(weights, out):
        return ((jnp.einsum("bshd,hdw->bsw", out, weights["out"]) - target) ** 2).mean()

    @jax.jit
    def step(weights, gradients):
        return jax.tree.map(lambda weight, gradient: weight - 4.0 * gradient, weights, gradients)

    def loss(weights):
        return distance(weights, attention(*project(weights)))

    losses = []
    for _ in range(steps):
        value, gradients = jax.value_and_grad(loss)(weights)
        weights = step(weights, gradients)
        losses.append(float(value))
    print(f"loss before {losses[0]:.3f}, after {steps} steps {losses[-1]:.3f}")
    assert losses[-1] < 0.7 * losses[0]


def main():
    """Everything above, on the device that there is."""
    if cupy is None:
        jax.config.update("jax_platforms", "cpu")
        print("arrays: numpy")
    elif jax.default_backend() == "gpu":
        print(f"arrays: cupy, on {jax.devices()[0]}")
    else:
        print("arrays: numpy, for this JAX has no GPU, though there is cupy")
    compare_gradients()
    use_bfloat16()
    see_what_tracing_says()
    descend()


if __name__ == "__main__":
    main()
