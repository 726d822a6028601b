"""Every argument against every wrong dtype, shape, device and value: the class and the message.

A message names the argument first, then says what it got, what was expected and what to do.
"""

import ml_dtypes
import numpy as np
import pytest
from calls import refused

import cuattn
from cuattn import ArgumentError, DTypeError, UnsupportedError
from cuattn.planning.options import UNSUPPORTED
from cuattn.planning.validate import MAX_SEQLEN


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def call(**changes):
    """A good call with some arguments replaced."""
    arguments = {"q": ones(2, 6, 4, 8), "k": ones(2, 6, 2, 8), "v": ones(2, 6, 2, 5), **changes}
    return cuattn.attention(**arguments)


class Exporter:
    """An array of another library, as far as cuattn can tell."""

    def __init__(self, requires_grad=False):
        self.requires_grad = requires_grad

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **how):
        raise BufferError("it is not mine to give")


class SomeTracer:
    pass


Q = (2, 6, 4, 8)
BAD_ARRAYS = {
    "list": ([[1.0]], "numpy.asarray"),
    "none": (None, "pass "),
    "scalar": (1.0, "numpy.asarray"),
    "masked": (np.ma.ones(Q, "float32"), ".filled("),
    "matrix": (ones(2, 2).view(np.matrix), "numpy.asarray"),
    "foreign": (Exporter(), "its library does not share"),
    "requires_grad": (Exporter(requires_grad=True), ".detach()"),
    "tracer": (SomeTracer(), "outside of the traced function"),
}
BAD_DTYPES = {
    "complex64": (np.complex64, "real arrays"),
    "int32": (np.int32, ".astype('float32')"),
    "uint8": (np.uint8, ".astype('float32')"),
    "bool": (np.bool, ".astype('float32')"),
    "object": (object, ".astype('float64')"),
    "int64": (np.int64, ".astype('float64')"),
    "uint16": (np.uint16, ".view('bfloat16')"),
    "float8": (ml_dtypes.float8_e4m3fn, ".astype('float32')"),
    "structured": ([("x", "f4")], "real numbers"),
    "bfloat16 of a file": (np.dtype("V2"), ".view('bfloat16')"),
    "non-native": (np.dtype("f4").newbyteorder(), "newbyteorder('=')"),
}
if np.dtype(np.longdouble) != np.dtype(np.float64):
    BAD_DTYPES["longdouble"] = (np.longdouble, ".astype('float64')")


@pytest.mark.parametrize("kind", BAD_ARRAYS)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_not_an_array(name, kind):
    array, remedy = BAD_ARRAYS[kind]
    if name == "out" and kind in ("list", "scalar"):
        remedy = "numpy.empty"  # what a conversion makes would be written, and dropped
    if (name, kind) != ("out", "none"):
        refused(DTypeError, name, remedy, run=lambda: call(**{name: array}))


@pytest.mark.parametrize("kind", BAD_DTYPES)
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_wrong_dtype(name, kind):
    dtype, remedy = BAD_DTYPES[kind]
    shape = {"q": (2, 6, 4, 8), "k": (2, 6, 2, 8), "v": (2, 6, 2, 5)}[name]
    array = np.zeros(shape, dtype)
    refused(DTypeError, name, "got dtype", remedy, run=lambda: call(**{name: array}))


@pytest.mark.parametrize("name", ["k", "v"])
def test_dtypes_that_differ(name):
    array = {"k": ones(2, 6, 2, 8), "v": ones(2, 6, 2, 5)}[name].astype("float16")
    parts = "float16", "float32 like q", f"{name}.astype('float32')"
    refused(DTypeError, name, *parts, run=lambda: call(**{name: array}))


