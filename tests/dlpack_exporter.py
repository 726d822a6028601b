"""A foreign array: an object of no library that shares memory over DLPack, written byte by byte.

source: DLPack specification 1.0, dlpack.h and "Python Specification for DLPack".
"""

import ctypes

import numpy as np

#: DLDeviceType of host and of CUDA memory.
CPU, CUDA = 1, 2

#: DLDataTypeCode by NumPy's kind; ml_dtypes' bfloat16 is of kind V.
CODES = {"i": 0, "u": 1, "f": 2, "V": 4, "c": 5, "b": 6}

#: DLTensor, in which nothing needs padding.
TENSOR = np.dtype(
    [
        ("data", "u8"),
        ("device", "i4", 2),
        ("ndim", "i4"),
        ("code", "u1"),
        ("bits", "u1"),
        ("lanes", "u2"),
        ("shape", "u8"),
        ("strides", "u8"),
        ("byte_offset", "u8"),
    ]
)
#: DLManagedTensor and DLManagedTensorVersioned.
OLD = np.dtype([("tensor", TENSOR), ("context", "u8"), ("deleter", "u8")])
NEW = np.dtype(
    [
        ("version", "u4", 2),
        ("context", "u8"),
        ("deleter", "u8"),
        ("flags", "u8"),
        ("tensor", TENSOR),
    ]
)
NAMES = {OLD: ctypes.c_char_p(b"dltensor"), NEW: ctypes.c_char_p(b"dltensor_versioned")}

new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", ctypes.pythonapi))

is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)

#: What consumers may hold, by address of the managed tensor, until they give it back.
held = {}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def give_back(address):
    """The deleter of every managed tensor."""
    held.pop(address, None)


class Exporter:
    """The memory of a NumPy or CuPy array, under no interface but DLPack's.

    ``asked`` gathers the arguments of every request. ``changes`` are fields of the tensor that say
    something else than the array.
    """

    def __init__(
        self, array, *, read_only=False, copied=False, versioned=True, byte_offset=0, **changes
    ):
        self.array, self.flags, self.versioned = array, int(read_only) + 2 * int(copied), versioned
        self.byte_offset, self.changes, self.asked = byte_offset, changes, []
        # why kept: one that nobody takes needs no destructor, which would run amid an error
        self.capsules = {}

    @property
    def address(self):
        host = isinstance(self.array, np.ndarray)
        return self.array.ctypes.data if host else self.array.data.ptr

    def __dlpack_device__(self):
        return (CPU, 0) if isinstance(self.array, np.ndarray) else (CUDA, self.array.device.id)

    def __dlpack__(self, **request):
        self.asked.append(request)
        versioned = self.versioned and (request.get("max_version") or (0, 0)) >= (1, 0)
        array, kind = self.array, NEW if versioned else OLD
        lengths = np.array([array.shape, [s // array.itemsize for s in array.strides]], "i8")
        managed = np.zeros((), kind)
        managed["deleter"] = ctypes.cast(give_back, ctypes.c_void_p).value
        tensor = managed["tensor"]
        tensor["data"], tensor["byte_offset"] = self.address - self.byte_offset, self.byte_offset
        tensor["device"], tensor["ndim"] = self.__dlpack_device__(), array.ndim
        tensor["code"], tensor["bits"] = CODES[array.dtype.kind], 8 * array.itemsize
        tensor["lanes"] = 1
        tensor["shape"], tensor["strides"] = lengths.ctypes.data, lengths[1:].ctypes.data
        if versioned:
            managed["version"], managed["flags"] = (1, 0), self.flags
        for name, value in self.changes.items():
            tensor[name] = value
        held[managed.ctypes.data] = managed, lengths, array
        capsule = new_capsule(managed.ctypes.data, NAMES[kind], None)
        self.capsules[managed.ctypes.data] = capsule, NAMES[kind]
        return capsule

    def lent(self):
        """How many consumers took a capsule, and have not given its memory back."""
        taken = (at for at, (capsule, name) in self.capsules.items() if not is_named(capsule, name))
        return sum(at in held for at in taken)
