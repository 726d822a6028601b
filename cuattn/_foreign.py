"""Arrays of other libraries: their memory as a NumPy or CuPy array, without a copy.

Host memory becomes NumPy's, CUDA memory CuPy's, over DLPack or ``__cuda_array_interface__``. The
exporter is told CuPy's current stream, so that what fills an array comes before what reads it.
"""

from __future__ import annotations

import ctypes
import functools
import math
import sys
import weakref
from typing import Any

import ml_dtypes
import numpy as np

from cuattn._typing import ACCUMULATOR, Array
from cuattn.errors import ArgumentError, DTypeError, explain_argument

#: The remedy for an ``out`` that will not do.
NEW_OUT = "pass an array from numpy.empty or cupy.empty that you keep, or drop out="

EXPECTED = "an array: NumPy's, CuPy's, or one that shares its memory over DLPack"

#: Types whose arrays are taken as they are; CuPy's is added when the first one comes.
_NATIVE: set[type] = {np.ndarray}


def taken(name: str, array: object) -> Array:
    """An argument as a NumPy or CuPy array over the same memory.

    Raises
    ------
    DTypeError
        It is no array, or its library does not share it; the message says what to do.
    """
    if type(array) in _NATIVE:
        return array
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(array, cupy.ndarray):
        _NATIVE.add(type(array))
        return array
    try:
        array = _without_gradient(array)
        native = _imported(name, array)
    except DTypeError:
        raise
    except Exception as error:  # why so wide: an exporter is anybody's code
        raise DTypeError(_not_shared(name, array, str(error))) from error
    if native is not array and native.size and not _has_memory(native):
        raise DTypeError(_not_shared(name, array, "it has no memory"))
    return native


def _has_memory(native: Array) -> bool:
    """Whether the exporter gave any; for a null pointer NumPy makes memory of its own."""
    if isinstance(native, np.ndarray):
        return not native.flags.owndata
    return bool(native.data.ptr)


def _not_shared(name: str, array: object, why: str) -> str:
    got = f"{_type_of(array)}, which its library does not share ({why})"
    remedy = (
        f"pass a dense array of {', '.join(ACCUMULATOR)} in memory, from outside of transforms "
        "such as torch.func"
    )
    return explain_argument(name, got, EXPECTED, remedy)


def taken_to_write(name: str, array: object) -> Array:
    """As ``taken``, of an array that its library lets others write.

    Raises
    ------
    ArgumentError
        It does not, or does not say so.
    DTypeError
        As ``taken``.
    """
    array = _without_gradient(array)
    native = taken(name, array)
    if native is not array and not _is_writable(native, array):
        got = f"a read-only array, {_type_of(array)}"
        expected = "an array that may be written"
        raise ArgumentError(explain_argument(name, got, expected, NEW_OUT))
    return native


