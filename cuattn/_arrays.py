"""What an array is: its place, dtype and axes, without looking at one element.

With ``_foreign``, which makes one of another library's, the only file that knows NumPy and CuPy
arrays apart. An array becomes an ``ArraySpec``, plain hashable data that validation reads; a
``Layout`` gives its view in the canonical axes (batch, seqlen, heads, dim), in which the CPU engine
computes and the strides of a problem are told. CuPy is never imported here: who holds a CuPy array
has imported it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import ml_dtypes  # noqa: F401  (gives NumPy the dtype name "bfloat16")
import numpy as np

from cuattn._foreign import NEW_OUT
from cuattn._typing import ACCUMULATOR, Array
from cuattn.errors import ArgumentError, DTypeError, explain_argument

T = TypeVar("T")

#: The dtypes cuattn takes, native byte order only: another byte order is another key.
DTYPE_NAMES = {np.dtype(name): name for name in ACCUMULATOR}

#: Steps that the search for two overlapping elements may take before it counts as an overlap.
OVERLAP_WORK = 100_000

#: Bytes to which parts of one allocation are aligned, as allocations are at least.
ALIGNMENT = 256

#: New arrays of so many bytes in all share an allocation.
TOGETHER_BYTES = 1 << 24

AXES = "bshd"
LSE_AXES = "bhs"


class ArraySpec(NamedTuple):
    """An array without its elements. ``device`` is the CUDA ordinal, None for host memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    device: int | None = None
    misaligned: int = 0

    @property
    def place(self) -> str:
        """Where the array is, in words."""
        if self.device is None:
            return "an array in host memory"
        return f"an array on CUDA device {self.device}"


#: ``ArraySpec`` from a tuple of all its fields; the class itself takes twice as long.
_spec = functools.partial(tuple.__new__, ArraySpec)


def spec_of(array: Array) -> ArraySpec:
    """Describe a NumPy or CuPy array, as ``_foreign.taken`` gives."""
    if isinstance(array, np.ndarray):
        return _spec((array.shape, array.strides, array.dtype, None, 0))
    memory = array.data
    misaligned = memory.ptr % array.itemsize
    return _spec((array.shape, array.strides, array.dtype, memory.device_id, misaligned))


def normal(spec: ArraySpec) -> ArraySpec:
    """The spec without the strides that no element moves by."""
    if 0 in spec.shape:
        return spec._replace(strides=())
    pairs = zip(spec.shape, spec.strides, strict=True)
    return spec._replace(strides=tuple(stride if n > 1 else 0 for n, stride in pairs))


def check_dtype(name: str, spec: ArraySpec) -> str:
    """The dtype's name, or DTypeError for one that cuattn does not compute in."""
    known = DTYPE_NAMES.get(spec.dtype)
    if known is not None:
        return known
    expected = f"dtype {listed(ACCUMULATOR)}"
    if spec.dtype.newbyteorder("=") in DTYPE_NAMES:
        expected = "native byte order"
        remedy = f"convert with {name}.astype({name}.dtype.newbyteorder('='))"
    elif spec.dtype.kind == "c":
        remedy = "attention of complex numbers has no softmax; pass real arrays"
    elif spec.dtype == np.uint16 or spec.dtype.str == "|V2":  # as files hold bfloat16
        remedy = f"pass {name}.view('bfloat16') if these are its bits, or convert to a float dtype"
    elif spec.dtype.kind in "SUMmV" and spec.dtype.isbuiltin != 2:  # 2: of ml_dtypes
        remedy = "pass an array of real numbers"
    else:
        is_wide = spec.dtype.itemsize >= np.dtype("int64").itemsize
        remedy = f"convert with {name}.astype({'float64' if is_wide else 'float32'!r})"
    raise DTypeError(explain_argument(name, f"dtype {spec.dtype}", expected, remedy))