WRONG_SHAPES = {
    "q-1d": ("q", {"q": ones(8)}, "1 axes", "reshape to 2, 3 or 4 axes"),
    "q-3d": ("q", {"q": ones(6, 4, 8)}, "3 axes", "pass layout='shd', 'hsd' or 'bsd'"),
    "q-2d": ("q", {"q": ones(6, 8)}, "2 axes", "pass layout='sd'"),
    "q-5d": ("q", {"q": ones(1, 2, 6, 4, 8)}, "5 axes", "reshape to 2, 3 or 4 axes"),
    "q-4d-as-shd": ("q", {"layout": "shd"}, "4 axes", "pass layout='bshd' or 'bhsd'"),
    "k-3d": ("k", {"k": ones(6, 2, 8)}, "(6, 2, 8)", "4 axes (bshd) like q"),
    "v-5d": ("v", {"v": ones(1, 2, 6, 2, 5)}, "(1, 2, 6, 2, 5)", "4 axes (bshd) like q"),
    "k-batch": ("k", {"k": ones(1, 6, 2, 8)}, "(1, 6, 2, 8)", "batch 2 like q"),
    "v-batch": ("v", {"v": ones(3, 6, 2, 5)}, "(3, 6, 2, 5)", "batch 2 like q"),
    "k-head_dim": ("k", {"k": ones(2, 6, 2, 7)}, "(2, 6, 2, 7)", "head_dim 8 like q"),
    "v-seqlen": ("v", {"v": ones(2, 7, 2, 5)}, "(2, 7, 2, 5)", "seqlen_k 6 like k"),
    "v-heads": ("v", {"v": ones(2, 6, 4, 5)}, "(2, 6, 4, 5)", "2 heads like k"),
    "k-heads": ("k", {"k": ones(2, 6, 3, 8), "v": ones(2, 6, 3, 5)}, "divides the 4 heads of q"),
    "k-more-heads": ("k", {"k": ones(2, 6, 8, 8), "v": ones(2, 6, 8, 5)}, "divides the 4 heads"),
    "k-no-heads": ("k", {"k": ones(2, 6, 0, 8), "v": ones(2, 6, 0, 5)}, "divides the 4 heads"),
    "q-head_dim-0": ("q", {"q": ones(2, 6, 4, 0), "k": ones(2, 6, 2, 0)}, "at least 1"),
    "v-head_dim-0": ("v", {"v": ones(2, 6, 2, 0)}, "head_dim_v of at least 1"),
    "out-shape": ("out", {"out": ones(2, 6, 4, 8)}, "(2, 6, 4, 8)", "shape (2, 6, 4, 5)"),
    "out-ndim": ("out", {"out": ones(6, 4, 5)}, "(6, 4, 5)", "shape (2, 6, 4, 5)"),
}


@pytest.mark.parametrize("row", WRONG_SHAPES)
def test_wrong_shape(row):
    name, changes, *parts = WRONG_SHAPES[row]
    refused(ArgumentError, name, *parts, run=lambda: call(**changes))


@pytest.mark.parametrize("name", ["q", "k"])
def test_too_long(name):
    long = np.broadcast_to(np.float32(1), (1, MAX_SEQLEN, 1, 1))
    short = ones(1, 1, 1, 1)
    q, k = (long, short) if name == "q" else (short, long)
    refused(ArgumentError, name, "a sequence below", run=lambda: cuattn.attention(q, k, k))


