"""A model with attention trained without a framework: every gradient is written down.

The task is associative recall. A memory holds pairs, such as "7 is d" and "2 is a"; asked for 2,
the model is to answer a. Questions attend to the names in the memory, and take the answers.

Runs on a GPU where CuPy finds one, else on NumPy arrays:  python examples/06_train_with_cupy.py
"""

import numpy as np

import cuattn

try:
    import cupy as xp

    xp.cuda.runtime.getDeviceCount()
except Exception:
    xp = np

NAMES, ANSWERS, PAIRS, BATCH = 32, 10, 16, 32
WIDTH, HEADS, HEAD_DIM = 32, 2, 16
SHAPES = {
    "name": (NAMES, WIDTH),  # a row for each name, whether in the memory or asked for
    "answer": (ANSWERS, WIDTH),
    "q": (WIDTH, HEADS, HEAD_DIM),
    "k": (WIDTH, HEADS, HEAD_DIM),
    "v": (WIDTH, HEADS, HEAD_DIM),
    "out": (HEADS, HEAD_DIM, ANSWERS),
}


def new_parameters(rng, dtype):
    """Normal numbers, such that a product of two is not larger than either."""
    return {
        name: xp.asarray(rng.standard_normal(shape) / WIDTH**0.5, dtype)
        for name, shape in SHAPES.items()
    }


def new_batch(rng):
    """Names and answers of the pairs, then names that are asked for and what to answer."""
    names = rng.permuted(np.tile(np.arange(NAMES), (BATCH, 1)), axis=1)[:, :PAIRS]
    answers = rng.integers(0, ANSWERS, (BATCH, PAIRS))
    order = rng.permuted(np.tile(np.arange(PAIRS), (BATCH, 1)), axis=1)
    asked, wanted = (np.take_along_axis(each, order, axis=1) for each in (names, answers))
    return [xp.asarray(each) for each in (names, answers, asked, wanted)]


def project(x, weights):
    """From (batch, seqlen, width) to (batch, seqlen, heads, head_dim), the axes of cuattn."""
    return xp.tensordot(x, weights, axes=1)


def project_vjp(x, weights, gradient):
    """Gradients of x and of the weights, given that of ``project(x, weights)``."""
    dx = xp.tensordot(gradient, weights, axes=((2, 3), (1, 2)))
    return dx, xp.tensordot(x, gradient, axes=((0, 1), (0, 1)))


def cross_entropy(scores, wanted):
    """The mean of -log(probability of what is wanted), and its gradient by the scores."""
    probabilities = xp.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    at = wanted[..., None]
    loss = -xp.log(xp.take_along_axis(probabilities, at, axis=-1)).mean()
    is_wanted = (xp.arange(ANSWERS) == at).astype(scores.dtype)
    return loss, (probabilities - is_wanted) / wanted.size


def model(parameters, batch):
    """The loss, the share of answers that are right, and the gradient of every parameter."""
    names, answers, asked, wanted = batch

    # Forward.
    x_q, x_k = parameters["name"][asked], parameters["name"][names]
    x_v = parameters["answer"][answers]
    q = project(x_q, parameters["q"])
    k = project(x_k, parameters["k"])
    v = project(x_v, parameters["v"])
    out, attention_vjp = cuattn.attention_vjp(q, k, v)
    scores = xp.tensordot(out, parameters["out"], axes=2)
    loss, dscores = cross_entropy(scores, wanted)
    right = (scores.argmax(axis=-1) == wanted).mean()

    # Backward: the same steps, the last one first.
    gradients = {name: xp.zeros_like(each) for name, each in parameters.items()}
    gradients["out"] = xp.tensordot(out, dscores, axes=((0, 1), (0, 1)))
    dout = xp.tensordot(dscores, parameters["out"], axes=((2,), (2,)))
    of = attention_vjp(dout)
    dx_q, gradients["q"] = project_vjp(x_q, parameters["q"], of.dq)
    dx_k, gradients["k"] = project_vjp(x_k, parameters["k"], of.dk)
    dx_v, gradients["v"] = project_vjp(x_v, parameters["v"], of.dv)
    xp.add.at(gradients["name"], asked, dx_q)  # a row is used many times: all uses add up
    xp.add.at(gradients["name"], names, dx_k)
    xp.add.at(gradients["answer"], answers, dx_v)
    return loss, right, gradients


def check_gradients():
    """Along any direction, the slope of the loss is the gradient's component; in float64."""
    rng = np.random.default_rng(0)
    parameters, batch = new_parameters(rng, np.float64), new_batch(rng)
    _, _, gradients = model(parameters, batch)
    size = 1e-5
    worst = 0.0
    for name, gradient in gradients.items():
        direction = xp.asarray(rng.standard_normal(SHAPES[name]))
        ahead, _, _ = model(parameters | {name: parameters[name] + size * direction}, batch)
        behind, _, _ = model(parameters | {name: parameters[name] - size * direction}, batch)
        slope, component = (ahead - behind) / (2 * size), (gradient * direction).sum()
        worst = max(worst, float(abs(slope - component)))
    print(f"gradients of {len(gradients)} parameters, off from finite differences by {worst:.1e}")
    assert worst < 1e-8


def train(steps=150, rate=1e-2):
    """Adam, on a new batch at every step; the last loss and share of right answers."""
    rng = np.random.default_rng(0)
    parameters = new_parameters(rng, np.float32)
    means = {name: xp.zeros_like(each) for name, each in parameters.items()}
    squares = {name: xp.zeros_like(each) for name, each in parameters.items()}
    for step in range(1, steps + 1):
        loss, right, gradients = model(parameters, new_batch(rng))
        for name, gradient in gradients.items():
            means[name] += 0.1 * (gradient - means[name])
            squares[name] += 0.01 * (gradient**2 - squares[name])
            mean, square = means[name] / (1 - 0.9**step), squares[name] / (1 - 0.99**step)
            parameters[name] -= rate * mean / (xp.sqrt(square) + 1e-8)
        if step in (1, 50, 100, steps):
            print(f"step {step}: loss {float(loss):.5f}, right {float(right):.1%}")
    return float(loss), float(right)


def main():
    """Check, then train."""
    print(f"arrays: {xp.__name__}")
    check_gradients()
    loss, right = train()
    assert loss < 0.01
    assert right > 0.99


if __name__ == "__main__":
    main()
