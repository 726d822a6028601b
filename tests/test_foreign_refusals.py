"""What is no array of numbers in memory is refused, with what to do."""

import ctypes

import ml_dtypes
import needs
import numpy as np
import pytest
from calls import draw, refused, same_bits
from dlpack_exporter import Exporter, held
from test_foreign import LIBRARIES, SHAPES, TO, to_jax, to_torch
from wrapped import example

import cuattn
from cuattn._foreign import taken_to_write


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


def without_storage(torch):
    """A tensor whose memory was given back, as sharded training does."""
    tensor = torch.ones(2, 2)
    tensor.untyped_storage().resize_(0)
    return tensor


def of_a_subclass(torch):
    """A tensor that is made of others and has no memory itself, as distributed ones."""

    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (2, 2))

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    return Wrapped()


TORCH_REFUSALS = {
    "without storage": (without_storage, "it has no memory"),
    "made of others": (of_a_subclass, "does not share"),
    "zeros in no place": (lambda torch: torch._efficientzerotensor((2, 2)), "it has no memory"),
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


@pytest.mark.parametrize("how", ["read_only", "copied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_out_is_the_memory_of_the_array_itself(dtype, how):
    """What a library made for the occasion would be written and dropped."""
    q, k, v = draw(*SHAPES[:3], dtype=dtype)
    memory = np.zeros(SHAPES[3], q.dtype)
    out = Exporter(memory, **{how: True})
    refused(
        cuattn.ArgumentError,
        *("out", "read-only", "Exporter"),
        run=lambda: cuattn.attention(q, k, v, out=out),
    )
    assert not memory.any()


scribbled = []


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def scribble(_capsule):
    """The destructor of a capsule: what it held says something else from now on."""
    for managed in scribbled:
        managed["flags"] = 1


set_destructor = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetDestructor", ctypes.pythonapi)
)


class Forgetful(Exporter):
    """Of whose capsules nothing is left as soon as nobody has them."""

    def __dlpack__(self, **request):
        capsule = super().__dlpack__(**request)
        scribbled[:] = [held[address][0] for address in self.capsules]
        self.capsules.clear()
        set_destructor(capsule, ctypes.cast(scribble, ctypes.c_void_p))
        return capsule


def test_flags_are_read_before_a_capsule_is_gone():
    memory = np.zeros(4, np.float32)
    native = taken_to_write("out", Forgetful(memory))
    assert np.shares_memory(native, memory)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch itself
def test_a_tangent_is_not_dropped():
    torch = needs.library("torch")
    forward = torch.autograd.forward_ad
    q = torch.ones(2, 2)
    with forward.dual_level():
        dual = forward.make_dual(q, q)
        run = lambda: cuattn.attention(dual, q, q, layout="sd")  # noqa: E731
        refused(cuattn.DTypeError, "q", "tangent", "detach()", run=run)
        assert cuattn.attention(q, q, q, layout="sd").shape == (2, 2)


@pytest.mark.filterwarnings("ignore:.torch.jit")  # by torch itself
def test_what_torch_compiles_may_call_it_disabled():
    torch = needs.library("torch")
    attention = torch.compiler.disable(cuattn.attention)

    @torch.compile(backend="eager")
    def twice(q):
        return torch.from_dlpack(attention(q + 0, q, q)) * 2

    (q,) = draw(SHAPES[0])
    expected = 2 * cuattn.attention(q, q, q)
    assert same_bits(twice(to_torch(q)).numpy(), expected)


class Raising:
    """An array whose library fails in a way of its own."""

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **how):
        raise self.error


@pytest.mark.parametrize("kind", [KeyError, OverflowError, OSError, AssertionError, BufferError])
def test_whatever_an_exporter_raises_is_told_with_the_name(kind):
    array = Raising(kind("so and so"))
    run = lambda: cuattn.attention(array, array, array)  # noqa: E731
    refused(cuattn.DTypeError, "q", "so and so", "dense array", run=run)


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
