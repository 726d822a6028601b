"""NVRTC out of a library of one's own, with the functions of CuPy's binding that cuattn calls.

CuPy loads the NVRTC of the CUDA version that it was built for; this one takes any, so that kernels
are compiled by the oldest that users have too.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from importlib import metadata
from pathlib import Path


class NVRTCError(RuntimeError):
    """A call that failed, with its status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def library_of(distribution: str, name: str) -> Path:
    """A library of an installed wheel.

    Raises
    ------
    metadata.PackageNotFoundError, FileNotFoundError
        The wheel is not installed, or does not hold it.
    """
    for file in metadata.files(distribution) or ():
        if file.name == name:
            return Path(str(file.locate())).resolve(strict=True)
    raise FileNotFoundError(f"{distribution} holds no {name}")


class Nvrtc:
    """What ``cupy_backends.cuda.libs.nvrtc`` is, made of one library."""

    NVRTCError = NVRTCError

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.nvrtcGetErrorString.restype = c_char_p
        names = POINTER(c_char_p)
        for name, types in (
            ("nvrtcVersion", (POINTER(c_int), POINTER(c_int))),
            ("nvrtcGetNumSupportedArchs", (POINTER(c_int),)),
            ("nvrtcGetSupportedArchs", (POINTER(c_int),)),
            ("nvrtcCreateProgram", (POINTER(c_void_p), c_char_p, c_char_p, c_int, names, names)),
            ("nvrtcDestroyProgram", (POINTER(c_void_p),)),
            ("nvrtcCompileProgram", (c_void_p, c_int, names)),
            ("nvrtcGetProgramLogSize", (c_void_p, POINTER(c_size_t))),
            ("nvrtcGetProgramLog", (c_void_p, c_char_p)),
            ("nvrtcGetCUBINSize", (c_void_p, POINTER(c_size_t))),
            ("nvrtcGetCUBIN", (c_void_p, c_char_p)),
        ):
            getattr(self._library, name).argtypes = types

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise NVRTCError(status, self._library.nvrtcGetErrorString(status).decode())

    def _bytes(self, name: str, program: int) -> bytes:
        size = c_size_t()
        self._call(f"{name}Size", program, byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(name, program, buffer)
        return buffer.raw

    def getVersion(self) -> tuple[int, int]:
        major, minor = c_int(), c_int()
        self._call("nvrtcVersion", byref(major), byref(minor))
        return major.value, minor.value

    def getSupportedArchs(self) -> tuple[int, ...]:
        count = c_int()
        self._call("nvrtcGetNumSupportedArchs", byref(count))
        archs = (c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", archs)
        return tuple(archs)

    def createProgram(
        self, text: str, name: str, headers: list[bytes], include_names: list[bytes]
    ) -> int:
        program, strings = c_void_p(), c_char_p * len(headers)
        self._call(
            "nvrtcCreateProgram",
            *(byref(program), text.encode(), name.encode(), len(headers)),
            *(strings(*headers), strings(*include_names)),
        )
        assert program.value is not None
        return program.value

    def destroyProgram(self, program: int) -> None:
        self._call("nvrtcDestroyProgram", byref(c_void_p(program)))

    def compileProgram(self, program: int, options: tuple[str, ...]) -> None:
        flags = (c_char_p * len(options))(*(option.encode() for option in options))
        self._call("nvrtcCompileProgram", program, len(options), flags)

    def getProgramLog(self, program: int) -> str:
        return self._bytes("nvrtcGetProgramLog", program).decode().rstrip("\0")

    def getCUBIN(self, program: int) -> bytes:
        """All but the last byte, which CuPy's binding takes for a terminator."""
        return self._bytes("nvrtcGetCUBIN", program)[:-1]