WRONG_VALUES = {
    "causal-int": (DTypeError, "causal", {"causal": 1}, "True or False"),
    "causal-none": (DTypeError, "causal", {"causal": None}, "True or False"),
    "causal-str": (DTypeError, "causal", {"causal": "yes"}, "True or False"),
    "causal-array": (DTypeError, "causal", {"causal": ones(2)}, "True or False"),
    "align-name": (ArgumentError, "align", {"align": "center"}, "'bottom_right' or 'top_left'"),
    "align-int": (DTypeError, "align", {"align": 1}, "of type int"),
    "align-list": (DTypeError, "align", {"align": ["top_left"]}, "of type list"),
    "q_offset-float": (DTypeError, "q_offset", {"q_offset": 1.0}, "an integer"),
    "q_offset-bool": (DTypeError, "q_offset", {"q_offset": False}, "of type bool"),
    "q_offset-npbool": (DTypeError, "q_offset", {"q_offset": np.True_}, "an integer"),
    "q_offset-none": (DTypeError, "q_offset", {"q_offset": None}, "an integer"),
    "q_offset-array": (DTypeError, "q_offset", {"q_offset": np.ones(1, int)}, "an integer"),
    "k_offset-str": (DTypeError, "k_offset", {"k_offset": "0"}, "of type str"),
    "k_offset-float": (DTypeError, "k_offset", {"k_offset": np.float32(0)}, "an integer"),
    "scale-nan": (ArgumentError, "softmax_scale", {"softmax_scale": np.nan}, "got nan"),
    "scale-inf": (ArgumentError, "softmax_scale", {"softmax_scale": -np.inf}, "got -inf"),
    "scale-huge": (
        ArgumentError,
        "softmax_scale",
        {"softmax_scale": 1e300},
        "from 1.18e-38 to 1.7e+38",
    ),
    "scale-tiny": (ArgumentError, "softmax_scale", {"softmax_scale": 1e-46}, "from 1.18e-38"),
    "scale-int": (ArgumentError, "softmax_scale", {"softmax_scale": 10**5000}, "16610 bits"),
    "offset-huge": (ArgumentError, "q_offset", {"q_offset": 10**5000}, "16610 bits"),
    "seed-huge": (ArgumentError, "seed", {"seed": 10**5000}, "16610 bits"),
    "scale-complex": (DTypeError, "softmax_scale", {"softmax_scale": 1j}, "a real number"),
    "scale-str": (DTypeError, "softmax_scale", {"softmax_scale": "1"}, "a real number"),
    "scale-bool": (DTypeError, "softmax_scale", {"softmax_scale": True}, "of type bool"),
    "scale-array": (DTypeError, "softmax_scale", {"softmax_scale": ones(1)}, "a real number"),
    "layout-name": (ArgumentError, "layout", {"layout": "bsdh"}, "bshd, bhsd, shd, hsd, bsd, sd"),
    "layout-none": (DTypeError, "layout", {"layout": None}, "bshd, bhsd, shd, hsd, bsd, sd"),
    "layout-list": (DTypeError, "layout", {"layout": list("bshd")}, "bshd, bhsd"),
    "out_dtype-narrower": (DTypeError, "out_dtype", {"out_dtype": "float16"}, "'float32'"),
    "out_dtype-wider": (DTypeError, "out_dtype", {"out_dtype": np.float64}, "'float32'"),
    "out_dtype-name": (DTypeError, "out_dtype", {"out_dtype": "real"}, "got 'real'"),
    "out_dtype-int": (DTypeError, "out_dtype", {"out_dtype": 4}, "got 4"),
    "out_dtype-order": (DTypeError, "out_dtype", {"out_dtype": ">f4"}, "got '>f4'"),
    "deterministic-int": (DTypeError, "deterministic", {"deterministic": 0}, "None, True or False"),
    "return_lse-int": (DTypeError, "return_lse", {"return_lse": 1}, "True or False"),
    "out-dtype": (DTypeError, "out", {"out": ones(2, 6, 4, 5, dtype="f8")}, "dtype float32"),
    "seed-negative": (ArgumentError, "seed", {"seed": -1}, "0 <= seed < 2**64"),
    "seed-large": (ArgumentError, "seed", {"seed": 2**64}, "0 <= seed < 2**64"),
    "seed-float": (DTypeError, "seed", {"seed": 1.0}, "an integer"),
    "seed-bool": (DTypeError, "seed", {"seed": True}, "an integer"),
    "dropout_p-one": (ArgumentError, "dropout_p", {"dropout_p": 1.0}, "0 <= dropout_p < 1"),
    "dropout_p-negative": (ArgumentError, "dropout_p", {"dropout_p": -0.1}, "0 <= dropout_p < 1"),
    "dropout_p-nan": (ArgumentError, "dropout_p", {"dropout_p": np.nan}, "0 <= dropout_p < 1"),
    "dropout_p-str": (DTypeError, "dropout_p", {"dropout_p": "0"}, "a real number"),
    "dropout_p-bool": (DTypeError, "dropout_p", {"dropout_p": False}, "a real number"),
}


@pytest.mark.parametrize("row", WRONG_VALUES)
def test_wrong_value(row):
    error, name, changes, *parts = WRONG_VALUES[row]
    refused(error, name, *parts, run=lambda: call(**changes))
    refused(error, name, *parts, run=lambda: call(**changes))  # an error is not remembered