def was_written(array: Any) -> None:
    """Let torch know of it, which keeps count of what is changed in place under its gradients."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor) and not array.is_inference():
        torch.autograd.graph.increment_version(array)


def _without_gradient(array: Any) -> Any:
    """The array, or what it holds, where torch records no gradients (torch.no_grad)."""
    if getattr(array, "requires_grad", False) is True:
        torch = sys.modules.get("torch")
        if torch is not None and not torch.is_grad_enabled():
            return array.detach()
    return array


def _has_tangent(array: object) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(array, torch.Tensor):
        return False
    return torch.autograd.forward_ad.unpack_dual(array).tangent is not None


def _type_of(array: object) -> str:
    kind = type(array)
    return f"{kind.__module__}.{kind.__qualname__}"


@functools.lru_cache
def _why_no_values(classes: tuple[type, ...]) -> str | None:
    """The remedy for arrays, of these classes, that stand for what a transform computes later."""
    names = [each.__name__ for each in classes]
    if any("Tracer" in name for name in names):
        return (
            "call cuattn outside of the traced function (jit, vmap), and for jax.grad (of first "
            "order) through a jax.custom_vjp as in examples/05_jax.py"
        )
    if "FakeTensor" in names:
        # why not left to DLPack: it would give the memory of another array, or none
        return "keep cuattn out of what is compiled, with torch.compiler.disable"
    return None


def _why_no_array(name: str, array: object) -> tuple[str, str, str] | None:
    """The (got, expected, remedy) of something that is not an array we take."""
    got = _type_of(array)
    if array is None:
        return "None", EXPECTED, "pass an array"
    if isinstance(array, np.ma.MaskedArray):
        return got, "an array without a mask", f"pass {name}.filled(...) if that is meant"
    if isinstance(array, np.matrix):
        return got, EXPECTED, f"pass numpy.asarray({name})"
    if isinstance(array, np.ndarray):
        return None
    remedy = _why_no_values(type(array).__mro__)
    if remedy is not None:
        return got, "an array with values", remedy
    if getattr(array, "requires_grad", False) is True:
        got += " with requires_grad=True"
        remedy = (
            f"pass {name}.detach(), or wrap cuattn in a torch.autograd.Function as "
            "examples/04_torch.py does"
        )
        return got, "an array without a gradient of its own", remedy
    if _has_tangent(array):
        expected = "an array without a tangent, for there is no forward mode"
        return f"{got} with a tangent", expected, f"pass {name}.detach()"
    is_deleted = getattr(array, "is_deleted", None)  # JAX's
    if is_deleted is not None and is_deleted():
        return f"{got} that was deleted or donated", EXPECTED, "pass one that still has its memory"
    is_neg = getattr(array, "is_neg", None)  # torch's views of a conjugate: DLPack loses the sign
    if is_neg is not None and is_neg():
        return f"{got} with the negative bit set", EXPECTED, f"pass {name}.resolve_neg()"
    if hasattr(array, "__dlpack__") or hasattr(array, "__cuda_array_interface__"):
        return None
    if name == "out":  # a conversion would take the result and be dropped
        return got, EXPECTED, NEW_OUT
    if name in ("dout", "dlse") and isinstance(array, (int, float)):
        return got, EXPECTED, f"pass an array of its shape, such as numpy.full_like({name[1:]}, 1)"
    if name == "dout" and isinstance(array, tuple):
        return got, EXPECTED, "pass dout and dlse as two arguments"
    if not isinstance(array, (list, int, float)):
        return got, EXPECTED, "pass an array"
    return got, EXPECTED, f"convert with numpy.asarray({name}) or cupy.asarray({name})"


# DLPack --------------------------------------------------------------------------------------
# source: DLPack specification 1.0, dlpack.h and "Python Specification for DLPack".

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_BFLOAT = 4
_VERSION = (1, 0)
_IS_READ_ONLY, _IS_COPIED = 1, 2
_LEGACY_STREAM, _NO_WAIT = 1, -1  # 0 is not allowed, for it may mean two streams


def _imported(name: str, array: Any) -> Array:
    refusal = _why_no_array(name, array)
    if refusal is not None:
        raise DTypeError(explain_argument(name, *refusal))
    if isinstance(array, np.ndarray):
        return array
    if not hasattr(array, "__dlpack__"):
        return _cupy(name, array).asarray(array)
    kind, index = map(int, array.__dlpack_device__())
    if kind in (_CUDA, _CUDA_MANAGED):
        return _cupy(name, array).from_dlpack(_device_capsule(array, index))
    if kind not in (_CPU, _CUDA_HOST):
        got = f"{_type_of(array)} on a device of DLPack's type {kind}, number {index}"
        expected, remedy = "host memory or a CUDA device", "copy it there with its own library"
        raise DTypeError(explain_argument(name, got, expected, remedy))
    try:
        return np.from_dlpack(array)
    except Exception as error:  # noqa: BLE001 - NumPy's refusals are of many classes
        return _bfloat16(array, error)


def _cupy(name: str, array: object) -> Any:
    try:
        import cupy
    except ImportError as error:
        got, expected = f"{_type_of(array)} in CUDA memory", "CuPy, which computes there"
        remedy = 'pip install "cupy-cuda13x[ctk]" (or "cupy-cuda12x[ctk]" for a CUDA 12 driver)'
        raise DTypeError(explain_argument(name, got, expected, remedy)) from error
    return cupy


def _is_writable(native: Array, array: Any) -> bool:
    """Whether an array may be written by others, as far as its library says; CuPy does not ask."""
    if not hasattr(array, "__dlpack__"):
        return not array.__cuda_array_interface__["data"][1]
    # The capsule is held: what it holds goes with it.
    if not isinstance(native, np.ndarray):
        capsule = _device_capsule(array, native.device.id)
    elif native.flags.writeable:
        capsule = _capsule(array, stream=None)
    else:
        return False
    managed, _ = _managed(capsule)
    is_versioned = isinstance(managed, _Versioned)
    return is_versioned and not managed.flags & (_IS_READ_ONLY | _IS_COPIED)


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


#: Called with the interpreter's lock, which an exporter written in Python needs.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _Unversioned(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Capsules by the C API; a capsule keeps the address of its name, so names live as long as this.
_NAMES = {_Unversioned: b"dltensor", _Versioned: b"dltensor_versioned"}
_USED = {struct: ctypes.create_string_buffer(b"used_" + name) for struct, name in _NAMES.items()}
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


def _capsule(array: Any, stream: int | None) -> object:
    """A capsule of the versioned protocol, or of the old one where that is all there is."""
    try:
        return array.__dlpack__(stream=stream, max_version=_VERSION)
    except TypeError:  # an exporter from before 2023
        return array.__dlpack__(stream=stream)


def _device_capsule(array: Any, index: int) -> object:
    """A capsule of memory that is filled before CuPy's current stream of its device reads it."""
    cuda = sys.modules["cupy"].cuda
    torch: Any = sys.modules.get("torch")
    is_torchs = torch is not None and isinstance(array, torch.Tensor)
    with cuda.Device(index):  # the only one whose tensors torch shares
        stream = cuda.get_current_stream().ptr
        told = stream or _LEGACY_STREAM
        # why not left to torch: to see it takes most of its time to share a tensor
        if is_torchs and torch.cuda.current_stream(index).cuda_stream == stream:
            told = _NO_WAIT
        return _capsule(array, told)


