"""What others' users reported of arrays over DLPack, as tests here.

As in ``test_bug_reports.py``, by number of the report. ``test_foreign.py`` has torch and JAX.
"""

import gc

import numpy as np
import pytest
from calls import draw, qkv, refused, same_bits
from checked import CAUSAL, call
from dlpack_exporter import NEW, OLD, TENSOR, Exporter
from strategies import dtype_of

import cuattn
from cuattn._foreign import taken

#: One of host and one of device memory: families see none of it.
ENGINES = ("numpy", "simt")


def draw_as(kind, engine, dtype="bfloat16"):
    """(exporters, native arrays) of q, k, v and dout; both over the same memory."""
    shapes = (2, 17, 4, 32), *[(2, 30, 2, 32)] * 2, (2, 17, 4, 32)
    if kind == "transposed":
        arrays = draw(*[(b, h, s, d) for b, s, h, d in shapes], dtype=dtype)
        arrays = [engine.asarray(each).transpose(0, 2, 1, 3) for each in arrays]
    else:
        arrays = list(map(engine.asarray, draw(*shapes, dtype=dtype)))
    if kind == "reversed":
        arrays = [each[:, ::-1] for each in arrays]
    how = {
        "an offset": {"byte_offset": 64},
        "without a version": {"versioned": False},
        "read-only": {"read_only": True},
    }.get(kind, {})
    return [Exporter(each, **how) for each in arrays], arrays


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


def test_the_exporter_lays_its_structs_out_as_c_does():
    assert (TENSOR.itemsize, OLD.itemsize, NEW.itemsize) == (48, 64, 80)
    assert [TENSOR.fields[name][1] for name in ("device", "code", "shape", "byte_offset")] == [
        *(8, 20, 24, 40)
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize(
    "kind", ["plain", "transposed", "reversed", "an offset", "without a version", "read-only"]
)
def test_bc66_memory_is_taken_without_a_copy_as_it_lies(engine, kind, dtype):
    """cupy/cupy#8801 and #9670, jax-ml/jax#12009: offsets and strides count; read-only will do."""
    foreign, arrays = draw_as(kind, engine, dtype)
    native = taken("q", foreign[0])
    assert native.dtype == dtype_of(dtype)
    assert (address(native), native.strides) == (foreign[0].address, arrays[0].strides)
    got, want = (call(*each, deterministic=True, **CAUSAL) for each in (foreign, arrays))
    assert all(isinstance(each, engine.xp.ndarray) for each in got)
    assert all(map(same_bits, map(engine.asnumpy, got), map(engine.asnumpy, want)))


@pytest.mark.parametrize(
    "change", [{"code": 200}, {"code": 17}, {"bits": 12}, {"lanes": 2}], ids=str
)
def test_bc66_a_type_that_is_not_known_is_refused(engine, change):
    q, k, v = map(engine.asarray, qkv(dtype="bfloat16"))
    run = lambda: cuattn.attention(Exporter(q, **change), k, v)  # noqa: E731
    refused(cuattn.DTypeError, "q", run=run)


@pytest.mark.parametrize("dtype", ["bool", "uint8"])
def test_bc67_booleans_are_no_numbers(engine, dtype):
    """cupy/cupy#7144 and #7874, pytorch/pytorch#67081: as a mask they wait for that option."""
    array = engine.asarray(np.ones((1, 7, 2, 8), dtype))
    assert taken("q", Exporter(array)).dtype == np.dtype(dtype)
    run = lambda: cuattn.attention(*[Exporter(array)] * 3)  # noqa: E731
    refused(cuattn.DTypeError, "q", f"dtype {dtype}", run=run)


def streams_told(arrays, out=None):
    """The stream of every request for these arrays, "absent" where none was named."""
    foreign = list(map(Exporter, arrays))
    if out is not None:
        out = Exporter(out)
        foreign.append(out)
    res = cuattn.attention_forward(*foreign[:3], out=out)[1]
    foreign.append(Exporter(arrays[0]))
    cuattn.attention_backward(res, foreign[-1])
    assert all(each.asked for each in foreign)
    return [request.get("stream", "absent") for each in foreign for request in each.asked]


@pytest.mark.parametrize("engine", ["numpy"], indirect=True, scope="module")
def test_bc68_an_exporter_of_host_memory_is_told_no_stream(engine):
    """cupy/cupy#5970 and #8683, pytorch/pytorch#150217."""
    for dtype in ("bfloat16", "float32"):
        arrays = qkv(dtype=dtype)
        told = streams_told(arrays, np.empty_like(arrays[0]))
        assert {*told} <= {None, "absent"}


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["simt"], indirect=True, scope="module")
def test_bc68_an_exporter_of_device_memory_is_told_the_current_stream(engine):
    """1 for the legacy default stream, for 0 may mean two."""
    import cupy

    arrays = [engine.asarray(each) for each in qkv(dtype="bfloat16")]
    out = cupy.empty_like(arrays[0])
    assert {*streams_told(arrays, out)} == {1}
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert {*streams_told(arrays, out)} == {stream.ptr}
        assert stream.ptr > 2
    with cupy.cuda.Stream.ptds:
        assert {*streams_told(arrays, out)} == {2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bc66_out_is_written_where_it_may_be(engine, dtype):
    (q, k, v, _), arrays = draw_as("plain", engine, dtype)
    expected = engine.asnumpy(cuattn.attention(*arrays[:3]))
    memory = engine.asarray(np.full(expected.shape, 7, expected.dtype))
    for how in ({"read_only": True}, {"versioned": False}):  # the old protocol does not say
        run = lambda how=how: cuattn.attention(q, k, v, out=Exporter(memory, **how))  # noqa: E731
        refused(cuattn.ArgumentError, "out", "read-only", run=run)
        assert (engine.asnumpy(memory) == 7).all()
    out = Exporter(memory)
    assert cuattn.attention(q, k, v, out=out) is out
    assert same_bits(engine.asnumpy(memory), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bc69_memory_goes_back_to_its_exporter_with_the_residuals(engine, dtype):
    """pytorch/pytorch#177869: and not before."""
    foreign, _ = draw_as("plain", engine, dtype)
    out, res = cuattn.attention_forward(*foreign[:3])
    assert [each.lent() for each in foreign] == [1, 1, 1, 0]
    cuattn.attention_backward(res, foreign[3])
    assert [each.lent() for each in foreign[:3]] == [1, 1, 1]
    del out, res
    gc.collect()
    assert [each.lent() for each in foreign] == [0] * 4
