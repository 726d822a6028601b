"""What is no array of numbers in memory is refused, with what to do."""

import ml_dtypes
import needs
import numpy as np
import pytest
from calls import draw, refused, same_bits
from test_foreign import LIBRARIES, SHAPES, TO, to_jax, to_torch
from wrapped import example

import cuattn


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_wrappers_of_the_examples_take_no_out(library):
    """Gradients would be taken at what it holds by then, and nobody would know."""
    needs.library(library)
    q = TO[library](draw(SHAPES[0])[0])
    with pytest.raises(TypeError, match="out= cannot be differentiated"):
        if library == "torch":
            example("torch").attention(q, q, q, out=q.clone())
        else:
            example("jax").attention_with(out=q)


def test_a_deleted_array_of_jax_is_told():
    q = to_jax(draw(SHAPES[0])[0])
    q.delete()
    refused(cuattn.DTypeError, "q", "deleted", run=lambda: cuattn.attention(q, q, q))


def test_out_of_jax_is_not_to_be_written():
    q, k, v = draw(*SHAPES[:3])
    for dtype in (np.float32, ml_dtypes.bfloat16):
        arrays = [each.astype(dtype) for each in (q, k, v)]
        out = to_jax(np.full(SHAPES[3], 7, dtype))
        refused(
            cuattn.ArgumentError,
            *("out", "read-only", "jaxlib", "numpy.empty"),
            run=lambda arrays=arrays, out=out: cuattn.attention(*arrays, out=out),
        )
        assert bool((out == 7).all())


def test_out_must_not_be_an_input_of_the_same_memory():
    q = to_torch(draw(SHAPES[0])[0])
    run = lambda: cuattn.attention(q, q, q, out=q[:])  # noqa: E731
    refused(cuattn.ArgumentError, "out", "memory that q reads", run=run)


def test_a_tensor_that_records_gradients_is_told_how_to_go_on():
    torch = needs.library("torch")
    q = torch.ones(SHAPES[0], requires_grad=True)
    run = lambda: cuattn.attention(q, q, q)  # noqa: E731
    refused(cuattn.DTypeError, "q", "requires_grad", "q.detach()", "examples/04_torch.py", run=run)
    out, vjp = cuattn.attention_vjp(q.detach(), q.detach(), q.detach())
    with torch.no_grad():  # nothing is recorded there, so nothing is lost
        assert same_bits(cuattn.attention(q, q, q), out)
        mine = torch.empty_like(q).requires_grad_()
        assert cuattn.attention(q, q, q, out=mine) is mine
        assert same_bits(mine.numpy(), out)
    refused(cuattn.DTypeError, "dout", "requires_grad", "dout.detach()", run=lambda: vjp(q))
    assert same_bits(vjp(out).dv, vjp(to_torch(out)).dv)


def test_a_tensor_without_numbers_is_told_where_to_call():
    """Those of torch.compile: DLPack would give whatever memory holds."""
    needs.library("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = needs.library("torch").ones(SHAPES[0])
    parts = ("q", "FakeTensor", "torch.compiler.disable")
    refused(cuattn.DTypeError, *parts, run=lambda: cuattn.attention(q, q, q))


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_a_transform_of_torch_is_told_where_to_call(transform):
    torch = needs.library("torch")

    def call(q):
        return torch.from_dlpack(cuattn.attention(q.detach(), q.detach(), q.detach())).sum()

    with pytest.raises(cuattn.DTypeError, match=r"does not share .* outside of transforms"):
        getattr(torch.func, transform)(call)(
            torch.ones((2, *SHAPES[0]) if transform == "vmap" else SHAPES[0])
        )


@pytest.mark.parametrize("transform", ["jit", "vmap", "grad"])
def test_a_tracer_is_told_where_to_call(transform):
    jax = needs.library("jax")
    function = getattr(jax, transform)(lambda q: cuattn.attention(q, q, q))
    with pytest.raises(cuattn.DTypeError, match=r"q: got jax.*Tracer; .* outside of the traced"):
        function(to_jax(draw((1, *SHAPES[0]))[0]))


TORCH_REFUSALS = {
    "conjugate": (lambda torch: torch.ones(2, 2, dtype=torch.complex64).conj(), "conjugate bit"),
    "negated": (lambda torch: torch.ones(2, 2, dtype=torch.complex64).conj().imag, "resolve_neg"),
    "sparse": (lambda torch: torch.ones(2, 2).to_sparse(), "torch.strided"),
    "without memory": (lambda torch: torch.ones(2, 2, device="meta"), "meta"),
}


@pytest.mark.parametrize("kind", TORCH_REFUSALS)
def test_what_torch_does_not_share_is_refused_with_its_reason(kind):
    make, reason = TORCH_REFUSALS[kind]
    array = make(needs.library("torch"))
    run = lambda: cuattn.attention(array, array, array, layout="sd")  # noqa: E731
    refused(cuattn.DTypeError, "q", reason, run=run)


@pytest.mark.parametrize("name", ["int32", "uint8", "bool", "complex64", "float8_e4m3fn"])
def test_other_dtypes_are_refused(name):
    torch = needs.library("torch")
    array = torch.zeros(2, 2, dtype=getattr(torch, name))
    with pytest.raises(cuattn.DTypeError, match="q: got "):
        cuattn.attention(array, array, array, layout="sd")


class Elsewhere:
    """An array on a device that is neither the host nor CUDA's."""

    def __dlpack_device__(self):
        return 8, 0

    def __dlpack__(self, **how):
        raise AssertionError("its memory is of no use")


def test_another_kind_of_device_is_refused():
    run = lambda: cuattn.attention(Elsewhere(), Elsewhere(), Elsewhere())  # noqa: E731
    refused(cuattn.DTypeError, "q", "type 8", "CUDA device", "copy it there", run=run)


def test_an_array_in_cuda_memory_needs_cupy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    monkeypatch.setattr(Elsewhere, "__dlpack_device__", lambda self: (2, 0))
    run = lambda: cuattn.attention(Elsewhere(), Elsewhere(), Elsewhere())  # noqa: E731
    refused(cuattn.DTypeError, "q", "CUDA memory", "CuPy", "pip install", run=run)