def _managed(capsule: object) -> tuple[Any, int]:
    """What a capsule holds, as long as it lives, and the address of that."""
    for struct, name in _NAMES.items():
        if _is_valid(capsule, name):
            address = _pointer(capsule, name)
            return struct.from_address(address), address
    raise BufferError(f"{type(capsule).__name__} is no DLPack capsule")


def _bfloat16(array: Any, refusal: Exception) -> Array:
    """Host memory of bfloat16, which NumPy does not take over DLPack; the refusal for another."""
    capsule = _capsule(array, stream=None)
    managed, address = _managed(capsule)
    tensor = managed.tensor
    if isinstance(managed, _Versioned) and managed.major > _VERSION[0]:
        raise refusal
    is_host = tensor.device_type in (_CPU, _CUDA_HOST) and tensor.ndim >= 0
    if not is_host or (tensor.code, tensor.bits, tensor.lanes) != (_BFLOAT, 16, 1):
        raise refusal
    shape = tuple(tensor.shape[: tensor.ndim])
    if math.prod(shape) == 0:
        return np.empty(shape, ml_dtypes.bfloat16)  # there is nothing to share, not even an address
    if not tensor.data:
        raise BufferError("it has no memory")
    strides = tuple(2 * step for step in tensor.strides[: tensor.ndim]) if tensor.strides else None
    memory = _Memory(shape, strides, tensor.data + tensor.byte_offset)
    # Ours from here on: whoever uses the memory last has it freed.
    _set_name(capsule, ctypes.addressof(_USED[type(managed)]))
    if managed.deleter:
        free = _Deleter(managed.deleter)
        weakref.finalize(memory, free, address).atexit = False
    native = np.asarray(memory).view(ml_dtypes.bfloat16)
    if not isinstance(managed, _Versioned) or managed.flags & _IS_READ_ONLY:
        native.flags.writeable = False
    return native


class _Memory:
    """An address that NumPy reads 16-bit words at."""

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...] | None, address: int
    ) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "<u2",
            "shape": shape,
            "strides": strides,
            "data": (address, False),
        }
