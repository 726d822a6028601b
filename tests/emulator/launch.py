"""A kernel as ``cuattn.execute`` launches it, run by the emulator."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cuattn.abi import structs
from cuattn.jit.source import Unit
from cuattn.planning.plan import ITEMSIZE, KernelSpec
from emulator.build import build, machine


class EmulationError(Exception):
    """A launch did what no launch may do; the message says which thread did what where."""


@dataclass
class Settings:
    """How launches run, until changed."""

    mode: str = "checked"
    seed: int = 0  # 0: in order; others choose the order of threads and CTAs, and when copies land
    finds_races: bool = True
    root: Path | None = None  # of other kernel sources


settings = Settings()


class Array(ctypes.Structure):
    """machine/memory.h: the bytes from the first element in memory to the end of the last."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_size_t),
        ("bytes", ctypes.c_uint64),
        ("is_writable", ctypes.c_int32),
    )


class Launch(ctypes.Structure):
    """machine/launch.cpp."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("grid", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("smem_bytes", ctypes.c_int32),
        ("finds_races", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("arrays", ctypes.POINTER(Array)),
        ("num_arrays", ctypes.c_int32),
        ("message_bytes", ctypes.c_int32),
        ("message", ctypes.c_char_p),
    )


def extents(params: np.void, itemsize: int, out_itemsize: int, accumulator: int) -> Iterator[Array]:
    """The arrays that a parameter struct describes: a kernel may touch these and no more.

    ``itemsize`` is that of q, k, v and the gradients, ``out_itemsize`` of out and dout, and
    ``accumulator`` of lse, delta and dlse.
    """
    shape = params["shape"]
    names = params.dtype.names
    is_forward = "num_splits" in names
    batch, heads = int(shape["batch"]), int(shape["num_heads_q"])
    rows = batch * heads * int(shape["seqlen_q"])
    dims = int(shape["head_dim_v"])
    splits = int(params["num_splits"]) if is_forward else 1
    sizes = {
        "lse": rows * accumulator,
        "delta": rows * accumulator,
        "part_out": splits * rows * dims * 4,
        "part_lse": splits * rows * 4,
        "dout_cast": rows * dims * itemsize,
    }
    if not is_forward:
        sizes["dq_sum"] = int(params["dq_sum_size"]) * 4
    written = {"out", "lse", "part_out", "part_lse"} if is_forward else {"dq", "dk", "dv", "delta"}
    written |= {"dq_sum", "dout_cast"}
    for name in names:
        value = params[name]
        if name in sizes:
            address, nbytes = int(value), sizes[name]
        elif value.dtype.names and "data" in value.dtype.names:
            size = accumulator if name == "dlse" else itemsize
            size = out_itemsize if name in {"out", "dout"} else size
            address, nbytes = _strided(name, value, shape, size)
        else:
            continue
        if address and nbytes:
            yield Array(name.encode(), address, nbytes, name in written)


def _strided(name: str, tensor: np.void, shape: np.void, itemsize: int) -> tuple[int, int]:
    """Where an array of any strides begins, and its bytes."""
    of_queries = name in {"q", "out", "dout", "dq", "dlse"}
    counts = {
        "stride_batch": int(shape["batch"]),
        "stride_seqlen": int(shape["seqlen_q" if of_queries else "seqlen_k"]),
        "stride_head": int(shape["num_heads_q" if of_queries else "num_heads_kv"]),
    }
    if name != "dlse":
        has_dims_of_v = name in {"v", "out", "dout", "dv"}
        counts["stride_dim"] = int(shape["head_dim_v" if has_dims_of_v else "head_dim"])
    if 0 in counts.values():
        return 0, 0
    reach = [(count - 1) * int(tensor[stride]) for stride, count in counts.items()]
    first = sum(min(0, each) for each in reach)
    last = sum(max(0, each) for each in reach)
    return int(tensor["data"]) + first * itemsize, (last - first + 1) * itemsize


def emulate(
    path: Path, params: int, grid: int, block: int, smem_bytes: int, arrays: Iterable[Array]
) -> None:
    """Run every CTA of a grid of a built unit, with the parameter struct at an address.

    Raises
    ------
    EmulationError
        A thread did what it may not do, or nobody could go on.
    ValueError
        No device has such a grid.
    """
    # The limits of machine/cta.h and machine/shared_memory.h, whose arrays have no more places.
    for name, got, is_possible, expected in (
        ("block", block, 0 < block <= 1024 and block % 32 == 0, "whole warps of 32, to 1024"),
        ("smem_bytes", smem_bytes, 0 <= smem_bytes <= 227 * 1024, "0 to 227 KiB"),
        ("grid", grid, grid > 0, "at least 1"),
    ):
        if not is_possible:
            raise ValueError(f"{name}: got {got}; expected {expected}")
    given = list(arrays)
    message = ctypes.create_string_buffer(1 << 16)
    launch = Launch(
        ctypes.cast(ctypes.CDLL(str(path)).run, ctypes.c_void_p),
        params,
        grid,
        block,
        smem_bytes,
        settings.finds_races,
        settings.seed,
        (Array * len(given))(*given),
        len(given),
        len(message),
        ctypes.cast(message, ctypes.c_char_p),
    )
    if ctypes.CDLL(str(machine(settings.mode))).emulate(ctypes.byref(launch)):
        raise EmulationError(f"{path.stem}: {with_lines(message.value.decode(), path)}")


class EmulatedKernel:
    """What stands for ``cuattn.jit.launch.Kernel``."""

    def __init__(self, unit: Unit, spec: KernelSpec) -> None:
        self.params = getattr(structs, spec.params_struct).dtype
        self.block, self.smem_bytes = unit.num_threads, spec.smem_bytes
        config = dict(spec.config)
        names = [structs.DType(config[name]).name for name in ("dtype", "out_dtype")]
        itemsize, out_itemsize = (ITEMSIZE[name.lower()] for name in names)
        self.itemsizes = itemsize, out_itemsize, max(4, itemsize)
        self.path = build(unit, settings.mode, settings.root)

    def launcher(self, grid: int) -> Callable[[int, int, int], None]:
        """``launcher(stream, arguments, 0)``, as of a kernel on a device."""

        def launch(stream: int, arguments: int, extra: int) -> None:
            address = ctypes.c_void_p.from_address(arguments).value
            memory = (ctypes.c_uint8 * self.params.itemsize).from_address(address)
            arrays = extents(np.frombuffer(memory, self.params)[0], *self.itemsizes)
            emulate(self.path, address, grid, self.block, self.smem_bytes, arrays)

        return launch


def with_lines(text: str, path: Path) -> str:
    """A message with the source lines of the code addresses in it, innermost first."""
    found = re.search(r"\(code at (0x[0-9a-f]+)\)", text)
    if found is None or shutil.which("addr2line") is None:
        return text
    command = ("addr2line", "-e", str(path), "-i", found[1])
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    places = [re.sub(r".*/(\w+/[\w.]+:\d+).*", r"\1", line) for line in lines if line]
    return text.replace(found[0], f"in {', in '.join(places)}")
