"""The wrapper that an example gives away: cuattn within the gradients of torch."""

import importlib
import weakref

import needs
import numpy as np
import pytest
from calls import draw
from strategies import DTYPES
from wrapped import (
    LSE_SHAPE,
    OPTIONS,
    SHAPES,
    Place,
    address,
    copied,
    example,
    record_calls,
    record_second,
)

import cuattn


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


def test_what_is_to_be_copied_is_complete(of_torch, place):
    inputs = place.inputs(*SHAPES[:3], dtype="bfloat16")
    attention = copied("torch")["attention"]
    results = [f(*inputs, **OPTIONS) for f in (attention, of_torch.attention)]
    gradients = [place.torch.autograd.grad(out.sum(), inputs) for out in results]
    assert attention is not of_torch.attention
    assert place.agrees([results[0], *gradients[0]], map(place.bits, (results[1], *gradients[1])))


NAMES = "q", "k", "v", "out", "lse"


def test_torch_does_not_copy(monkeypatch, of_torch, place):
    addresses = record_second(
        monkeypatch,
        "attention_forward",
        lambda second: [address(getattr(second, name)) for name in NAMES],
    )
    inputs = place.inputs(*SHAPES[:3])
    results = of_torch.attention(*inputs, return_lse=True, **OPTIONS)
    expected = [each.data_ptr() for each in (*inputs, *results)]
    assert addresses == [expected]
    assert [each.data_ptr() for each in results[0].grad_fn.saved_tensors] == expected


def kept_by_torch(torch, f, *inputs):
    return f(*inputs)


def made_again(torch, f, *inputs):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(f, *inputs, use_reentrant=False)


def offloaded(torch, f, *inputs):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):  # copies, on the host too
        return f(*inputs)


@pytest.mark.parametrize(
    ("how", "after_forward"),
    [(kept_by_torch, ["out", "lse"]), (made_again, []), (offloaded, [])],
    ids=["plain", "checkpoint", "save_on_cpu"],
)
def test_torch_alone_keeps_arrays(monkeypatch, torch, of_torch, place, how, after_forward):
    """It decides how long, and gradients are the same bits; a loss that is kept keeps none."""
    inputs = place.inputs(*SHAPES[:3])

    def loss_of(q, k, v):
        # In place of q another tensor than the leaf, with strides that offloading does not keep.
        q = (q.swapaxes(1, 2) * 1).swapaxes(1, 2)
        out, lse = of_torch.attention(q, k, v, return_lse=True, **OPTIONS)
        return out.sum() + 2 * lse.sum()

    expected = torch.autograd.grad(loss_of(*inputs), inputs)
    made = record_second(
        monkeypatch,
        "attention_forward",
        lambda second: {name: weakref.ref(getattr(second, name)) for name in NAMES},
    )

    def alive():
        return [name for each in made for name, array in each.items() if array() is not None]

    loss = how(torch, loss_of, *inputs)
    assert len(made) == 1
    assert alive() == after_forward
    loss.backward()
    assert len(made) == (2 if how is made_again else 1)
    assert alive() == []
    assert loss.grad_fn is not None
    assert place.agrees([each.grad for each in inputs], map(place.bits, expected))


@pytest.mark.parametrize("names", ["q", "kv", "qkv"])
def test_torch_func_goes_through(torch, of_torch, place, names):
    inputs = dict(zip("qkv", place.inputs(*SHAPES[:3]), strict=True))

    def loss_of(asked, others):
        out, lse = of_torch.attention(**asked, **others, return_lse=True, **OPTIONS)
        return out.square().sum() + lse.square().sum()

    asked, others = {}, {}
    for name, tensor in inputs.items():
        (asked if name in names else others)[name] = tensor.detach().requires_grad_(name in names)
    expected = torch.autograd.grad(loss_of(asked, others), [*asked.values()])
    arrays = {name: tensor.detach() for name, tensor in asked.items()}
    got = torch.func.grad(loss_of)(arrays, others)
    _, pull = torch.func.vjp(lambda arrays: loss_of(arrays, others), arrays)
    (pulled,) = pull(torch.ones((), dtype=torch.float64, device=place.device))
    for each in (got, pulled):
        assert place.agrees(each.values(), map(place.bits, expected))


