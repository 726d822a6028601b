"""cuattn as a differentiable function of PyTorch: checked, compared, and trained with.

Tensors go in as they are, without a copy, and results come back over DLPack. For a project of your
own, copy all that stands between the two lines below that say so: attention and what it needs.

Runs on a GPU where torch (2.10 or later) and CuPy find one, else on the CPU:

    python examples/04_torch.py
"""

# To copy: from here ---------------------------------------------------------------------------

import contextlib

import numpy as np
import torch

import cuattn


@contextlib.contextmanager
def stream_of_torch(device):
    """Make torch's current stream CuPy's as well, so that the work of both stays in order.

    It also keeps memory safe: torch may give a tensor's memory away as soon as what was enqueued
    on this stream is behind it, and so may CuPy.
    """
    if device.type != "cuda":
        yield
        return
    import cupy

    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(device.index), cupy.cuda.Stream.from_external(stream):
        yield


def as_tensor(array):
    """The same memory as a tensor, or None for None."""
    if array is None:
        return None
    if isinstance(array, np.ndarray) and array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)  # no DLPack in NumPy
    return torch.from_dlpack(array)


class Attention(torch.autograd.Function):
    """Results out, lse and the checked call; ``options`` is a dict, those of cuattn."""

    @staticmethod
    def forward(q, k, v, options):
        with stream_of_torch(q.device):
            out, residuals = cuattn.attention_forward(q, k, v, **options)
        return as_tensor(out), as_tensor(residuals.lse), residuals.call

    @staticmethod
    def setup_context(ctx, inputs, output):
        *results, ctx.call = output
        # torch alone keeps the arrays: it frees them, offloads them, or does not keep them where
        # a checkpoint computes them again; and it sees it when one is changed in place.
        ctx.save_for_backward(*inputs[:3], *results)
        ctx.set_materialize_grads(False)  # a result that no loss uses has the gradient None, not 0

    @staticmethod
    def backward(ctx, dout, dlse, _):
        wrt = [name for name, needed in zip("qkv", ctx.needs_input_grad, strict=False) if needed]
        return *AttentionGradients.apply(ctx.call, wrt, dout, dlse, *ctx.saved_tensors), None


class AttentionGradients(torch.autograd.Function):
    """Gradients of q, k and v. ``torch.func`` asks that they be such a function as well."""

    @staticmethod
    def forward(call, wrt, dout, dlse, *kept):
        with stream_of_torch(kept[0].device):
            residuals = cuattn.Residuals.rebuild(call, *kept)
            gradients = cuattn.attention_backward(residuals, dout, dlse, wrt=wrt)
        return tuple(map(as_tensor, (gradients.dq, gradients.dk, gradients.dv)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Nothing is kept."""

    @staticmethod
    def backward(ctx, *_):
        raise NotImplementedError("cuattn has no second derivative of attention")


#: A compiled function breaks its graph here: cuattn computes with arrays that have values.
apply_attention = torch.compiler.disable(Attention.apply, reason="cuattn needs values, keep it")


def attention(q, k, v, *, return_lse=False, **options):
    """``cuattn.attention`` of tensors, differentiable.

    The axes are (batch, seqlen, heads, head_dim); those of torch's own function, (batch, heads,
    seqlen, head_dim), are ``layout="bhsd"``. Under autocast it computes in that dtype, as torch's
    does. ``torch.func.grad`` and ``vjp`` go through it. Second derivatives, forward mode and
    ``torch.vmap`` do not, nor does ``torch.compile(..., fullgraph=True)``: they raise an error.
    """
    if "out" in options:
        raise TypeError("out= cannot be differentiated: torch would not see that it is written")
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = (each if each.dtype == torch.float64 else each.to(dtype) for each in (q, k, v))
    out, lse, _ = apply_attention(q, k, v, options)
    return (out, lse) if return_lse else out


# To copy: up to here. What follows shows it at work. --------------------------------------------

nn = torch.nn


def largest_difference(a, b):
    """As a Python float."""
    return (a.double() - b.double()).abs().max().item()


def check_gradients(device):
    """Both results against finite differences, two query heads to a key head, in float64."""
    torch.manual_seed(0)
    shapes = ((2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 2))
    inputs = [torch.randn(s, dtype=torch.float64, device=device).requires_grad_() for s in shapes]

    def both(q, k, v):
        return attention(q, k, v, causal=True, align="bottom_right", return_lse=True)

    assert torch.autograd.gradcheck(both, inputs)
    print("gradcheck: the gradients of out and lse by q, k and v are right")


def compare_with_torch(device, dtype, bound):
    """Beside torch's own function, in its axes: its results, its gradients."""
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 300, 32, device=device).to(dtype) for _ in range(3)]
    ours = [each.clone().requires_grad_() for each in inputs]
    theirs = [each.clone().requires_grad_() for each in inputs]
    out = attention(*ours, causal=True, layout="bhsd")
    expected = nn.functional.scaled_dot_product_attention(*theirs, is_causal=True)
    cotangent = torch.randn_like(out)
    out.backward(cotangent)
    expected.backward(cotangent)
    worst = largest_difference(out, expected)
    worst_gradient = max(
        largest_difference(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True)
    )
    print(f"{dtype} beside torch: out off by {worst:.1e}, gradients by {worst_gradient:.1e}")
    assert out.dtype == dtype
    assert max(worst, worst_gradient) < bound


class Block(nn.Module):
    """One layer of a transformer."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """From (batch, seqlen, width) to the same shape."""
        # q, k and v are views with strides, not copies, in the axes that cuattn takes by default.
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.project(attention(q, k, v, causal=True).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """Two layers that tell, at every position, what comes next."""

    def __init__(self, words, seqlen, width=32, heads=2):
        super().__init__()
        self.word, self.position = nn.Embedding(words, width), nn.Embedding(seqlen, width)
        self.blocks = nn.Sequential(Block(width, heads), Block(width, heads))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, words))

    def forward(self, words):
        """From (batch, seqlen) words to (batch, seqlen, words) scores."""
        return self.head(self.blocks(self.word(words) + self.position.weight[: words.shape[1]]))


def train(device, steps=200, length=8):
    """Learn to say a sequence backwards; the share of words that are right in the end."""
    torch.manual_seed(0)
    words, mark = 11, 10  # ten words, and a mark after which they are to be said backwards
    model = Transformer(words, 2 * length).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(steps + 1):
        given = torch.randint(0, mark, (64, length), device=device)
        told = torch.cat([given, torch.full_like(given[:, :1], mark), given.flip(1)], 1)
        scores, wanted = model(told[:, :-1])[:, length:], told[:, length + 1 :]
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), wanted.flatten())
        right = (scores.argmax(-1) == wanted).float().mean().item()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}, right {right:.1%}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return right


def main():
    """Everything above, on the device that there is."""
    torch.set_num_threads(1)  # so small a model takes longer with more
    device = torch.device("cpu")
    if torch.cuda.is_available():
        with contextlib.suppress(ImportError):
            import cupy

            device = torch.device("cuda", cupy.cuda.Device().id)
    print(f"arrays: {'cupy' if device.type == 'cuda' else 'numpy'}, tensors on {device}")
    check_gradients(device)
    compare_with_torch(device, torch.float32, bound=2e-5)
    compare_with_torch(device, torch.bfloat16, bound=0.1)  # two steps of a gradient of 4
    assert train(device) > 0.99


if __name__ == "__main__":
    main()