@pytest.mark.parametrize("name", [*UNSUPPORTED, "dropout_p"])
def test_option_of_a_later_version(name):
    value = 0.5 if name == "dropout_p" else (1, 1)
    refused(UnsupportedError, name, "leave it", run=lambda: call(**{name: value}))
    unhashable = {"dropout_p": np.float64(0.5)}.get(name, [1])
    refused(UnsupportedError, name, "leave it", run=lambda: call(**{name: unhashable}))


def test_unknown_option():
    for run in (cuattn.attention, cuattn.attention_forward, cuattn.attention_vjp):
        with pytest.raises(TypeError, match="casual"):
            run(*[ones(1, 2, 1, 4)] * 3, casual=True)


def test_options_are_keyword_only():
    with pytest.raises(TypeError):
        cuattn.attention(*[ones(1, 2, 1, 4)] * 3, True)


def test_out_of_the_accumulators_dtype_needs_out_dtype():
    q, k, v = (ones(2, 6, 4, 8, dtype="f2") for _ in "qkv")
    out = ones(2, 6, 4, 8)
    with pytest.raises(DTypeError, match=r"out: got dtype float32; .*pass out_dtype='float32'"):
        cuattn.attention(q, k, v, out=out)
    assert cuattn.attention(q, k, v, out=out, out_dtype="float32") is out


def test_out_of_another_dtype_is_not_to_be_converted():
    """What out.astype(...) makes would be written, and dropped."""
    refused(DTypeError, "out", "numpy.empty", run=lambda: call(out=ones(2, 6, 4, 5, dtype="f8")))


def test_out_read_only():
    out = ones(2, 6, 4, 5)
    out.flags.writeable = False
    refused(ArgumentError, "out", "read-only", run=lambda: call(out=out))


# attention_backward --------------------------------------------------------------------------


def backward(dout=None, dlse=None, wrt=None):
    _, res = cuattn.attention_forward(ones(2, 6, 4, 8), ones(2, 6, 2, 8), ones(2, 6, 2, 5))
    return cuattn.attention_backward(res, dout, dlse, wrt=wrt)


WRONG_BACKWARD = {
    "dout-shape": (ArgumentError, "dout", {"dout": ones(2, 6, 4, 8)}, "(2, 6, 4, 5) like out"),
    "dout-ndim": (ArgumentError, "dout", {"dout": ones(5)}, "(2, 6, 4, 5) like out"),
    "dout-dtype": (DTypeError, "dout", {"dout": ones(2, 6, 4, 5, dtype="f8")}, "float32 like out"),
    "dout-list": (DTypeError, "dout", {"dout": [1.0]}, "numpy.asarray"),
    "dout-scalar": (DTypeError, "dout", {"dout": 1.0}, "numpy.full_like(out, 1)"),
    "dlse-shape": (ArgumentError, "dlse", {"dlse": ones(2, 6, 4)}, "(2, 4, 6) like lse"),
    "dlse-dtype": (DTypeError, "dlse", {"dlse": ones(2, 4, 6, dtype="f2")}, "float32 like lse"),
    "dlse-list": (DTypeError, "dlse", {"dlse": [1.0]}, "numpy.asarray"),
    "wrt-str": (DTypeError, "wrt", {"wrt": "q"}, "pass a set"),
    "wrt-int": (DTypeError, "wrt", {"wrt": 1}, "pass a set"),
    "wrt-unhashable": (DTypeError, "wrt", {"wrt": [["q"]]}, "pass a set"),
    "wrt-unknown": (ArgumentError, "wrt", {"wrt": {"dq"}}, "'q', 'k' or 'v'"),
    "wrt-not-a-name": (ArgumentError, "wrt", {"wrt": [1]}, "'q', 'k' or 'v'"),
    "wrt-not-given": (ArgumentError, "wrt", {"wrt": {"q", "bias"}}, "an input not given"),
    "wrt-empty": (ArgumentError, "wrt", {"wrt": set()}, "pass None"),
}