def parse_dtype(name: str, asked: Any, default: str, allowed: Iterable[str]) -> str:
    """The name of a dtype given as name, type or numpy.dtype; None is the default."""
    if asked is None:
        return default
    try:
        if type(asked).__module__ == "torch":
            asked = str(asked).removeprefix("torch.")
        known = DTYPE_NAMES.get(np.dtype(asked))
    except (TypeError, ValueError, SyntaxError):  # NumPy parses text of many forms
        known = None
    allowed = [each for each in ACCUMULATOR if each in allowed]
    if known in allowed:
        return str(known)
    expected = f"None or {listed(map(repr, allowed))}"
    remedy = "leave it out, and convert the result with astype"
    raise DTypeError(explain_argument(name, repr(asked), expected, remedy))


def check_like(
    name: str, spec: ArraySpec, shape: tuple[int, ...], dtype: np.dtype[Any], like: str, hint: str
) -> None:
    """Exactly this shape and dtype."""
    if spec.shape != shape:
        expected = f"shape {shape}{like}"
        raise ArgumentError(explain_argument(name, f"shape {spec.shape}", expected, hint))
    if spec.dtype != dtype:
        got, expected = f"dtype {spec.dtype}", f"dtype {dtype}{like}"
        remedy = f"convert with {name}.astype({str(dtype)!r})"
        raise DTypeError(explain_argument(name, got, expected, remedy))


def check_together(name: str, spec: ArraySpec, like_name: str, like: ArraySpec) -> None:
    """One place and, on a GPU, addresses that a load of one element can use."""
    if (spec.device is None) != (like.device is None):
        raise DTypeError(
            explain_argument(
                name,
                spec.place,
                f"{like.place} like {like_name}",
                "copy one with cupy.asarray or cupy.asnumpy: cuattn never moves data by itself",
            )
        )
    if spec.device != like.device:
        raise ArgumentError(
            explain_argument(
                name,
                spec.place,
                f"device {like.device} like {like_name}",
                f"copy it there: with cupy.cuda.Device({like.device}): {name}.copy()",
            )
        )
    if spec.device is not None:
        check_aligned(name, spec)


def check_aligned(name: str, spec: ArraySpec) -> None:
    """Every element lies where a load of one element can read it."""
    if not is_aligned(spec):
        raise ArgumentError(
            explain_argument(
                name,
                f"strides {spec.strides} bytes, first element {spec.misaligned} bytes past "
                "its alignment",
                f"an address and strides that are multiples of the itemsize {spec.dtype.itemsize}",
                f"pass {name}.copy()",
            )
        )


def is_aligned(spec: ArraySpec) -> bool:
    """Whether every element lies at a multiple of the itemsize."""
    moved = (s for n, s in zip(spec.shape, spec.strides, strict=True) if n > 1)
    return not spec.misaligned and all(s % spec.dtype.itemsize == 0 for s in moved)


