"""The wrappers that the examples give away: cuattn within the gradients of torch and JAX."""

import gc
import importlib.util
import weakref
from pathlib import Path

import needs
import numpy as np
import pytest
from calls import draw, same_bits
from strategies import DTYPES, dtype_of

import cuattn

EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPES = (2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 5), (2, 9, 4, 5)
LSE_SHAPE = (2, 4, 9)
#: Every call here that is compared bit by bit.
OPTIONS = {"causal": True, "align": "bottom_right", "deterministic": True}


def example(name):
    """An example as a module, its main part not run."""
    (path,) = EXAMPLES.glob(f"*_{name}.py")
    spec = importlib.util.spec_from_file_location(path.stem[3:], path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record_calls(monkeypatch, name, what):
    """Have a function of cuattn called as ever; what(*args, **kwargs) of each call, in a list."""
    function, seen = getattr(cuattn, name), []

    def recording(*args, **kwargs):
        seen.append(what(*args, **kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(cuattn, name, recording)
    return seen


def on_host(array):
    """A NumPy array of the same numbers as one of NumPy or CuPy."""
    return array if isinstance(array, np.ndarray) else array.get()


def address(array):
    """Where an array of NumPy or CuPy begins."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


# torch ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def torch():
    return needs.library("torch")


@pytest.fixture(scope="module")
def of_torch(torch):
    return example("torch")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(torch, request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return Place(torch, request.param)


class Place:
    """A device of torch, and the arrays that cuattn computes with there."""

    def __init__(self, torch, device):
        self.torch, self.device = torch, torch.device(device, 0)

    def tensor(self, array):
        """A tensor of the same bits; NumPy's bfloat16 goes as integers."""
        if array.dtype.name == "bfloat16":
            bits = self.torch.from_numpy(array.view(np.int16))
            return bits.view(self.torch.bfloat16).to(self.device)
        return self.torch.from_numpy(array).to(self.device)

    def array(self, array):
        if self.device.type == "cpu":
            return array
        import cupy

        return cupy.asarray(array)

    def inputs(self, *shapes, dtype="float64"):
        return [self.tensor(each).requires_grad_() for each in draw(*shapes, dtype=dtype)]

    def bits(self, tensor):
        """What a tensor holds, as a NumPy array."""
        tensor = tensor.detach().cpu()
        if tensor.dtype == self.torch.bfloat16:
            return tensor.view(self.torch.int16).numpy().view(dtype_of("bfloat16"))
        return tensor.numpy()

    def agrees(self, tensors, arrays):
        pairs = zip(tensors, arrays, strict=True)
        return all(same_bits(self.bits(ours), on_host(theirs)) for ours, theirs in pairs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "align": "bottom_right"},
        {"causal": True, "q_offset": -3},  # rows without keys
        {"softmax_scale": -0.3},
        {"layout": "bhsd"},
    ],
    ids=["full", "causal", "empty rows", "scale", "bhsd"],
)
def test_torch_agrees_with_its_gradients(torch, of_torch, place, options):
    shapes = [(2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 2)]
    if "layout" in options:
        shapes = [(b, h, s, d) for b, s, h, d in shapes]

    def call(q, k, v):
        out, lse = of_torch.attention(q, k, v, return_lse=True, **options)
        return out, torch.nan_to_num(lse, neginf=0.0)  # finite differences of -inf are NaN

    assert torch.autograd.gradcheck(call, place.inputs(*shapes))


def test_torch_differentiates_a_function_used_twice(torch, of_torch, place):
    q, k, v = place.inputs((1, 5, 2, 3), (1, 5, 2, 3), (1, 5, 2, 3))

    def twice(q, k, v):
        return of_torch.attention(of_torch.attention(q, k, v, causal=True), k, v)

    assert torch.autograd.gradcheck(twice, (q, k, v))


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_gets_the_bits_that_cuattn_gives(of_torch, place, dtype):
    arrays = draw(*SHAPES, dtype=dtype)
    (dlse,) = draw(LSE_SHAPE, dtype="float64" if dtype == "float64" else "float32")
    *inputs, dout, dlse_tensor = map(place.tensor, (*arrays, dlse))
    inputs = [each.requires_grad_() for each in inputs]
    results = of_torch.attention(*inputs, return_lse=True, **OPTIONS)
    place.torch.autograd.backward(results, (dout, dlse_tensor))

    *expected_inputs, dout, dlse = map(place.array, (*arrays, dlse))
    expected, vjp = cuattn.attention_vjp(*expected_inputs, return_lse=True, **OPTIONS)
    gradients = vjp(dout, dlse)
    assert place.agrees(results, expected)
    assert place.agrees([each.grad for each in inputs], (gradients.dq, gradients.dk, gradients.dv))
    assert results[0].device.type == place.device.type


def test_torch_does_not_copy(of_torch, place):
    q, k, v = place.inputs(*SHAPES[:3])
    out, lse = of_torch.attention(q, k, v, return_lse=True, **OPTIONS)
    residuals = out.grad_fn.residuals
    kept = (residuals.q, residuals.k, residuals.v, residuals.out, residuals.lse)
    assert [each.data_ptr() for each in (q, k, v, out, lse)] == [*map(address, kept)]


def test_torch_may_give_views_and_broadcast_gradients(of_torch, place):
    q, k, v = draw((2, 4, 9, 8), (1, 11, 4, 8), (2, 11, 4, 16), dtype="float64")

    def views(q, k, v):
        return q.swapaxes(1, 2), k, v[..., ::2]

    inputs = [place.tensor(each).requires_grad_() for each in (q, k, v)]
    q_view, k_view, v_view = views(*inputs)
    out = of_torch.attention(q_view, k_view.expand(2, -1, -1, -1), v_view, **OPTIONS)
    assert not q_view.is_contiguous()
    out.sum().backward()  # from one number, with strides of 0

    q_view, k_view, v_view = views(*map(place.array, (q, k, v)))
    xp = np if place.device.type == "cpu" else importlib.import_module("cupy")
    k_view = xp.broadcast_to(k_view, (2, *k.shape[1:]))
    expected, vjp = cuattn.attention_vjp(q_view, k_view, v_view, **OPTIONS)
    gradients = vjp(xp.broadcast_to(xp.ones((), expected.dtype), expected.shape))
    assert place.agrees([out, inputs[0].grad], [expected, gradients.dq.swapaxes(1, 2)])
    assert place.agrees([inputs[2].grad[..., ::2]], [gradients.dv])


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_torch_asks_for_no_more_than_it_needs(monkeypatch, of_torch, place, wanted):
    asked = record_calls(monkeypatch, "attention_backward", lambda *_, wrt: "".join(wrt))
    inputs = [place.tensor(each) for each in draw(*SHAPES[:3])]
    for name, tensor in zip("qkv", inputs, strict=True):
        tensor.requires_grad_(name in wanted)
    of_torch.attention(*inputs, **OPTIONS).sum().backward()
    assert asked == [wanted]
    assert [each.grad is not None for each in inputs] == [name in wanted for name in "qkv"]


@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_torch_passes_no_gradient_of_a_result_without_one(monkeypatch, of_torch, place, used):
    def which(_, dout, dlse, wrt):
        return dout is not None, dlse is not None

    seen = record_calls(monkeypatch, "attention_backward", which)
    inputs = place.inputs(*SHAPES[:3])
    out, lse = of_torch.attention(*inputs, return_lse=True, **OPTIONS)
    loss = {
        "out": lambda: out.sum(),
        "lse": lambda: lse.sum(),
        "both": lambda: out.sum() + lse.sum(),
    }
    loss[used]().backward()
    assert seen == [(used != "lse", used != "out")]
    assert bool(inputs[2].grad.any()) == (used != "lse"), "lse does not depend on v"


def test_torch_keeps_what_a_second_backward_needs(of_torch, place):
    inputs = place.inputs(*SHAPES[:3])
    loss = of_torch.attention(*inputs, **OPTIONS).square().sum()
    loss.backward(retain_graph=True)
    first = [each.grad.clone() for each in inputs]
    loss.backward()
    assert place.agrees([each.grad for each in inputs], [place.bits(2 * each) for each in first])
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_torch_sees_a_change_in_place(of_torch, place):
    q, k, v = place.inputs(*SHAPES[:3])
    changed = q * 1
    out = of_torch.attention(changed, k, v, **OPTIONS)
    changed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_torch_is_told_that_there_is_no_second_derivative(torch, of_torch, place):
    q, k, v = place.inputs(*SHAPES[:3])
    out = of_torch.attention(q, k, v, **OPTIONS)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_torch_without_gradients_keeps_no_graph(torch, of_torch, place):
    inputs = place.inputs(*SHAPES[:3])
    with torch.no_grad():
        out = of_torch.attention(*inputs, **OPTIONS)
    assert not out.requires_grad


def test_torch_gets_the_errors_of_cuattn(of_torch, place):
    q, k, v = place.inputs(*SHAPES[:3])
    with pytest.raises(cuattn.ArgumentError, match=r"^causal|align"):
        of_torch.attention(q, k, v, causal=True)
    with pytest.raises(cuattn.DTypeError, match=r"with requires_grad=True; .*q\.detach\(\)"):
        cuattn.attention(q, k, v)


def test_torch_trains(of_torch, place):
    """Sooner than the example does; one word of ten is right by chance."""
    assert of_torch.train(place.device, steps=40) > 0.2


@pytest.mark.gpu
def test_torch_has_its_stream_used(monkeypatch, torch, of_torch):
    """Forward and backward are enqueued there, after what fills their inputs, and not elsewhere."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    import cupy

    place = Place(torch, "cuda")
    q, k, v = place.inputs(*SHAPES[:3])
    expected = of_torch.attention(q, k, v, **OPTIONS)
    expected.backward(expected.detach())
    gradient, q.grad = q.grad, None

    streams = [
        record_calls(monkeypatch, name, lambda *_, **__: cupy.cuda.get_current_stream().ptr)
        for name in ("attention_forward", "attention_backward")
    ]
    late = torch.full_like(q, torch.nan).requires_grad_()
    side, before = torch.cuda.Stream(), cupy.cuda.get_current_stream().ptr
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            late.copy_(q)
        out = of_torch.attention(late, k, v, **OPTIONS)
        out.backward(out.detach())
    side.synchronize()
    assert streams == [[side.cuda_stream], [side.cuda_stream]]
    assert cupy.cuda.get_current_stream().ptr == before
    assert place.agrees([out, late.grad], [place.bits(expected), place.bits(gradient)])


# JAX -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_jax():
    needs.library("jax")
    return example("jax")


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def jax(of_jax, request):
    """JAX with arrays made on that device."""
    jax = of_jax.jax
    if request.param == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    with jax.default_device(jax.devices(request.param)[0]):
        yield jax


def to_cuattn(array):
    """The JAX array as cuattn reads it."""
    import jax

    if array.devices() <= {*jax.devices("cpu")}:
        return np.asarray(array)
    return importlib.import_module("cupy").from_dlpack(array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_jax_gets_the_bits_that_cuattn_gives(jax, of_jax, dtype, return_lse):
    *inputs, dout = map(jax.numpy.asarray, draw(*SHAPES, dtype=dtype))
    (dlse,) = map(jax.numpy.asarray, draw(LSE_SHAPE, dtype="float32"))
    attention = of_jax.attention_with(return_lse=return_lse, **OPTIONS)
    results, pull = jax.vjp(attention, *inputs)
    got = jax.tree.leaves((results, pull((dout, dlse) if return_lse else dout)))

    expected, vjp = cuattn.attention_vjp(*map(to_cuattn, inputs), return_lse=return_lse, **OPTIONS)
    gradients = vjp(*map(to_cuattn, (dout, dlse) if return_lse else (dout,)))
    expected = [*(expected if return_lse else (expected,))]
    expected += [gradients.dq, gradients.dk, gradients.dv]
    pairs = zip(got, expected, strict=True)
    assert all(same_bits(np.asarray(ours), on_host(theirs)) for ours, theirs in pairs)
    assert all(each.devices() == inputs[0].devices() for each in got)
    assert same_bits(np.asarray(got[0]), np.asarray(jax.tree.leaves(attention(*inputs))[0]))


def gradient_of(jax, f):
    """The gradient by q of the sum of what f gives."""
    return jax.grad(lambda q, k, v: f(q, k, v).sum())


TRANSFORMS = {
    "jit": lambda jax, f: jax.jit(f),
    "vmap": lambda jax, f: jax.vmap(f),
    "jit of grad": lambda jax, f: jax.jit(gradient_of(jax, f)),
    "grad of jit": lambda jax, f: gradient_of(jax, jax.jit(f)),
    "vmap of grad": lambda jax, f: jax.vmap(gradient_of(jax, f)),
    "grad of grad": lambda jax, f: gradient_of(jax, gradient_of(jax, f)),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_jax_is_told_where_to_call(jax, of_jax, transform):
    arrays = map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))
    transformed = TRANSFORMS[transform](jax, of_jax.attention_with())
    with pytest.raises(cuattn.DTypeError, match="call cuattn outside of the traced function"):
        transformed(*arrays)


def test_jax_says_itself_that_there_is_no_forward_mode(jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))]
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(of_jax.attention_with(), arrays, arrays)


def test_jax_frees_what_was_kept(monkeypatch, jax, of_jax):
    arrays = [*map(jax.numpy.asarray, draw(*[(2, 7, 2, 8)] * 3, dtype="float32"))]
    function, kept = cuattn.attention_vjp, []

    def recording(*args, **kwargs):
        results, vjp = function(*args, **kwargs)
        kept.append(weakref.ref(vjp))
        return results, vjp

    monkeypatch.setattr(cuattn, "attention_vjp", recording)
    attention = of_jax.attention_with()
    for _ in range(2):
        jax.grad(lambda *arrays: attention(*arrays).sum())(*arrays)
    gc.collect()
    assert [each() for each in kept] == [None, None]