@pytest.mark.parametrize("row", WRONG_BACKWARD)
def test_wrong_backward_argument(row):
    error, name, changes, *parts = WRONG_BACKWARD[row]
    refused(error, name, *parts, run=lambda: backward(**changes))


def test_wrong_residuals():
    refused(DTypeError, "res", "attention_forward", run=lambda: cuattn.attention_backward(None))


# Kinds of NumPy arrays -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_numpy_array_off_its_alignment_is_fine(name):
    packed = np.zeros((2, 6, 4), [("x", "i1"), ("y", "f4", 8)])["y"]
    plain = np.zeros((2, 6, 4, 8), np.float32)
    arrays = {"q": plain, "k": plain, "v": plain, name: packed}
    assert not packed.flags.aligned
    assert not cuattn.attention(**arrays).any()


def test_numpy_subclass_is_an_array(tmp_path):
    mapped = np.memmap(tmp_path / "q", "float32", "w+", shape=(2, 6, 4, 8))
    assert type(cuattn.attention(mapped, mapped, mapped)) is np.ndarray


# merge_states --------------------------------------------------------------------------------


def part(dtype="float32", lse_dtype="float32", seqlen=3):
    return ones(1, seqlen, 2, 4, dtype=dtype), ones(1, 2, seqlen, dtype=lse_dtype)


WRONG_MERGE = {
    "empty": (ArgumentError, "parts", [[]], {}, "non-empty"),
    "not-iterable": (DTypeError, "parts", [1], {}, "(out, lse) pairs"),
    "not-pairs": (DTypeError, "parts", [[1, 2]], {}, "(out, lse) pairs"),
    "array": (DTypeError, "parts", [ones(3, 4, 5)], {}, "(out, lse) pairs"),
    "outs-alone": (DTypeError, "parts", [[ones(2, 3, 2, 4)] * 2], {}, "(out, lse) pairs"),
    "pair-alone": (
        DTypeError,
        "parts",
        [(ones(2, 3, 2, 4), ones(2, 2, 3))],
        {},
        "(out, lse) pairs",
    ),
    "out-type": (DTypeError, "parts[0][0]", [[([1.0], ones(1))]], {}, "numpy.asarray"),
    "out-dtype": (DTypeError, "parts[0][0]", [[part("int32")]], {}, ".astype('float32')"),
    "lse-type": (DTypeError, "parts[0][1]", [[(ones(1, 3, 2, 4), 1.0)]], {}, "numpy.asarray"),
    "lse-dtype": (DTypeError, "parts[0][1]", [[part("float16", "float16")]], {}, "float32"),
    "lse-shape": (ArgumentError, "parts[0][1]", [[part()]], {"layout": "bhsd"}, "(1, 3, 2)"),
    "second-out": (ArgumentError, "parts[1][0]", [[part(), part(seqlen=4)]], {}, "(1, 3, 2, 4)"),
    "second-dtype": (DTypeError, "parts[1][0]", [[part(), part("float16")]], {}, "float32"),
    "second-lse": (DTypeError, "parts[1][1]", [[part(), part(lse_dtype="f8")]], {}, "float32"),
    "layout": (ArgumentError, "layout", [[part()]], {"layout": "hb"}, "bshd, bhsd"),
    "layout-ndim": (ArgumentError, "parts[0][0]", [[part()]], {"layout": "shd"}, "'bshd' or"),
    "out_dtype": (DTypeError, "out_dtype", [[part()]], {"out_dtype": "float64"}, "bfloat16"),
}


@pytest.mark.parametrize("row", WRONG_MERGE)
@pytest.mark.parametrize("merge", [cuattn.merge_states, cuattn.merge_states_vjp])
def test_wrong_merge_argument(merge, row):
    error, name, arguments, options, *parts = WRONG_MERGE[row]
    refused(error, name, *parts, run=lambda: merge(*arguments, **options))


def test_wrong_merge_cotangent():
    _, vjp = cuattn.merge_states_vjp([part()])
    refused(ArgumentError, "dout", "(1, 3, 2, 4)", run=lambda: vjp(ones(1, 3, 2, 5)))
    refused(DTypeError, "dlse", "float32", run=lambda: vjp(None, ones(1, 2, 3, dtype="f8")))