def listed(names: Iterable[str]) -> str:
    """``a, b or c``, for messages."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def plain(array: Array) -> Array:
    """The array without what a NumPy subclass may change of its indexing and arithmetic."""
    if type(array) is not np.ndarray and isinstance(array, np.ndarray):
        return np.asarray(array)
    return array


class Layout:
    """Which axes an array has, and in what order, as letters out of "bshd".

    Attributes
    ----------
    letters : str
        Batch, sequence, heads, dim; for example "bhsd", or "sd" for one head of one sequence.
    """

    def __init__(self, letters: str) -> None:
        self.letters = letters
        self.lse_letters = "".join(axis for axis in LSE_AXES if axis in letters)
        self._order = tuple(letters.index(axis) for axis in AXES if axis in letters)
        self._insert = tuple(slice(None) if axis in letters else None for axis in AXES)
        self._lse_insert = tuple(slice(None) if axis in letters else None for axis in LSE_AXES)
        self._rows = tuple(self.lse_letters.index(axis) for axis in letters if axis != "d")
        self._lse_rows = tuple(letters.index(axis) for axis in self.lse_letters)

    def __repr__(self) -> str:
        return f"Layout({self.letters!r})"

    def canonical(self, values: Sequence[T], missing: T) -> tuple[T, ...]:
        """One value per axis, from the array's order to (batch, seqlen, heads, dim)."""
        at = dict(zip(self.letters, values, strict=True))
        return tuple(at.get(axis, missing) for axis in AXES)

    def own(self, values: Sequence[T]) -> tuple[T, ...]:
        """One value per axis, from (batch, seqlen, heads, dim) to the array's order."""
        return tuple(values[AXES.index(axis)] for axis in self.letters)

    def own_lse(self, values: Sequence[T]) -> tuple[T, ...]:
        """One value per axis, from (batch, heads, seqlen) to the axes that lse has."""
        return tuple(values[LSE_AXES.index(axis)] for axis in self.lse_letters)

    def canonical_lse(self, values: Sequence[T], missing: T) -> tuple[T, ...]:
        """One value per axis, from lse's axes to (batch, heads, seqlen)."""
        at = dict(zip(self.lse_letters, values, strict=True))
        return tuple(at.get(axis, missing) for axis in LSE_AXES)

    def view(self, array: Array) -> Array:
        """The same memory in the axes (batch, seqlen, heads, dim)."""
        array = plain(array)
        return array if self.letters == AXES else array.transpose(self._order)[self._insert]

    def lse_view(self, array: Array) -> Array:
        """The same memory in the axes (batch, heads, seqlen)."""
        array = plain(array)
        return array if len(self.lse_letters) == len(LSE_AXES) else array[self._lse_insert]

    def per_row(self, lse: Array) -> Array:
        """A view of lse, or of anything shaped like it, that broadcasts against out."""
        return lse.transpose(self._rows)[..., None]

    def as_lse(self, per_row: Array) -> Array:
        """A view in lse's axes of one value per row, shaped like out less its last axis."""
        return per_row.transpose(self._lse_rows)


LAYOUTS = {letters: Layout(letters) for letters in ("bshd", "bhsd", "shd", "hsd", "bsd", "sd")}


def layout_for(layout: object, name: str, shape: tuple[int, ...]) -> Layout:
    """The layout of an array of that shape, or an error that lists those there are."""
    known = LAYOUTS.get(layout) if isinstance(layout, str) else None
    if known is None:
        error = ArgumentError if isinstance(layout, str) else DTypeError
        expected = f"one of {', '.join(LAYOUTS)}"
        remedy = "name the axes of q, k and v: b batch, s sequence, h heads, d dim"
        raise error(explain_argument("layout", repr(layout), expected, remedy))
    ndim = len(shape)
    if len(known.letters) == ndim:
        return known
    fitting = [repr(letters) for letters in LAYOUTS if len(letters) == ndim]
    remedy = f"pass layout={listed(fitting)}" if fitting else "reshape to 2, 3 or 4 axes"
    expected = f"{len(known.letters)} axes for layout={layout!r}"
    raise ArgumentError(explain_argument(name, f"shape {shape}, {ndim} axes", expected, remedy))


