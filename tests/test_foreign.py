"""Arrays of torch and JAX go in without a copy; what comes out is NumPy's, or CuPy's on a GPU."""

import contextlib
import re
import sys
from types import SimpleNamespace

import ml_dtypes
import needs
import numpy as np
import pytest
from calls import draw, refused, same_bits
from strategies import DTYPES, dtype_of

import cuattn
from cuattn._foreign import _device_capsule, taken, taken_to_write

SHAPES = (2, 9, 4, 8), (2, 11, 2, 8), (2, 11, 2, 5), (2, 9, 4, 5)
LIBRARIES = ("torch", "jax")


def to_torch(array):
    """A tensor of the same bits; NumPy's bfloat16 goes as integers."""
    torch = needs.library("torch")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_jax(array):
    jax = needs.library("jax")
    jax.config.update("jax_enable_x64", True)
    return jax.device_put(array, jax.devices("cpu")[0])


TO = {"torch": to_torch, "jax": to_jax}


def address(array):
    """Where a torch or JAX array begins."""
    return array.data_ptr() if hasattr(array, "data_ptr") else array.unsafe_buffer_pointer()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_host_memory_is_taken_without_a_copy(library, dtype):
    (array,) = draw(SHAPES[0], dtype=dtype)
    foreign = TO[library](array)
    native = taken("q", foreign)
    assert type(native) is np.ndarray
    assert native.ctypes.data == address(foreign)
    assert same_bits(native, array)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_results_have_the_bits_of_numpy_arrays(library, dtype):
    arrays = draw(*SHAPES, dtype=dtype)
    (dlse,) = draw((2, 4, 9), dtype="float64" if dtype == "float64" else "float32")

    def results(q, k, v, dout, dlse):
        options = {"causal": True, "align": "bottom_right"}
        (out, lse), vjp = cuattn.attention_vjp(q, k, v, return_lse=True, **options)
        gradients = vjp(dout, dlse)
        merged, merge_vjp = cuattn.merge_states_vjp([(out, lse), (out, lse)])
        again = merge_vjp(dout, dlse)
        return out, lse, gradients.dq, gradients.dk, gradients.dv, *merged, *again[0]

    got = results(*map(TO[library], (*arrays, dlse)))
    assert all(type(each) is np.ndarray for each in got)
    assert all(map(same_bits, got, results(*arrays, dlse)))


