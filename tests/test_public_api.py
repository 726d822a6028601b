"""The public names, their signatures as designed, and docstrings whose examples run."""

import dataclasses
import doctest
import inspect
import re
import subprocess
import sys

import needs
import numpy as np
import pytest

import cuattn
from cuattn.planning.options import Options

FUNCTIONS = [
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_vjp",
    "explain",
    "kernels",
    "merge_states",
    "merge_states_vjp",
    "plan",
]

OPTIONS = (
    "causal=False, window=None, align=None, q_offset=0, k_offset=0, mask=None, bias=None, "
    "alibi_slopes=None, softcap=None, sinks=None, score_mod=None, arrays=None, dropout_p=0.0, "
    "seed=None, softmax_scale=None, layout='bshd', precision=None, out_dtype=None, "
    "deterministic=None"
)
SIGNATURES = {
    "attention": f"(q, k, v, *, {OPTIONS}, return_lse=False, out=None)",
    "attention_forward": f"(q, k, v, *, {OPTIONS}, out=None)",
    "attention_backward": "(res, dout=None, dlse=None, *, wrt=None)",
    "attention_vjp": f"(q, k, v, *, {OPTIONS}, return_lse=False, out=None)",
    "explain": f"(q, k, v, *, {OPTIONS}, return_lse=False, out=None, device=None)",
    "kernels": f"(q, k, v, *, {OPTIONS}, out=None, backward=False, wrt=None, device=None)",
    "plan": f"(q, k, v, *, {OPTIONS}, return_lse=False, out=None, backward=False, wrt=None)",
    "merge_states": "(parts, *, layout='bshd', out_dtype=None)",
    "merge_states_vjp": "(parts, *, layout='bshd', out_dtype=None)",
}


def bare(function):
    """The signature without annotations."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(parameters))


def test_names():
    expected = {
        *FUNCTIONS,
        "ArgumentError",
        "CompileError",
        "CuattnError",
        "DTypeError",
        "Executable",
        "Gradients",
        "KernelLaunch",
        "Kernels",
        "Residuals",
        "UnsupportedError",
        "__version__",
    }
    assert expected <= set(cuattn.__all__)
    assert all(hasattr(cuattn, name) for name in cuattn.__all__)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert bare(getattr(cuattn, name)) == SIGNATURES[name]


def test_vjp_signature():
    import numpy as np

    _, vjp = cuattn.attention_vjp(*[np.ones((1, 1, 1, 1))] * 3)
    assert bare(vjp) == "(dout, dlse=None, wrt=None)"


def test_options_have_one_set_of_defaults():
    parameters = inspect.signature(cuattn.attention).parameters
    named = {name: parameters[name].default for name in Options._fields}
    assert named == Options._field_defaults
    assert list(parameters) == ["q", "k", "v", *Options._fields, "return_lse", "out"]


def test_errors_are_also_the_usual_ones():
    assert issubclass(cuattn.ArgumentError, ValueError)
    assert issubclass(cuattn.DTypeError, TypeError)
    assert issubclass(cuattn.UnsupportedError, NotImplementedError)
    assert issubclass(cuattn.CompileError, RuntimeError)
    error = cuattn.CompileError("it failed", kernel_name="cuattn_fwd", log="line 1")
    assert (error.kernel_name, error.log) == ("cuattn_fwd", "line 1")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_docstring_has_every_section_in_order(name):
    text = getattr(cuattn, name).__doc__
    sections = ["Parameters", "Returns", "Raises", "References", "Examples"]
    places = [text.index(f"    {section}\n    {'-' * len(section)}\n") for section in sections]
    assert places == sorted(places)
    assert re.search(r"\(batch, |[Ss]hape", text), "no shapes"
    assert re.search(r"dtype|float16|As in", text), "no dtypes"
    assert "ArgumentError" in text


METHODS = {
    cuattn.Executable.__call__: ("Parameters", "Returns", "Raises"),
    cuattn.Executable.backward: ("Parameters", "Returns", "Raises"),
    cuattn.Kernels.params: ("Parameters", "Returns", "Raises"),
    cuattn.Kernels.save: ("Parameters", "Returns"),
}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_docstring_of_a_method_has_every_section_in_order(method):
    places = [method.__doc__.index(f"        {name}\n") for name in METHODS[method]]
    assert places == sorted(places)
    parameters = [name for name in inspect.signature(method).parameters if name != "self"]
    assert all(re.search(rf"\b{name}\b", method.__doc__) for name in parameters)


@pytest.mark.parametrize(
    "name", ["Executable", "Gradients", "KernelLaunch", "Kernels", "Residuals"]
)
def test_docstring_of_a_class_names_its_attributes(name):
    kind = getattr(cuattn, name)
    is_data = dataclasses.is_dataclass(kind)
    fields = [field.name for field in dataclasses.fields(kind)] if is_data else []
    assert all(re.search(rf"\b{field}\b", kind.__doc__) for field in fields)
    assert "    Attributes\n    ----------\n" in kind.__doc__


def test_docstrings_have_no_public_name_without_one():
    for name in cuattn.__all__:
        value = getattr(cuattn, name)
        if inspect.isclass(value) or callable(value):
            assert value.__doc__, name


def test_docstring_of_attention_names_every_parameter():
    text = cuattn.attention.__doc__
    for name in inspect.signature(cuattn.attention).parameters:
        assert name in text


MODULES = ("attention", "embed", "executable", "explain", "states")


@pytest.mark.parametrize("module", [f"cuattn.{name}" for name in MODULES])
def test_examples_run(module):
    if module == "cuattn.embed":
        needs.nvrtc()
    __import__(module)
    results = doctest.testmod(sys.modules[module])
    assert results.attempted
    assert not results.failed


def test_import_needs_neither_cupy_nor_a_gpu():
    program = (
        "import sys; sys.modules['cupy'] = None\n"
        "import numpy, cuattn\n"
        "q = numpy.ones((1, 2, 1, 4))\n"
        "out, vjp = cuattn.attention_vjp(q, q, q)\n"
        "vjp(out)\n"
        "assert not [name for name in sys.modules if name.startswith('cupy') and name != 'cupy']\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


WITH_OPTIONS = ["attention", "attention_forward", "attention_vjp", "explain", "kernels", "plan"]


@pytest.mark.parametrize("name", WITH_OPTIONS)
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("causl", "pass causal="),
        ("is_causal", "pass causal="),
        ("scale", "pass softmax_scale="),
        ("attn_mask", "pass mask= "),
        ("enable_gqa", "k and v may have fewer heads"),
        ("nonsense", "'nonsense'$"),
    ],
)
def test_an_unknown_option_is_named_with_its_function_and_what_may_be_meant(name, given, meant):
    x = np.ones((1, 2, 1, 2), np.float32)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got .*'{given}'") as caught:
        getattr(cuattn, name)(x, x, x, **{given: True})
    assert re.search(meant, str(caught.value))
    assert not isinstance(caught.value, cuattn.DTypeError)


def test_residuals_of_a_forward_hold_lse():
    x = np.ones((1, 2, 1, 2), np.float32)
    with pytest.raises(TypeError, match="lse is in the residuals"):
        cuattn.attention_forward(x, x, x, return_lse=True)


def test_other_errors_of_attention_are_its_own():
    x = np.ones((1, 2, 1, 2), np.float32)
    with pytest.raises(TypeError, match="'k'"):
        cuattn.attention(x)
    with pytest.raises(cuattn.DTypeError, match="causal"):
        cuattn.attention(x, x, x, causal="yes")