def side_by_side(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The byte at which each part of one allocation begins, of parts of so many bytes; the end."""
    begins, end = [], 0
    for size in sizes:
        begins.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return begins, end


@dataclasses.dataclass(frozen=True, slots=True)
class NewArrays:
    """C-contiguous arrays that every call makes anew: NumPy's, or in CuPy's pool.

    On a device, small ones lie in one piece of memory, which is freed with the last of them: asking
    the pool takes as long as half of what makes an array. Large ones can be freed one by one.
    """

    device: int | None
    #: Shape and dtype of each, and the byte at which it lies; None for one that is not made.
    places: tuple[tuple[tuple[int, ...], np.dtype[Any], int] | None, ...]
    nbytes: int  # of the one piece, or 0

    @staticmethod
    def of(device: int | None, *arrays: tuple[tuple[int, ...], np.dtype[Any]] | None) -> NewArrays:
        """Arrays of these shapes and dtypes; None where there is to be none."""
        sizes = (0 if each is None else math.prod(each[0]) * each[1].itemsize for each in arrays)
        begins, end = side_by_side(sizes)
        places = tuple(each and (*each, at) for each, at in zip(arrays, begins, strict=True))
        several = len(arrays) - arrays.count(None) > 1
        is_one = device is not None and several and end <= TOGETHER_BYTES
        return NewArrays(device, places, end if is_one else 0)

    def __call__(self) -> list[Array]:
        """Make them; the device must be current."""
        if self.device is None:
            return [place and np.empty(place[0], place[1]) for place in self.places]
        cupy = sys.modules["cupy"]
        # why not cupy.empty: it makes this call after one more
        ndarray = cupy.ndarray
        if self.nbytes == 0:
            return [place and ndarray(place[0], place[1]) for place in self.places]
        memory = cupy.cuda.alloc(self.nbytes)
        return [place and ndarray(place[0], place[1], memory + place[2]) for place in self.places]


_STAY = contextlib.nullcontext()


def on_device(device: int | None) -> contextlib.AbstractContextManager[Any]:
    """Make the arrays' device the current one, and restore the caller's afterwards."""
    if device is None:
        return _STAY
    cuda = sys.modules["cupy"].cuda
    if cuda.runtime.getDevice() == device:
        return _STAY
    guard: contextlib.AbstractContextManager[Any] = cuda.Device(device)
    return guard


class _Extent:
    """A memory range that NumPy may reason about and must not read."""

    def __init__(self, spec: ArraySpec, address: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{spec.dtype.itemsize}",
            "shape": spec.shape,
            "strides": spec.strides,
            "data": (address, True),
        }


def _extent(spec: ArraySpec, address: int) -> np.ndarray[Any, Any]:
    """Stand in for an array at an address, for overlap arithmetic only (device memory too)."""
    return np.asarray(_Extent(spec, address))


def _shares(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Exact, unless the answer takes too long: then True."""
    try:
        # The stubs know only the two named bounds.
        return np.shares_memory(a, b, max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(spec: ArraySpec) -> bool:
    """Whether two elements of one array share memory.

    Two elements that share memory differ along some axis; shift both so that the first has index 0
    there. So it is enough to ask, axis by axis, whether slice 0 meets any later slice.
    """
    array = _extent(spec, 1 << 62)  # far from both ends: strides may lead either way
    along = (np.moveaxis(array, axis, 0) for axis in range(array.ndim))
    return any(_shares(moved[:1], moved[1:]) for moved in along if len(moved) > 1)


def byte_bounds(spec: ArraySpec) -> tuple[int, int]:
    """The first byte of an array and the one behind its last, from where its first element is."""
    middle = 1 << 62
    low, high = np.lib.array_utils.byte_bounds(_extent(spec, middle))
    return low - middle, high - middle


def share_memory(a: Array, b: Array) -> bool:
    """Whether two arrays of one place have a byte in common (interleaved views do not)."""
    if isinstance(a, np.ndarray):
        return _shares(a, b)
    pair = (_extent(spec_of(array), array.data.ptr) for array in (a, b))
    return _shares(*pair)


def check_writable(name: str, array: Array) -> None:
    """Refuse host memory that must not be written."""
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        got, expected = "a read-only array", "an array that may be written"
        raise ArgumentError(explain_argument(name, got, expected, NEW_OUT))


def check_destination(name: str, array: Array, inputs: dict[str, Array]) -> None:
    """What depends on flags and addresses, and so is asked at every call."""
    check_writable(name, array)
    for other, read in inputs.items():
        if share_memory(array, read):
            got, expected = f"memory that {other} reads", "memory of its own"
            raise ArgumentError(explain_argument(name, got, expected, NEW_OUT))