@pytest.mark.parametrize("transform", ["vmap", "vmap of grad", "jacrev"])
def test_torch_says_itself_that_there_is_no_vmap(torch, of_torch, place, transform):
    inputs = [each.detach() for each in place.inputs((2, 1, 5, 2, 3), *[(2, 1, 7, 2, 3)] * 2)]

    def loss_of(q, k, v):
        return of_torch.attention(q, k, v).sum()

    f, arguments = {
        "vmap": (torch.vmap(of_torch.attention), inputs),
        "vmap of grad": (torch.vmap(torch.func.grad(loss_of)), inputs),
        "jacrev": (torch.func.jacrev(of_torch.attention), [each[0] for each in inputs]),
    }[transform]
    with pytest.raises(RuntimeError, match="does not have vmap support"):
        f(*arguments)


#: Dynamo looks at .grad of every tensor that it passes from one graph to the next.
compiles = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf",
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning",  # by torch itself
)


@compiles
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compiles_what_is_around(torch, of_torch, place, backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    inputs = place.inputs(*SHAPES[:3])

    def loss_of(q, k, v):
        return (3 * of_torch.attention(q * 1.5, k, v, **OPTIONS)).sum()

    graphs = CompileCounterWithBackend(backend)
    compiled = torch.compile(loss_of, backend=graphs)
    expected = torch.autograd.grad(loss_of(*inputs), inputs)
    for _ in range(2):
        got = torch.autograd.grad(compiled(*inputs), inputs)
        assert place.agrees(got, map(place.bits, expected))
    assert graphs.frame_count == 2, "one before, one after"


@compiles
@pytest.mark.parametrize("fullgraph", [False, True])
def test_torch_may_compile_it_alone(torch, of_torch, place, fullgraph):
    """There is nothing to compile; who asks for one graph is told so."""
    torch.compiler.reset()
    inputs = place.inputs(*SHAPES[:3])
    compiled = torch.compile(of_torch.attention, backend="eager", fullgraph=fullgraph)
    if fullgraph:
        with pytest.raises(RuntimeError, match=r"compiler\.disable[^\n]*cuattn needs values"):
            compiled(*inputs, **OPTIONS)
    else:
        expected = of_torch.attention(*inputs, **OPTIONS)
        assert place.agrees([compiled(*inputs, **OPTIONS)], [place.bits(expected)])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_torch_casts_by_itself(torch, of_torch, place, dtype):
    """As torch's own function under autocast: to one dtype, but not from float64."""
    q, k, v = place.inputs(*[(2, 9, 2, 8)] * 3, dtype=dtype)
    with torch.autocast(place.device.type, dtype=torch.bfloat16):
        low = k if dtype == "float64" else k.to(torch.bfloat16)  # as what nn.Linear gives
        out = of_torch.attention(q, low, v, layout="bhsd", deterministic=True)
        expected = torch.nn.functional.scaled_dot_product_attention(q, low, v)
    assert out.dtype == expected.dtype
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [each.dtype for each in gradients] == [q.dtype] * 3
    cast = [each.to(out.dtype) for each in (q, k, v)]
    again = of_torch.attention(*cast, layout="bhsd", deterministic=True)
    expected_gradients = torch.autograd.grad(again.sum(), (q, k, v))
    assert place.agrees([out, *gradients], map(place.bits, (again, *expected_gradients)))


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
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()
    arrays = [each.detach() for each in (q, k, v)]

    def slope(q, k, v):
        return torch.func.grad(lambda q: of_torch.attention(q, k, v, **OPTIONS).sum())(q).sum()

    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.func.grad(slope)(*arrays)


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
    inputs = place.inputs(*SHAPES[:3])
    out = of_torch.attention(*inputs, **OPTIONS)
    out.backward(out.detach())
    expected, gradient = out.detach(), inputs[0].grad
    # Leaves of their own: those of before accumulate their gradients on the stream of before.
    q, k, v = (each.detach().requires_grad_() for each in inputs)

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