def test_parts_of_another_library_merge():
    arrays = draw(*SHAPES[:3])
    parts = [cuattn.attention(*arrays, return_lse=True) for _ in range(2)]
    foreign = [(to_torch(out), to_torch(lse)) for out, lse in parts]
    assert all(map(same_bits, cuattn.merge_states(foreign), cuattn.merge_states(parts)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_come_along(dtype):
    arrays = draw((2, 4, 9, 8), (2, 4, 9, 8), (2, 4, 9, 8), dtype=dtype)
    views = [to_torch(each).transpose(1, 2)[:, ::2] for each in arrays]
    expected = cuattn.attention(*[each.swapaxes(1, 2)[:, ::2] for each in arrays])
    assert same_bits(cuattn.attention(*views), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_without_elements_is_taken(dtype):
    q, k = draw((2, 3, 1, 4), (2, 0, 1, 4), dtype=dtype)
    out = cuattn.attention(to_torch(q), to_torch(k), to_torch(k))
    assert out.shape == q.shape
    assert not out.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_torch_is_written_in_place_and_returned(dtype):
    torch = needs.library("torch")
    q, k, v = draw(*SHAPES[:3], dtype=dtype)
    memory = torch.full((2, 9, 4, 12), 7.0, dtype=to_torch(q).dtype)
    out = memory[..., 2:7]
    assert cuattn.attention(*map(to_torch, (q, k, v)), out=out) is out
    assert same_bits(taken("out", out), cuattn.attention(q, k, v))
    assert bool((memory[..., :2] == 7).all() and (memory[..., 7:] == 7).all())

    second, residuals = cuattn.attention_forward(q, k, v, out=torch.empty_like(out))
    assert residuals.out.ctypes.data == second.data_ptr()


def test_torch_knows_that_out_was_written():
    """What a gradient needs and is overwritten is an error of torch's, not a wrong gradient."""
    torch = needs.library("torch")
    q, k, v = map(to_torch, draw(*SHAPES[:3]))
    run = cuattn.plan(q, k, v)
    for call in (cuattn.attention, run):
        out = torch.ones(SHAPES[3])
        weight = torch.ones(SHAPES[3], requires_grad=True)
        loss = (weight * out).sum()
        call(q, k, v, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    with torch.inference_mode():
        assert cuattn.attention(q, k, v, out=torch.ones(SHAPES[3])).shape == SHAPES[3]


def test_explain_takes_them_too():
    q = draw((1, 64, 2, 32))[0]
    assert cuattn.explain(*[to_torch(q)] * 3) == cuattn.explain(q, q, q)


# On a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def torch_cuda():
    torch = needs.library("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_memory_is_taken_without_a_copy(torch_cuda, dtype):
    import cupy

    arrays = draw(*SHAPES, dtype=dtype)
    tensors = [to_torch(each).cuda() for each in arrays]
    native = taken("q", tensors[0])
    assert isinstance(native, cupy.ndarray)
    assert native.data.ptr == tensors[0].data_ptr()
    assert native.dtype == dtype_of(dtype)

    def results(q, k, v, dout):
        out, vjp = cuattn.attention_vjp(q, k, v, deterministic=True)
        gradients = vjp(dout)
        return [cupy.asnumpy(each) for each in (out, gradients.dq, gradients.dk, gradients.dv)]

    assert all(map(same_bits, results(*tensors), results(*map(cupy.asarray, arrays))))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_a_device_go_back_without_a_copy(torch_cuda, dtype):
    import cupy

    out = cuattn.attention(*[cupy.asarray(each) for each in draw(*SHAPES[:3], dtype=dtype)])
    tensor = torch_cuda.from_dlpack(out)
    assert tensor.data_ptr() == out.data.ptr
    assert tensor.dtype == getattr(torch_cuda, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_out_of_torch_on_a_device_is_written_in_place(torch_cuda, dtype):
    import cupy

    q, k, v = draw(*SHAPES[:3], dtype=dtype)
    tensors = [to_torch(each).cuda() for each in (q, k, v)]
    out = torch_cuda.full((2, 9, 4, 12), 7.0, dtype=tensors[0].dtype, device="cuda")[..., 2:7]
    assert cuattn.attention(*tensors, out=out) is out
    expected = cuattn.attention(*map(cupy.asarray, (q, k, v)))
    assert same_bits(cupy.asnumpy(taken("out", out)), cupy.asnumpy(expected))


@pytest.mark.gpu
def test_host_and_device_tensors_are_not_mixed(torch_cuda):
    q = torch_cuda.ones(SHAPES[0])
    refused(
        cuattn.DTypeError,
        *("k", "CUDA device 0", "host memory like q"),
        run=lambda: cuattn.attention(q, q.cuda(), q),
    )


@pytest.mark.gpu
def test_a_tensor_is_read_after_the_work_of_its_own_stream(torch_cuda):
    """CuPy's stream waits for torch's, which is held up before it fills the tensor."""
    import cupy

    array = draw((1, 64, 2, 32), dtype="float32")[0]
    expected = cupy.asnumpy(cuattn.attention(*[cupy.asarray(array)] * 3))
    source, late = torch_cuda.from_numpy(array).cuda(), torch_cuda.full(array.shape, 7.0).cuda()
    cupy.cuda.Device().synchronize()
    with torch_cuda.cuda.stream(torch_cuda.cuda.Stream()):
        torch_cuda.cuda._sleep(200_000_000)  # cycles: a tenth of a second
        late.copy_(source)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            out = cuattn.attention(late, late, late)
            was_held_up = not stream.done
            got = out.get()
    assert was_held_up
    assert same_bits(got, expected)


@pytest.mark.gpu
def test_a_tensor_that_is_filled_in_the_stream_that_reads_it_waits_for_nothing(
    torch_cuda, monkeypatch
):
    import cupy

    tensor, told, share = torch_cuda.zeros(1, 8, 2, 16).cuda(), [], torch_cuda.Tensor.__dlpack__

    def told_stream(self, *, stream, **request):
        told.append(stream)
        return share(self, stream=stream, **request)

    monkeypatch.setattr(torch_cuda.Tensor, "__dlpack__", told_stream)
    stream, other = cupy.cuda.Stream(non_blocking=True), torch_cuda.cuda.Stream()
    same = torch_cuda.cuda.ExternalStream(stream.ptr)
    for of_cupy, of_torch, expected in (
        (cupy.cuda.Stream.null, torch_cuda.cuda.default_stream(), -1),
        (stream, same, -1),
        (stream, other, stream.ptr),
        (cupy.cuda.Stream.null, other, 1),
    ):
        told.clear()
        with of_cupy, torch_cuda.cuda.stream(of_torch):
            assert taken_to_write("out", tensor).data.ptr == tensor.data_ptr()
        assert {*told} == {expected}


@pytest.mark.parametrize(
    ("of_cupy", "of_torch", "told"), [(0, 0, -1), (7, 7, -1), (7, 0, 7), (0, 7, 1), (2, 0, 2)]
)
def test_only_torch_in_another_stream_is_told_to_wait(monkeypatch, of_cupy, of_torch, told):
    """As above, without a GPU, and on another device; others are always told CuPy's stream."""
    current, asked = [0], []

    class Exporter:
        def __dlpack__(self, *, stream, max_version):
            asked.append((stream, current[-1]))

    class Tensor(Exporter):
        pass

    @contextlib.contextmanager
    def device(index):
        current.append(index)
        yield
        current.pop()

    cuda = SimpleNamespace(
        Device=device,
        get_current_stream=lambda: SimpleNamespace(ptr=of_cupy if current[-1] == 3 else 99),
        current_stream=lambda index: SimpleNamespace(cuda_stream=of_torch if index == 3 else 98),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    _device_capsule(Exporter(), 3)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, Tensor=Tensor))
    _device_capsule(Exporter(), 3)
    _device_capsule(Tensor(), 3)
    assert asked == [(of_cupy or 1, 3), (of_cupy or 1, 3), (told, 3)]
    assert current == [0]


class Interface:
    """A CuPy array of which only ``__cuda_array_interface__`` is known."""

    def __init__(self, array, is_read_only=False):
        self.array, self.is_read_only = array, is_read_only

    @property
    def __cuda_array_interface__(self):
        described = self.array.__cuda_array_interface__
        return described | {"data": (described["data"][0], self.is_read_only)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_cuda_array_interface_is_taken_likewise(dtype):
    import cupy

    arrays = [cupy.asarray(each) for each in draw(*SHAPES[:3], dtype=dtype)]
    foreign = [Interface(each, is_read_only=True) for each in arrays]
    assert taken("q", foreign[0]).data.ptr == arrays[0].data.ptr
    expected = cupy.asnumpy(cuattn.attention(*arrays))
    assert same_bits(cupy.asnumpy(cuattn.attention(*foreign)), expected)
    memory = cupy.full(SHAPES[3], 7, dtype)
    out = Interface(memory)
    assert cuattn.attention(*foreign, out=out) is out
    assert same_bits(cupy.asnumpy(memory), expected)
    refused(
        cuattn.ArgumentError,
        *("out", "read-only"),
        run=lambda: taken_to_write("out", Interface(memory, is_read_only=True)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_device_memory_of_jax_is_taken_and_not_written(dtype):
    import cupy

    jax = needs.library("jax")
    jax.config.update("jax_enable_x64", True)
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"JAX without CUDA: {re.sub(r'[^ -~]', ' ', str(error))}")
    arrays = draw(*SHAPES[:3], dtype=dtype)
    foreign = [jax.device_put(each, device) for each in arrays]
    assert taken("q", foreign[0]).data.ptr == foreign[0].unsafe_buffer_pointer()
    expected = cupy.asnumpy(cuattn.attention(*map(cupy.asarray, arrays)))
    out = cuattn.attention(*foreign)
    assert same_bits(cupy.asnumpy(out), expected)
    back = jax.numpy.from_dlpack(out)
    assert back.unsafe_buffer_pointer() == out.data.ptr
    refused(
        cuattn.ArgumentError,
        *("out", "read-only"),
        run=lambda: cuattn.attention(*foreign, out=back + 0),
    )
